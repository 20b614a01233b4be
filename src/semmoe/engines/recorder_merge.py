"""Merge what the ranks of a server recorded into one trace or one set of counts."""

import shutil
from pathlib import Path

import numpy as np

from semmoe.engines.recorder_session import load_counts
from semmoe.files import atomic_directory, load_json, save_arrays, save_json
from semmoe.streams import Merged, agreed_header, merge
from semmoe.trace import TraceHeader, shard_paths


def merge_traces(run: Path, out: Path) -> Merged:
    """Write the requests of every `rank-*` of `run` to a trace directory readable by its owner only."""
    ranks = [path for path in sorted(run.glob("rank-*")) if shard_paths(path)]
    if not ranks:
        raise ValueError(f"{run} holds no request that has ended")
    return merge(ranks, out)


def merge_counts(run: Path, out: Path) -> Merged:
    """Write the sum of every `counts-*` of `run` to a directory with `counts.json` and `counts.safetensors`."""
    parts = sorted(run.glob("counts-*.safetensors"))
    if not parts:
        raise ValueError(f"{run} holds no counts")
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out")
    header = agreed_header({path: load_json(path.with_suffix(".json"), TraceHeader) for path in parts})
    total: dict[str, np.ndarray] = {}
    for path in parts:
        counts = load_counts(path)
        _check_counts(path, counts, header)
        total = {name: array + total.get(name, 0) for name, array in counts.items()}
    with atomic_directory(out, private=True) as staged:
        save_json(staged / "counts.json", header, private=True)
        save_arrays(staged / "counts.safetensors", total, private=True)
    return Merged(out=out, requests=0, tokens=int(total["tokens"][0]))


def remove_parts(run: Path) -> None:
    """Remove the files of the ranks after merging, so that users' text is not stored twice."""
    for path in run.glob("rank-*"):
        shutil.rmtree(path)
    for path in run.glob("counts-*"):
        path.unlink()


def _check_counts(path: Path, counts: dict[str, np.ndarray], header: TraceHeader) -> None:
    L, E = header.fingerprint.num_layers, header.fingerprint.num_experts
    for name, shape in (("activations", (L, E)), ("transitions", (L - 1, E, E)), ("tokens", (1,))):
        array = counts[name]
        if array.shape != shape:
            raise ValueError(f"{path}: {name} has shape {array.shape}, expected {shape}")
        if array.dtype != np.int64:
            raise ValueError(f"{path}: {name} has type {array.dtype}, expected int64")
