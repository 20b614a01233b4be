"""Traces that are larger than memory: counted, joined and sampled shard by shard."""

import heapq
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.core import DECODE, RoutingTrace
from semmoe.io.files import atomic_directory, check_output
from semmoe.traces import trace as store
from semmoe.traces.affinity import expert_load
from semmoe.traces.routing import RoutingWarning, Tally
from semmoe.traces.split import draw_requests

MOST_IDS = 1 << 27  # expert ids of a trace that is read whole
Progress = Callable[[int], None]  # called with the number of routed tokens done since the last call


@dataclass(frozen=True, kw_only=True)
class Merged:
    """The trace that was written."""

    requests: int
    tokens: int
    out: str

    def __str__(self) -> str:
        return f"{self.requests:,} requests, {self.tokens:,} tokens in {self.out}"


def merge(traces: Sequence[Path], out: Path, progress: Progress = lambda tokens: None) -> Merged:
    """Write the requests of several trace directories to another one, readable by its owner only.

    The traces were recorded at the same time, each in the order in which requests ended. So they are interleaved as
    evenly as possible: the newest requests come from all traces. Raises ValueError if their models differ.
    """
    check_output(out, directory=True, inputs=traces)
    headers = [store.read_header(path) for path in traces]
    for path, header in zip(traces, headers, strict=True):
        headers[0].fingerprint.check_same(header.fingerprint, f"{path} is of another model or tokenizer:")
    with atomic_directory(out, private=True) as staged, store.TraceWriter(staged, headers[0], private=True) as writer:
        for _, _, trace, r in heapq.merge(*(_by_age(path, i) for i, path in enumerate(traces))):
            writer.append_one(trace, r)
            progress(int(trace.request_offsets[r + 1] - trace.request_offsets[r]))
    return Merged(out=str(out), requests=writer.num_requests, tokens=store.num_tokens(out))


def _by_age(path: Path, number: int) -> Iterator[tuple[float, int, RoutingTrace, int]]:
    """Every request of a trace by its place, from 0 to 1."""
    total = sum(map(len, store.request_lengths(path)))
    done = 0
    for trace in checked_parts(path):
        for r in range(trace.num_requests):
            yield (done + r + 0.5) / total, number, trace, r
        done += trace.num_requests


def checked_parts(path: Path, name: str = "", tally: Tally | None = None) -> Iterator[RoutingTrace]:
    """Read a trace shard by shard; at the end warn of tokens that should not be there, or raise ValueError for many.

    name: what to call the trace. tally: where its tokens are counted.
    """
    tally = Tally() if tally is None else tally
    for trace in store.read_parts(path):
        tally.add(trace)
        yield trace
    tally.check(name or str(path))


def check_tokens(path: Path, name: str) -> None:
    """Warn of tokens of a trace, called `name`, that should not be there, or raise ValueError for many."""
    for _ in checked_parts(path, name):
        pass


def describe(path: Path, progress: Progress = lambda tokens: None) -> dict[str, Any]:
    """Describe a trace directory or .npz file, read shard by shard.

    Raises ValueError if too many of its tokens name an expert twice in a layer.
    """
    tally = Tally()
    parts = checked_parts(path, tally=tally)
    first = next(parts, None)
    if first is None:
        raise ValueError(f"{path} holds no shard yet: run its profile again to fill it")
    f = first.fingerprint
    chosen = np.zeros((f.num_layers, f.num_experts), np.int64)
    seen = np.zeros(f.vocab_size, bool)
    counts: Counter[str] = Counter()
    for trace in chain([first], parts):
        chosen += expert_load(trace)
        seen[trace.token_ids] = True
        counts["requests"] += trace.num_requests
        counts["tokens"] += trace.num_tokens
        counts["decode_tokens"] += int((trace.phase == DECODE).sum())
        counts["prompt_tokens"] += len(trace.prompt_ids)
        progress(trace.num_tokens)
    files = store.shard_paths(path) if path.is_dir() else [path]
    return {
        **asdict(f),
        **counts,
        "distinct_tokens": int(seen.sum()),
        "left_out_tokens": tally.left_out,
        "identical_tokens": tally.identical,
        "busiest_expert": float((chosen.max(axis=1) / np.maximum(chosen.mean(axis=1), 1e-9)).mean()),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def sample(path: Path, tokens: int, seed: int) -> RoutingTrace:
    """Random requests of a trace directory with about `tokens` routed tokens, in order; all if there are no more."""
    lengths = store.request_lengths(path)
    shard_of_request = np.repeat(np.arange(len(lengths)), [len(one) for one in lengths])
    chosen = np.zeros(len(shard_of_request), bool)
    chosen[draw_requests(np.concatenate([np.zeros(0, np.int64), *lengths]), tokens, seed)] = True
    parts = [trace.select(np.flatnonzero(chosen[shard_of_request == i])) for i, trace in enumerate(checked_parts(path))]
    return store.join(parts, path)


def open_bounded(path: Path, seed: int = 0) -> RoutingTrace:
    """Open a trace, or random requests if it has more than MOST_IDS expert ids, which a `RoutingWarning` says.

    Raises ValueError if no token of it was routed.
    """
    tokens = fit = 0
    if path.is_dir():
        f, tokens = store.read_header(path).fingerprint, store.num_tokens(path)
        fit = max(MOST_IDS // (f.num_layers * f.top_k), 1)
    trace = sample(path, fit, seed) if tokens > fit else store.open_trace(path)
    if trace.num_tokens == 0:
        raise ValueError(f"{path} holds no routed token")
    if tokens > fit:
        words = (
            f"{path} has {tokens:,} tokens, more than are read at once: {trace.num_tokens:,} tokens count, of "
            f"{trace.num_requests:,} requests drawn by seed {seed}"
        )
        warnings.warn(words, RoutingWarning, stacklevel=2)
    return trace
