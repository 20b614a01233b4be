"""CPU time of recording a live server, in microseconds a token, on one core.

    OMP_NUM_THREADS=1 python benchmarks/bench_recorder.py [--layers 48] [--experts 128] [--top-k 8] [--tokens 200000]

Forward passes of 64 decode tokens of 64 requests, and of 2,048 prefill tokens of 8 requests; every request of 512
tokens is finished and written. Prints configuration, bounds, a table and one JSON line. `observe` is the time of that
call; `in all` adds reading the control file, splitting rows by request and writing shards. `hooks` are what runs inside
a pass at every layer: on the host, or to the buffer that captured passes need, where they run whether routing is
recorded or not.
"""

import argparse
import json
import platform
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from semmoe.engines.private import open_folder
from semmoe.engines.step import Pass, Step
from semmoe.live.recorder.files import Control, write_control
from semmoe.live.recorder.memory import Rows
from semmoe.live.recorder.passes import PassRecorder
from semmoe.live.recorder.recorder import LiveRecorder
from semmoe.topology import Fingerprint

LENGTH = 512  # tokens of a request
Fed = tuple[list[str], np.ndarray, np.ndarray]


def decode(tokens: int) -> Iterator[tuple[Fed, list[str]]]:
    """Passes of 64 requests with a token each, and the requests that end with the pass."""
    for first in range(0, tokens // LENGTH, 64):
        names = [f"request-{first + i:08d}" for i in range(64)]
        for position in range(LENGTH):
            ended = names if position == LENGTH - 1 else []
            yield (names, np.arange(64), np.full(64, position)), ended


def prefill(tokens: int) -> Iterator[tuple[Fed, list[str]]]:
    """Passes of 8 requests with 256 tokens each, half a request."""
    for first in range(0, tokens // LENGTH, 8):
        names = [f"request-{first + i:08d}" for i in range(8)]
        for start in range(0, LENGTH, 256):
            positions = np.tile(np.arange(start, start + 256), 8)
            yield (names, np.repeat(np.arange(8), 256), positions), names if start else []


def measure(kind: str, f: Fingerprint, tokens: int, **options: object) -> dict[str, object]:
    rng = np.random.default_rng(0)
    experts = rng.random((2048, f.num_layers, f.num_experts)).argpartition(f.top_k, axis=2)[..., : f.top_k]
    experts, ids = experts.astype(np.int32), rng.integers(0, f.vocab_size, 2048)
    observe, slowest, count = 0.0, 0.0, 0
    with tempfile.TemporaryDirectory() as folder:
        recorder = LiveRecorder(Path(folder) / "control", f, 0)
        open_folder(recorder.folder)
        write_control(recorder.folder, Control(run="bench", recording=True, **options))
        while not recorder.recording:
            time.sleep(0.01)
        for (names, rows, positions), ended in {"decode": decode, "prefill": prefill}[kind](tokens):
            begin = time.perf_counter()
            if recorder.recording:
                before = time.thread_time()
                recorder.observe(names, Rows(rows, positions, ids[: len(rows)], experts[: len(rows)]))
                observe += time.thread_time() - before
            for name in ended:
                recorder.finish(name, ids[:256])
            slowest = max(slowest, time.perf_counter() - begin)
            count += len(rows)
        recorder.close()
        status = recorder.status
    assert status.state == "stopped", status
    return {
        "passes": kind, **options, "tokens": count, "recorded": status.tokens, "slowest_pass_ms": 1e3 * slowest,
        "observe_us": 1e6 * observe / count, "all_us": status.cpu_us_per_token,
    }  # fmt: skip


class Dropped:
    """Records nothing of what it is told."""

    def __init__(self, recording: bool) -> None:
        self.recording = recording

    def observe(self, *told: object) -> None: ...

    def finish(self, *told: object) -> None: ...


def hooks(f: Fingerprint, buffered: bool, recording: bool, tokens: int = 64, passes: int = 50) -> dict[str, object]:
    """The hooks of decode passes on this device, one core: of all layers, and the end of the pass."""
    buffer = torch.zeros((tokens, f.num_layers, f.top_k), dtype=torch.int32) if buffered else None
    recorder = PassRecorder(Dropped(recording), f.num_layers, buffer)
    rows, generator = np.arange(tokens), torch.Generator().manual_seed(0)
    step = Step(rows, rows, rows, rows, [str(row) for row in rows], np.ones(tokens, bool))
    ids = torch.randint(f.num_experts, (tokens, f.top_k), generator=generator)
    weights, begin = torch.rand(ids.shape, generator=generator), time.thread_time()
    for _ in range(passes):
        recorder.begin(Pass(lambda: step, decodes=True))
        for layer in range(f.num_layers):
            if recorder.hooked:
                recorder.observe(layer, ids, weights)
        recorder.end()
        recorder.tell(slice(None))
    us = 1e6 * (time.thread_time() - begin) / (passes * tokens)
    return {"hooks": "buffer" if buffered else "host", "recording": recording, "us": us}


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("layers", 48), ("experts", 128), ("top-k", 8), ("tokens", 200_000)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    f = Fingerprint(
        model="bench", architecture_hash="a", tokenizer_hash="t", vocab_size=150_000, num_layers=a.layers,
        num_experts=a.experts, top_k=a.top_k,
    )  # fmt: skip
    print(f"{platform.machine()}, {a.layers} layers, {a.experts} experts, top-{a.top_k}, int32 expert ids")
    print(f"bound: {a.layers * a.top_k} expert ids per token to check and to narrow\n")
    results = [
        measure(kind, f, a.tokens, **options) for options in ({}, {"sample": 0.1}) for kind in ("decode", "prefill")
    ]
    print(f"{'passes':8} {'mode':16} {'observe us/token':>17} {'in all us/token':>16} {'slowest pass ms':>16}")
    for r in results:
        mode = f"sample {r.get('sample', 1.0)}"
        print(f"{r['passes']:8} {mode:16} {r['observe_us']:17.2f} {r['all_us']:16.2f} {r['slowest_pass_ms']:16.1f}")
    print(f"\n{'hooks':8} {'recording':16} {'us/token':>17}")
    inside = [hooks(f, buffered, recording) for buffered in (False, True) for recording in (False, True)]
    for r in inside:
        print(f"{r['hooks']:8} {'on' if r['recording'] else 'off':16} {r['us']:17.2f}")
    shape = {"layers": a.layers, "experts": a.experts, "top_k": a.top_k}
    print(json.dumps({**shape, "results": results, "hooks": inside}))


if __name__ == "__main__":
    main()
