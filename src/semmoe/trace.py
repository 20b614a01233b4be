"""Traces on disk: a directory of shards, which a profile writes as it runs, or an `.npz` file.

`trace.json` names the model, the tokenizer and the dataset. Each `shard-NNNNN.safetensors` holds entire requests and is
written atomically, so an interrupted profile leaves a usable trace to which a later run appends.
"""

import json
import math
import zipfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

from semmoe.core import DECODE, RoutingTrace
from semmoe.files import array_shape, load_arrays, load_json, read_limited, save_arrays, save_json
from semmoe.topology import Fingerprint

SCHEMA = 2
READABLE = (1, 2)
HASHED = "hashed.safetensors"  # tables of hash-routed layers, which earlier traces hold
ARRAYS = {"token_ids", "expert_ids", "request_lengths", "phase", "prompt_ids", "prompt_lengths"}
LOOKAHEAD_REMOVED = "look-ahead ids are no longer read: make the trace again with `semmoe profile`"
MAX_TRACE_BYTES = 16 << 30  # of an .npz file, unpacked, which is read whole: 4 billion expert ids at int32
MAX_META_BYTES = 256 << 20  # unpacked; the strings of a vocabulary and examples take some MB
NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class TraceHeader(BaseModel):
    """`trace.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: int = SCHEMA
    fingerprint: Fingerprint
    dataset_hash: str  # SHA-256 over the prompts; only runs on the same dataset are appended
    settings: dict[str, Any]

    @model_validator(mode="before")
    @classmethod
    def _without_lookahead(cls, stated: Any) -> Any:
        """Omit the number of look-ahead ids, which is 0 in a trace without them; refuse any other number."""
        if not isinstance(stated, dict) or "lookahead" not in stated:
            return stated
        if stated["lookahead"] != 0:
            raise PydanticCustomError("lookahead", LOOKAHEAD_REMOVED)
        return {name: value for name, value in stated.items() if name != "lookahead"}


class TraceWriter:
    """Appends requests to a trace directory; writes a shard whenever `shard_tokens` routed tokens have accumulated.

    A context manager: leaving it, also by an exception or Ctrl-C, writes the remaining requests. Prompts of a server's
    users are `private`: their files have mode 0600.
    """

    def __init__(self, path: Path, header: TraceHeader, shard_tokens: int = 1 << 18, private: bool = False) -> None:
        self.path, self.shard_tokens, self.private = path, shard_tokens, private
        self.header = header
        self._pending: list[dict[str, np.ndarray]] = []
        self.pending_tokens = 0  # routed tokens that are not on disk yet
        if (path / "trace.json").exists():
            _check_same_run(path, read_header(path), header)
        else:
            if path.exists() and any(path.iterdir()):
                raise ValueError(f"{path} exists and is not a trace")
            save_json(path / "trace.json", header, private)
        shards = shard_paths(path)
        self._next_shard = 1 + max((int(shard.stem.removeprefix("shard-")) for shard in shards), default=-1)
        self.num_requests = sum(array_shape(shard, "request_lengths")[0] for shard in shards)

    def append(
        self, *, prompt_ids: np.ndarray, token_ids: np.ndarray, expert_ids: np.ndarray, phase: np.ndarray
    ) -> None:
        """Add a request: (M,) prompt ids, (T,) routed token ids, (T, L, K) expert ids by falling weight, (T,) phase."""
        f = self.header.fingerprint
        expected = (len(token_ids), f.num_layers, f.top_k)
        assert expert_ids.shape == expected, f"expert_ids {expert_ids.shape}, expected {expected}"
        assert phase.shape == token_ids.shape
        assert expert_ids.size == 0 or (expert_ids.min() >= 0 and expert_ids.max() < f.num_experts)
        dtype = np.uint8 if self.header.fingerprint.num_experts <= 256 else np.int16
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

    def append_all(self, trace: RoutingTrace) -> None:
        """Add every request of `trace`, which must have the same fingerprint."""
        for r in range(trace.num_requests):
            self.append_one(trace, r)

    def append_one(self, trace: RoutingTrace, request: int) -> None:
        """Add one request of `trace`, which must have the same fingerprint."""
        rows = trace.rows(request)
        part = {name: getattr(trace, name)[rows] for name in ("token_ids", "expert_ids", "phase")}
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
    difference = old.fingerprint.mismatch(new.fingerprint)
    if difference is not None:
        raise ValueError(f"{path} was profiled on another model or tokenizer: {difference}")
    if old.dataset_hash != new.dataset_hash:
        raise ValueError(f"{path} was profiled on another dataset; choose another --out")
    if old.settings != new.settings:
        raise ValueError(f"{path} was profiled with other settings ({old.settings}, now {new.settings})")


def shard_paths(path: Path) -> list[Path]:
    return sorted(path.glob("shard-[0-9][0-9][0-9][0-9][0-9].safetensors"))


def save_trace(trace: RoutingTrace, path: Path) -> None:
    """Write a trace to a new trace directory."""
    header = TraceHeader(fingerprint=trace.fingerprint, dataset_hash=trace.digest(), settings={})
    with TraceWriter(path, header) as writer:
        if writer.num_requests != 0:
            raise ValueError(f"{path} already holds a trace")
        writer.append_all(trace)


def open_trace(path: Path | str) -> RoutingTrace:
    """Read a trace directory, or an `.npz` file in one of the layouts of `docs/formats.md`."""
    path = Path(path)
    if not path.exists():
        raise ValueError(f"there is no trace at {path}")
    if path.is_file():
        if path.suffix != ".npz":
            raise ValueError(f"{path} is neither a trace directory nor an .npz file")
        return _read_npz(path)
    header = read_header(path)
    shards = [load_arrays(shard, ARRAYS) for shard in shard_paths(path)]
    if not shards:
        raise ValueError(f"{path} holds no shard yet: run its profile again to fill it")
    return join_shards(path, header.fingerprint, shards)


def read_header(path: Path) -> TraceHeader:
    header = load_json(path / "trace.json", TraceHeader)
    if header.schema_version not in READABLE:
        raise ValueError(f"{path} has schema version {header.schema_version}, expected {SCHEMA}")
    if (path / HASHED).exists():
        raise ValueError(f"{path / HASHED} is no longer read: make the trace again with `semmoe profile`")
    return header


def read_shards(path: Path) -> Iterator[RoutingTrace]:
    """Read a trace directory shard by shard, for traces that are larger than memory."""
    header = read_header(path)
    for shard in shard_paths(path):
        yield join_shards(shard, header.fingerprint, [load_arrays(shard, ARRAYS)])


def join_shards(path: Path, fingerprint: Fingerprint, shards: list[dict[str, np.ndarray]]) -> RoutingTrace:
    """The trace of shards' arrays, one after the other; path: for errors."""
    joined = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    try:
        return RoutingTrace(
            request_offsets=_offsets(joined.pop("request_lengths")),
            prompt_offsets=_offsets(joined.pop("prompt_lengths")),
            fingerprint=fingerprint,
            **joined,
        )
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _read_npz(path: Path) -> RoutingTrace:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path} is not an .npz file, or is truncated")
    try:
        _check_npz_sizes(path)
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: np.asarray(file[name]) for name in file.files}
    except Exception as error:  # zipfile and NumPy raise almost any exception on a damaged archive
        reason = f"({type(error).__name__}: {error})"
        raise ValueError(f"{path} is damaged, too large or holds Python objects {reason}") from None
    try:
        if {"experts", "route_starts", "tokens", "token_starts", "pos0"} <= set(arrays):
            arrays = _plain_from_fingerprinting(arrays)
        if "lookahead_ids" in arrays:
            raise ValueError(LOOKAHEAD_REMOVED)
        needed = {"token_ids", "expert_ids", "request_offsets"}
        if not needed <= set(arrays):
            raise ValueError(f"it holds {sorted(arrays)}; a plain trace needs {sorted(needed)}")
        return _from_plain_arrays(arrays, path)
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def _check_npz_sizes(path: Path) -> None:
    """Raise ValueError, before anything is allocated, if arrays are too large or their sizes are inconsistent."""
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(member.file_size for member in archive.infolist())
        if unpacked > MAX_TRACE_BYTES:
            raise ValueError(f"{unpacked:,} bytes unpacked, and at most {MAX_TRACE_BYTES:,} are read")
        for member in archive.infolist():
            with archive.open(member) as file:
                version = np.lib.format.read_magic(file)
                if version not in NPY_HEADERS:
                    raise ValueError(f"{member.filename} has npy version {version}")
                shape, _, dtype = NPY_HEADERS[version](file)
                declared, held = math.prod(shape) * dtype.itemsize, member.file_size - file.tell()
            if declared != held and not dtype.hasobject:  # objects have no known length, and are not read
                raise ValueError(f"{member.filename} should have {declared:,} bytes, and {held:,} are there")


def _plain_from_fingerprinting(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Plain arrays from the layout of `examples/convert_fingerprinting.py`, where only generated tokens are routed."""
    tokens, starts, first = arrays["tokens"], arrays["token_starts"], arrays["pos0"]
    lengths = np.diff(arrays["route_starts"])
    routed = [tokens[s + p : s + p + n] for s, p, n in zip(starts[:-1], first, lengths, strict=True)]
    prompts = [tokens[s : s + p] for s, p in zip(starts[:-1], first, strict=True)]
    return {
        "token_ids": np.concatenate(routed),
        "expert_ids": arrays["experts"],
        "request_offsets": arrays["route_starts"],
        "prompt_ids": np.concatenate(prompts),
        "prompt_offsets": _offsets(first),
        "phase": np.full(len(arrays["experts"]), DECODE, np.uint8),
    }


def _from_plain_arrays(arrays: dict[str, np.ndarray], path: Path) -> RoutingTrace:
    """A trace from `token_ids` (T,), `expert_ids` (T, L, K) and `request_offsets` (R + 1,).

    Other arrays are optional; without `prompt_ids`, the routed tokens are also the prompts.
    """
    experts = arrays["expert_ids"]
    if experts.ndim != 3 or experts.size <= 0:
        raise ValueError(f"expert_ids has shape {experts.shape}, expected (T, L, K)")
    offsets = arrays["request_offsets"]
    if not np.issubdtype(offsets.dtype, np.integer):
        raise ValueError(f"request_offsets are {offsets.dtype}, expected integers")
    offsets = offsets.astype(np.int64)
    tokens = _as_int32("token_ids", arrays["token_ids"])
    prompts = _as_int32("prompt_ids", arrays.get("prompt_ids", tokens))
    seen = 1 + max(int(tokens.max(initial=0)), int(prompts.max(initial=0)))
    fingerprint = Fingerprint(
        model=path.name.removesuffix(".npz"),
        architecture_hash="unknown",
        tokenizer_hash="unknown",
        vocab_size=int(arrays.get("vocab_size", _meta_vocabulary(path) or seen)),
        num_layers=experts.shape[1],
        num_experts=int(arrays.get("num_experts", int(experts.max()) + 1)),
        top_k=experts.shape[2],
        num_groups=int(arrays.get("num_groups", 1)),
    )
    return RoutingTrace(
        token_ids=tokens,
        expert_ids=experts,
        request_offsets=offsets,
        prompt_ids=prompts,
        phase=arrays.get("phase", np.zeros(len(tokens), np.uint8)),
        prompt_offsets=arrays.get("prompt_offsets", offsets).astype(np.int64),
        fingerprint=fingerprint,
    )


def _as_int32(name: str, ids: np.ndarray) -> np.ndarray:
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} are {ids.dtype}, expected integers")
    narrow = ids.astype(np.int32)
    if not np.array_equal(narrow, ids):
        raise ValueError(f"{name} do not fit into 32 bits")
    return narrow


def _meta_vocabulary(path: Path) -> int | None:
    """Vocabulary size from the token strings in `NAME.meta.json.gz` beside `NAME.npz`, if that file exists."""
    meta = path.with_suffix(".meta.json.gz")
    if not meta.exists():
        return None
    content = read_limited(meta, MAX_META_BYTES)
    try:
        return len(json.loads(content)["vocab"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"{meta} is not a valid meta file ({type(error).__name__}: {error})") from None


def describe(trace: RoutingTrace) -> dict[str, Any]:
    """Counts that `semmoe affinity` prints above its tables."""
    return {
        **asdict(trace.fingerprint),
        "requests": trace.num_requests,
        "tokens": trace.num_tokens,
        "decode_tokens": int((trace.phase == DECODE).sum()),
        "prompt_tokens": len(trace.prompt_ids),
        "distinct_tokens": len(np.unique(trace.token_ids)),
        "trace_hash": trace.digest(),
    }
