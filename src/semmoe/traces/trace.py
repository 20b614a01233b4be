"""Traces on disk: a directory of shards, which a profile writes as it runs, or an `.npz` file.

`trace.json` names the model, the tokenizer and the dataset. Each `shard-NNNNN.safetensors` holds entire requests and is
written atomically, so an interrupted profile leaves a usable trace to which a later run appends.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from pydantic import BaseModel, ConfigDict

from semmoe.core import DECODE, PER_TOKEN, PREFILL, RoutingTrace
from semmoe.io.bounds import whole_numbers
from semmoe.io.files import load_array, load_arrays, load_json, save_arrays, save_json
from semmoe.io.npz import offsets_of, read_npz
from semmoe.topology import Fingerprint
from semmoe.traces.routing import Tally, impossible_tokens

SCHEMA = 2
ARRAYS = {*PER_TOKEN, "request_lengths", "prompt_ids", "prompt_lengths"}


class TraceHeader(BaseModel):
    """`trace.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    fingerprint: Fingerprint
    dataset_hash: str  # SHA-256 over the prompts; only runs on the same dataset are appended
    settings: dict[str, Any]


class TraceWriter:
    """Appends requests to a trace directory; writes a shard whenever `shard_tokens` routed tokens have accumulated.

    A context manager: leaving it, also by an exception or Ctrl-C, writes the remaining requests. Prompts of a server's
    users are `private`: their files have mode 0600.
    """

    def __init__(self, path: Path, header: TraceHeader, shard_tokens: int = 1 << 18, private: bool = False) -> None:
        self.path, self.header = path, header
        self.shard_tokens, self.private = shard_tokens, private
        self._pending: list[dict[str, np.ndarray]] = []
        self.pending_tokens = 0  # routed tokens that are not on disk yet
        if (path / "trace.json").exists():
            _check_same_run(path, read_header(path), header)
        else:
            if path.exists() and any(path.iterdir()):
                raise ValueError(f"{path} exists and is not a trace")
            save_json(path / "trace.json", header, private)
        self._next_shard = 1 + max((int(shard.stem.removeprefix("shard-")) for shard in shard_paths(path)), default=-1)
        self.num_requests = sum(map(len, request_lengths(path)))

    def append(
        self, *, prompt_ids: np.ndarray, token_ids: np.ndarray, expert_ids: np.ndarray, phase: np.ndarray
    ) -> None:
        """Add a request: (M,) prompt ids, (T,) routed token ids, (T, L, K) expert ids by falling weight, (T,) phase."""
        f = self.header.fingerprint
        expected = (len(token_ids), f.num_layers, f.top_k)
        assert expert_ids.shape == expected, f"expert_ids {expert_ids.shape}, expected {expected}"
        assert phase.shape == token_ids.shape
        assert expert_ids.size == 0 or (expert_ids.min() >= 0 and expert_ids.max() < f.num_experts)
        dtype = np.uint8 if f.num_experts <= 256 else np.int16
        self._pending.append(
            {
                "token_ids": token_ids.astype(np.int32),
                "expert_ids": expert_ids.astype(dtype),
                "phase": phase.astype(np.uint8),
                "prompt_ids": prompt_ids.astype(np.int32),
                "request_lengths": np.array([len(token_ids)], np.int64),
                "prompt_lengths": np.array([len(prompt_ids)], np.int64),
            }
        )
        self.num_requests += 1
        self.pending_tokens += len(token_ids)
        if self.pending_tokens >= self.shard_tokens:
            self.flush()

    def append_run(
        self, prompt: ArrayLike, token_ids: np.ndarray, expert_ids: np.ndarray, positions: np.ndarray | None = None
    ) -> None:
        """Add a request that an engine ran: (T,) tokens, the prompt's first, their experts and (T,) positions."""
        positions = np.arange(len(token_ids)) if positions is None else positions
        prompt_ids = np.asarray(prompt)
        phase = np.where(positions < len(prompt_ids), PREFILL, DECODE)
        self.append(prompt_ids=prompt_ids, token_ids=token_ids, expert_ids=expert_ids, phase=phase)

    def append_one(self, trace: RoutingTrace, request: int) -> None:
        """Add one request of `trace`, which must have the same fingerprint."""
        part = {name: getattr(trace, name)[trace.rows(request)] for name in PER_TOKEN}
        self.append(prompt_ids=trace.prompt(request), **part)

    def flush(self) -> None:
        if self._pending:
            shard = {name: np.concatenate([part[name] for part in self._pending]) for name in ARRAYS}
            save_arrays(self.path / f"shard-{self._next_shard:05d}.safetensors", shard, self.private)
            self._next_shard += 1
            self._pending, self.pending_tokens = [], 0

    def __enter__(self) -> "TraceWriter":
        return self

    def __exit__(self, *exception: object) -> None:
        self.flush()


def _check_same_run(path: Path, old: TraceHeader, new: TraceHeader) -> None:
    old.fingerprint.check_same(new.fingerprint, f"{path} was profiled on another model or tokenizer:")
    if old.dataset_hash != new.dataset_hash:
        raise ValueError(f"{path} was profiled on another dataset; choose another --out")
    if old.settings != new.settings:
        raise ValueError(f"{path} was profiled with other settings ({old.settings}, now {new.settings})")


def shard_paths(path: Path) -> list[Path]:
    return sorted(path.glob("shard-[0-9][0-9][0-9][0-9][0-9].safetensors"))


def request_lengths(path: Path) -> list[np.ndarray]:
    """Routed tokens of each request of a trace directory, (R,) for each shard."""
    return [load_array(shard, "request_lengths") for shard in shard_paths(path)]


def num_tokens(path: Path) -> int:
    """Routed tokens of a trace directory."""
    return sum(int(lengths.sum()) for lengths in request_lengths(path))


def open_trace(path: Path | str) -> RoutingTrace:
    """Read a trace directory, or an `.npz` file in one of the layouts of `docs/reference.md`.

    Tokens whose routing no router makes are left out with a `RoutingWarning`; more than 1 % are a ValueError.
    """
    path = Path(path)
    trace = join(list(read_parts(path)), path)
    Tally().add(trace).check(str(path))
    return trace


def possible_part(trace: RoutingTrace) -> RoutingTrace:
    """The trace without the tokens that name an expert twice in a layer, which no router does; `left_out` counts them.

    Prompts are kept whole: a user sent them, however their tokens were routed.
    """
    impossible = impossible_tokens(trace.expert_ids)
    if not impossible.any():
        return trace
    kept_before = np.concatenate([[0], np.cumsum(~impossible)])  # the number of rows kept before each row
    arrays = {name: getattr(trace, name)[~impossible] for name in PER_TOKEN}
    left_out = trace.left_out + int(impossible.sum())
    return replace(trace, **arrays, request_offsets=kept_before[trace.request_offsets], left_out=left_out)


def read_header(path: Path) -> TraceHeader:
    header = load_json(path / "trace.json", TraceHeader)
    if header.schema_version != SCHEMA:
        raise ValueError(f"{path} has schema version {header.schema_version}, expected {SCHEMA}")
    return header


def read_parts(path: Path) -> Iterator[RoutingTrace]:
    """Read a trace directory shard by shard, for traces that are larger than memory; an `.npz` file has one part."""
    if not path.exists():
        raise ValueError(f"no trace at {path}")
    if path.is_dir():
        fingerprint = read_header(path).fingerprint
        for shard in shard_paths(path):
            yield _read_shard(shard, fingerprint)
    elif path.suffix == ".npz":
        yield possible_part(read_npz(path))
    else:
        raise ValueError(f"{path} is neither a trace directory nor an .npz file")


def _read_shard(path: Path, fingerprint: Fingerprint) -> RoutingTrace:
    arrays: dict[str, Any] = load_arrays(path, ARRAYS)
    try:
        for of in ("request", "prompt"):
            arrays[f"{of}_offsets"] = offsets_of(whole_numbers(f"{of}_lengths", arrays.pop(f"{of}_lengths")))
        return possible_part(RoutingTrace(fingerprint=fingerprint, **arrays))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def join(parts: list[RoutingTrace], path: Path) -> RoutingTrace:
    """The requests of the parts of the trace at `path`, one part after the other."""
    if not parts:
        raise ValueError(f"{path} holds no shard yet: run its profile again to fill it")
    joined: dict[str, Any] = {"left_out": sum(part.left_out for part in parts)}
    for name in (*PER_TOKEN, "prompt_ids"):
        joined[name] = np.concatenate([getattr(part, name) for part in parts])
    for name in ("request_offsets", "prompt_offsets"):
        joined[name] = offsets_of(np.concatenate([np.diff(getattr(part, name)) for part in parts]))
    return replace(parts[0], **joined)
