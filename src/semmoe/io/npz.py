"""Read a trace from an `.npz` file, in one of the layouts of `docs/reference.md`."""

import math
import zipfile
from pathlib import Path

import numpy as np

from semmoe.core import DECODE, RoutingTrace
from semmoe.io.bounds import whole_numbers
from semmoe.topology import Fingerprint

MAX_TRACE_BYTES = 16 << 30  # unpacked; a file is read whole: 4 billion expert ids at int32
NPY_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


def read_npz(path: Path) -> RoutingTrace:
    """The trace of an `.npz` file. Raises ValueError that names the file and its fault."""
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
    tokens, starts = arrays["tokens"], arrays["token_starts"]
    first = arrays["pos0"]  # prompt tokens of each request
    lengths = np.diff(arrays["route_starts"])
    routed = [tokens[s + p : s + p + n] for s, p, n in zip(starts[:-1], first, lengths, strict=True)]
    prompts = [tokens[s : s + p] for s, p in zip(starts[:-1], first, strict=True)]
    return {
        "token_ids": np.concatenate(routed),
        "expert_ids": arrays["experts"],
        "request_offsets": arrays["route_starts"],
        "prompt_ids": np.concatenate(prompts),
        "prompt_offsets": offsets_of(whole_numbers("pos0", first)),
        "phase": np.full(len(arrays["experts"]), DECODE, np.uint8),
        "vocab_size": np.array(int(tokens.max(initial=0)) + 1),
    }


def _from_plain_arrays(arrays: dict[str, np.ndarray], path: Path) -> RoutingTrace:
    """A trace from `token_ids` (T,), `expert_ids` (T, L, K) and `request_offsets` (R + 1,).

    Other arrays are optional; without `prompt_ids`, the routed tokens are also the prompts.
    """
    experts = arrays["expert_ids"]
    if experts.ndim != 3:
        raise ValueError(f"expert_ids has shape {experts.shape}, expected (T, L, K)")
    if experts.size == 0:
        raise ValueError("it holds no routed token")
    offsets = whole_numbers("request_offsets", arrays["request_offsets"]).astype(np.int64)
    tokens = _as_int32("token_ids", arrays["token_ids"])
    prompts = _as_int32("prompt_ids", arrays.get("prompt_ids", tokens))
    seen = 1 + max(int(tokens.max(initial=0)), int(prompts.max(initial=0)))
    fingerprint = Fingerprint(
        model=path.name.removesuffix(".npz"),
        architecture_hash="unknown",
        tokenizer_hash="unknown",
        vocab_size=_size(arrays, "vocab_size", seen),
        num_layers=experts.shape[1],
        num_experts=_size(arrays, "num_experts", int(whole_numbers("expert_ids", experts).max()) + 1),
        top_k=experts.shape[2],
        num_groups=_size(arrays, "num_groups", 1),
    )
    return RoutingTrace(
        token_ids=tokens,
        expert_ids=experts,
        request_offsets=offsets,
        prompt_ids=prompts,
        phase=arrays.get("phase", np.zeros(len(tokens), np.uint8)),
        prompt_offsets=whole_numbers("prompt_offsets", arrays.get("prompt_offsets", offsets)).astype(np.int64),
        fingerprint=fingerprint,
    )


def _size(arrays: dict[str, np.ndarray], name: str, default: int) -> int:
    """A number that a file states, or `default`; it is checked before it is cast."""
    stated = whole_numbers(name, arrays.get(name, np.array(default)))
    if stated.size != 1:
        raise ValueError(f"{name} has shape {stated.shape}, expected a number")
    return int(stated.reshape(()))


def offsets_of(lengths: np.ndarray) -> np.ndarray:
    """(R + 1,) int64 offsets of R segments with these lengths."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _as_int32(name: str, ids: np.ndarray) -> np.ndarray:
    narrow = whole_numbers(name, ids).astype(np.int32)
    if not np.array_equal(narrow, ids):
        raise ValueError(f"{name} do not fit into 32 bits")
    return narrow
