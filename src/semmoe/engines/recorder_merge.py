"""Merge what the ranks of a server recorded into one trace or one set of counts."""

import heapq
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semmoe.core import RoutingTrace
from semmoe.engines.recorder_session import load_counts
from semmoe.files import array_shape, atomic_directory, load_json, save_arrays, save_json
from semmoe.trace import TraceHeader, TraceWriter, read_header, read_shards, shard_paths


@dataclass(frozen=True, kw_only=True)
class Merged:
    out: Path
    requests: int  # 0 for counts, which do not distinguish requests
    tokens: int


def merge_traces(run: Path, out: Path) -> Merged:
    """Write the requests of every `rank-*` of `run` to a trace directory readable by its owner only."""
    ranks = [path for path in sorted(run.glob("rank-*")) if shard_paths(path)]
    if not ranks:
        raise ValueError(f"{run} holds no request that has ended")
    return join_traces(ranks, out)


def join_traces(traces: Sequence[Path], out: Path) -> Merged:
    """Write the requests of several trace directories to another one.

    They were recorded at the same time, each in order of ends: so they are interleaved, each as evenly as it goes, lest
    the newest requests of the joined trace be those of the last rank.
    """
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out")
    header = _agreed({path: read_header(path) for path in traces})
    tokens = 0
    with atomic_directory(out, private=True) as staged, TraceWriter(staged, header, private=True) as writer:
        for _, _, trace, r in heapq.merge(*(_by_age(path, i) for i, path in enumerate(traces))):
            writer.append_one(trace, r)
            tokens += int(trace.request_offsets[r + 1] - trace.request_offsets[r])
        requests = writer.num_requests
    return Merged(out=out, requests=requests, tokens=tokens)


def _by_age(path: Path, number: int) -> Iterator[tuple[float, int, RoutingTrace, int]]:
    """Every request of a trace by its place, from 0 to 1, shard by shard, since it may be larger than memory."""
    total = sum(array_shape(shard, "request_lengths")[0] for shard in shard_paths(path))
    done = 0
    for trace in read_shards(path):
        for r in range(trace.num_requests):
            yield (done + r + 0.5) / total, number, trace, r
        done += trace.num_requests


def merge_counts(run: Path, out: Path) -> Merged:
    """Write the sum of every `counts-*` of `run` to a directory with `counts.json` and `counts.safetensors`."""
    parts = sorted(run.glob("counts-*.safetensors"))
    if not parts:
        raise ValueError(f"{run} holds no counts")
    if out.exists():
        raise ValueError(f"{out} exists: choose another --out")
    header = _agreed({path: load_json(path.with_suffix(".json"), TraceHeader) for path in parts})
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


def _agreed(headers: dict[Path, TraceHeader]) -> TraceHeader:
    """The header that all ranks share. Raises ValueError if they ran different models."""
    first = next(iter(headers.values()))
    for path, header in headers.items():
        difference = first.fingerprint.mismatch(header.fingerprint)
        if difference is not None:
            raise ValueError(f"{path} is of another model or tokenizer: {difference}")
    return first


def _check_counts(path: Path, counts: dict[str, np.ndarray], header: TraceHeader) -> None:
    L, E = header.fingerprint.num_layers, header.fingerprint.num_experts
    for name, shape in (("activations", (L, E)), ("transitions", (L - 1, E, E)), ("tokens", (1,))):
        array = counts[name]
        if array.shape != shape:
            raise ValueError(f"{path}: {name} has shape {array.shape}, expected {shape}")
        if array.dtype != np.int64:
            raise ValueError(f"{path}: {name} has type {array.dtype}, expected int64")
