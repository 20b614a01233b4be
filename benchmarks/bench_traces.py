"""Traces that are larger than memory: what `semmoe trace` and `semmoe solve` take of time and memory.

    python benchmarks/bench_traces.py [--tokens 100000000] [--folder DIR] [--keep]

Writes a trace of the shipped model's shape, whose tokens choose experts by id, in shards of 262,144 tokens as a profile
does, then runs each command in a process of its own. Prints seconds, tokens a second and the most memory that each had.
"""

import argparse
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from semmoe.core import DECODE
from semmoe.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.files import save_arrays, save_json
from semmoe.trace import TraceHeader

SHARD, LENGTH = 1 << 18, 256  # tokens of a shard and of a request
COMMANDS = {
    "info": ["trace", "info", "{trace}"],
    "merge": ["trace", "merge", "{trace}", "--out", "{folder}/merged"],
    "sample": ["trace", "sample", "{trace}", "--tokens", "4194304", "--out", "{folder}/sample"],
    "solve": ["solve", "{trace}", "--ep-size", "4", "--attention", "dp", "--out", "{folder}/plan"],
}


def write(path: Path, tokens: int) -> None:
    """A trace of so many tokens: an id has favourite experts, of which a token takes some."""
    f, rng = fingerprint_of(str(MODEL)), np.random.default_rng(0)
    save_json(path / "trace.json", TraceHeader(fingerprint=f, dataset_hash="synthetic", settings={}))
    favourites = rng.random((f.vocab_size, f.num_layers, f.num_experts)).argsort(axis=2)[..., : 2 * f.top_k]
    for shard in range(-(-tokens // SHARD)):
        ids = rng.integers(f.vocab_size, size=SHARD, dtype=np.int32)
        first = rng.integers(f.top_k, size=SHARD)
        places = first[:, None, None] + np.arange(f.top_k)
        experts = np.take_along_axis(favourites[ids], np.broadcast_to(places, (SHARD, f.num_layers, f.top_k)), axis=2)
        requests = SHARD // LENGTH
        arrays = {"token_ids": ids, "expert_ids": experts.astype(np.uint8), "phase": np.full(SHARD, DECODE, np.uint8),
                  "prompt_ids": ids[: requests * 16], "request_lengths": np.full(requests, LENGTH),
                  "prompt_lengths": np.full(requests, 16)}  # fmt: skip
        save_arrays(path / f"shard-{shard:05d}.safetensors", arrays)


def run(words: list[str]) -> tuple[float, float]:
    """Seconds, and gigabytes of memory that one command had at most."""
    began = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", "from semmoe.cli import main; main()", *words],
                               stdout=subprocess.DEVNULL)  # fmt: skip
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} failed")
    return time.perf_counter() - began, used.ru_maxrss * 1024 / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000_000)
    parser.add_argument("--folder", type=Path, help="where the trace is written; by default a temporary one")
    parser.add_argument("--only", nargs="+", choices=COMMANDS, default=list(COMMANDS))
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory(prefix="semmoe-", dir=given.folder) as scratch:
        folder = Path(scratch)
        write(folder / "trace", given.tokens)
        size = sum(path.stat().st_size for path in (folder / "trace").iterdir())
        print(f"{given.tokens:,} tokens, {size / 1e9:.2f} GB on disk, {os.cpu_count()} cores, {platform.machine()}")
        for name in given.only:
            words = [word.format(trace=folder / "trace", folder=folder) for word in COMMANDS[name]]
            seconds, memory = run(words)
            print(f"  {name:8}{seconds:8.1f} s {given.tokens / seconds / 1e6:8.2f} million tokens a second "
                  f"{memory:6.2f} GB", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
