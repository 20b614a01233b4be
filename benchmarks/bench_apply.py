"""Relabelling at scale: seconds, speed and peak memory on a synthetic checkpoint of any size.

    python benchmarks/bench_apply.py [--gib 30 --layers 48 --experts 128 --shards 16 --layout experts|packed]

The source is sparse (its tensors are holes, so it needs no room), the copy is real. Beside it the disk's own speed:
`shutil.copyfile` of one shard, before and after. Both are flushed to the disk before the clock stops. `seconds` is what
a user waits, verification included. Prints a table and one JSON line.
"""

import argparse
import json
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np

from semmoe.checkpoint.relabel import relabel
from semmoe.core import Placement, Plan
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

HIDDEN = 2048


def tensors_of(layers: int, experts: int, nbytes: int, layout: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes, BF16: per MoE layer a gate and experts of three matrices, of `nbytes` bytes in all."""
    width = max(1, nbytes // (layers * experts * 3 * HIDDEN * 2))
    shapes: dict[str, tuple[int, ...]] = {}
    for l in range(layers):
        mlp = f"model.layers.{l}.mlp"
        shapes[f"{mlp}.gate.weight"] = (experts, HIDDEN)
        if layout == "packed":
            shapes |= {f"{mlp}.experts.gate_up_proj": (experts, 2 * width, HIDDEN)}
            shapes |= {f"{mlp}.experts.down_proj": (experts, HIDDEN, width)}
        else:
            for e in range(experts):
                shapes |= {f"{mlp}.experts.{e}.{p}_proj.weight": (width, HIDDEN) for p in ("gate", "up")}
                shapes[f"{mlp}.experts.{e}.down_proj.weight"] = (HIDDEN, width)
    return shapes


def make(path: Path, shapes: dict[str, tuple[int, ...]], shards: int, layers: int, experts: int) -> None:
    """A checkpoint directory whose shards are headers and holes."""
    path.mkdir()
    names, files = list(shapes), {}
    size = -(-len(names) // shards)
    for i in range(0, len(names), size):
        file = f"model-{i // size + 1:05}-of-{shards:05}.safetensors"
        files |= dict.fromkeys(names[i : i + size], file)
        sparse(path / file, {name: shapes[name] for name in names[i : i + size]})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 8, "vocab_size": 1000}
    (path / "config.json").write_text(json.dumps(sizes))


def sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, at = {}, 0
    for name, shape in shapes.items():
        end = at + 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)


def random_plan(layers: int, experts: int) -> Plan:
    rng = np.random.default_rng(0)
    rows = np.stack([rng.permutation(experts) for _ in range(layers)]).astype(np.int32)
    f = Fingerprint(model="synthetic", architecture_hash="", tokenizer_hash="", vocab_size=1000, num_layers=layers,
                    num_experts=experts, top_k=8)  # fmt: skip
    placement = Placement(physical_to_logical_map=rows, num_experts=experts, ep_size=8)
    return Plan(
        topology=Topology(ep_size=8),
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=f,
        method="random",
    )


def flush(path: Path) -> None:
    """Wait until a file, or the files of a directory, are on the disk."""
    for file in [path] if path.is_file() else sorted(path.iterdir()):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())


def copy_speed(shard: Path, target: Path) -> float:
    """GB/s of a plain copy of one shard, flushed."""
    started = time.perf_counter()
    shutil.copyfile(shard, target)
    flush(target)
    seconds = time.perf_counter() - started
    target.unlink()
    return shard.stat().st_size / seconds / 1e9


def relabel_timed(plan: Plan, folder: Path) -> dict[str, float | int]:
    """Relabel `folder`/model to `folder`/new; seconds until it returned and until it was flushed."""
    marks: dict[str, float] = {}

    def stage(what: str, total: int):
        marks[what] = time.perf_counter()
        return lambda done: None

    started = time.perf_counter()
    done = relabel(plan, folder / "model", folder / "new", stage=stage)
    returned = time.perf_counter()
    flush(folder / "new")
    flushed = time.perf_counter() - started
    return {
        "gib": done.bytes / 2**30, "seconds": returned - started, "verify_seconds": returned - marks["verifying"],
        "flushed_seconds": flushed, "flushed_gb_per_s": done.bytes / flushed / 1e9, "renamed": done.tensors_renamed,
        "permuted": done.tensors_permuted, "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=30)
    for name, value in (("layers", 48), ("experts", 128), ("shards", 16)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--layout", choices=("experts", "packed"), default="experts")
    parser.add_argument("--folder", help="where to work; the system's temporary folder if not given")
    a = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=a.folder) as name:
        folder, nbytes = Path(name), int(a.gib * 2**30)
        free = shutil.disk_usage(folder).free
        if free < 1.1 * nbytes:
            parser.error(f"{free / 2**30:.1f} GiB are free in {folder}, too few for --gib {a.gib}")
        make(folder / "model", tensors_of(a.layers, a.experts, nbytes, a.layout), a.shards, a.layers, a.experts)
        shard = next((folder / "model").glob("*.safetensors"))
        speeds = [copy_speed(shard, folder / "copy")]
        row = relabel_timed(random_plan(a.layers, a.experts), folder)
        speeds.append(copy_speed(shard, folder / "copy"))
        row["copyfile_gb_per_s"] = sum(speeds) / 2
    print("  ".join(f"{k} {v:,.2f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
    print("\n" + json.dumps({"settings": vars(a), "results": row}))


if __name__ == "__main__":
    main()
