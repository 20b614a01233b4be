"""A safetensors file as a header and bytes: read, checked, and copied with other tensor names and row orders.

A file is 8 bytes for the length of the header (little-endian); the header, a JSON object from tensor name to `dtype`,
`shape` and `data_offsets`, with an optional `__metadata__` of strings; then the tensors' bytes. The safetensors library
is not used here, because NumPy has neither bfloat16 nor FP8, and a tensor can be renamed without reading it. Headers
are not trusted: every offset and size is checked before a byte is read or written.
"""

import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Progress = Callable[[int], None]  # called with the bytes done since the last call
Stage = Callable[[str, int], Progress]  # (description, total bytes): begins a stage of the work

LONGEST_HEADER = 100_000_000  # bytes, the same as in the safetensors library
MOST_DIMENSIONS = 32
CHUNK = 16 << 20  # bytes held in memory at a time
TYPES = {  # by their bits
    4: "F4",
    6: "F6_E2M3 F6_E3M2",
    8: "BOOL U8 I8 F8_E4M3 F8_E5M2 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ",
    16: "I16 U16 F16 BF16",
    32: "I32 U32 F32",
    64: "I64 U64 F64 C64",
}
INTEGERS = {"U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}  # that NumPy reads
BITS = {name: bits for bits, names in TYPES.items() for name in names.split()}
NO_KERNEL_COPY = {errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is stored: `nbytes` bytes of `path` from `offset`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def read(self) -> bytes:
        with self.path.open("rb") as file:
            return b"".join(_chunks(file.fileno(), self.nbytes, self.offset))

    def integers(self) -> np.ndarray:
        """The values of a tensor whose type is one of INTEGERS."""
        return np.frombuffer(self.read(), INTEGERS[self.dtype]).reshape(self.shape)

    def row(self, row: int) -> "Tensor":
        """Row `row` of the leading dimension, which is a whole number of bytes by the rules of the layout."""
        size = self.nbytes // self.shape[0]
        return Tensor(self.path, self.dtype, self.shape[1:], self.offset + row * size, size)


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint. `tensors` keeps the header's order."""

    path: Path
    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]
    data_start: int  # offset of the first tensor
    nbytes: int  # size of the whole file


def read_shard(path: Path) -> Shard:
    """Read and check the header of a safetensors file; raises ValueError that names the file."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(LONGEST_HEADER, size - 8):
                raise ValueError(f"its header has {length} bytes, the file {size}")
            header = _parse(file.read(length))
        metadata = _metadata(header.pop("__metadata__", None))
        start = 8 + length
        tensors = {name: _tensor(path, name, entry, start, size - start) for name, entry in header.items()}
        _check_cover(tensors, start, size)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
    return Shard(path, metadata, tensors, start, size)


def _parse(text: bytes) -> dict[str, Any]:
    header = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    if not isinstance(header, dict):
        raise ValueError("its header is not a JSON object")
    return header


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError(f"a name occurs twice in its header, next to {pairs[0][0][:80]!r}")
    return result


def _metadata(value: Any) -> dict[str, str] | None:
    if value is None or (isinstance(value, dict) and all(isinstance(v, str) for v in value.values())):
        return value
    raise ValueError("__metadata__ must hold strings")


def _tensor(path: Path, name: str, entry: Any, start: int, room: int) -> Tensor:
    shown = repr(name[:200])
    if not name.isprintable():
        raise ValueError(f"the name {shown} holds characters that cannot be printed")
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown} needs dtype, shape and data_offsets, and nothing else")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"{shown} has the unknown type {str(dtype)[:40]!r}")
    if not _counts(shape) or len(shape) > MOST_DIMENSIONS:
        raise ValueError(f"{shown} has an invalid shape")
    if not _counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{shown} has invalid data_offsets")
    first, last = offsets
    if not first <= last <= room:
        raise ValueError(f"{shown} is at bytes {first} to {last} of {room}")
    bits = math.prod(shape) * BITS[dtype]
    if bits != 8 * (last - first):
        raise ValueError(f"{shown}, {dtype} of shape {shape}, does not fit its {last - first} bytes")
    return Tensor(path, dtype, tuple(shape), start + first, last - first)


def _counts(values: Any) -> bool:
    """Whether `values` is a list of integers that are not negative; JSON's true is no integer."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_cover(tensors: dict[str, Tensor], start: int, size: int) -> None:
    """Raise ValueError unless the tensors fill the rest of the file without gap or overlap."""
    at = start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != at:
            raise ValueError(f"{name[:200]!r} overlaps the tensor before it, or leaves a gap")
        at += tensor.nbytes
    if at != size:
        raise ValueError(f"its tensors end at byte {at} of {size}")


def write_shard(
    source: Shard,
    target: Path,
    names: dict[str, str],
    orders: dict[str, np.ndarray],
    progress: Progress,
    contents: dict[str, bytes] | None = None,
) -> None:
    """Copy `source` to `target` with some tensors renamed and the rows of some reordered; all other bytes are the same.

    names: new name by old name. orders: by old name, (E,) the old row that each new row holds. contents: by old name,
    the bytes to write instead of the tensor's, equally many.
    """
    contents = contents or {}
    header = _header(source, names)
    shift = len(header) - source.data_start  # the data moves because names differ in length
    with source.path.open("rb") as old, target.open("wb") as new:
        _write_at(new.fileno(), header, 0)
        progress(source.data_start)
        for at, count in _ranges(source, [*orders, *contents]):
            copy_bytes(old.fileno(), new.fileno(), count, at, at + shift, progress)
        for name, order in orders.items():
            tensor = source.tensors[name]
            for p, e in enumerate(order.tolist()):
                row, to = tensor.row(e), tensor.row(p).offset + shift
                copy_bytes(old.fileno(), new.fileno(), row.nbytes, row.offset, to, progress)
        for name, data in contents.items():
            _write_at(new.fileno(), data, source.tensors[name].offset + shift)
            progress(len(data))


def _header(source: Shard, names: dict[str, str]) -> bytes:
    """Length and header, padded with spaces to align the data to 8 bytes, the same as the safetensors library does."""
    entries: dict[str, Any] = {} if source.metadata is None else {"__metadata__": source.metadata}
    for name, tensor in source.tensors.items():
        first = tensor.offset - source.data_start
        place = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": [first, first + tensor.nbytes]}
        entries[names.get(name, name)] = place
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _ranges(source: Shard, changed: list[str]) -> list[tuple[int, int]]:
    """(offset, bytes) of the stretches between changed tensors, which are copied without change."""
    ends = [source.data_start]
    for tensor in sorted((source.tensors[name] for name in changed), key=lambda t: t.offset):
        ends += [tensor.offset, tensor.offset + tensor.nbytes]
    ends.append(source.nbytes)
    return [(first, last - first) for first, last in zip(ends[::2], ends[1::2], strict=True) if last > first]


def copy_bytes(old: int, new: int, count: int, old_at: int, new_at: int, progress: Progress) -> None:
    """Copy `count` bytes between open files, inside the kernel if possible: some file systems then share blocks."""
    done = 0
    while done < count:
        size = min(CHUNK, count - done)
        copied = _kernel_copy(old, new, size, old_at + done, new_at + done)
        if copied == 0:
            chunk = os.pread(old, size, old_at + done)
            if not chunk:
                raise OSError("a file of the checkpoint became shorter while it was copied")
            _write_at(new, chunk, new_at + done)
            copied = len(chunk)
        done += copied
        progress(copied)


def _kernel_copy(old: int, new: int, count: int, old_at: int, new_at: int) -> int:
    """The number of bytes copied; 0 if this system or file system cannot do it."""
    if not hasattr(os, "copy_file_range"):
        return 0
    try:
        return os.copy_file_range(old, new, count, old_at, new_at)
    except OSError as error:
        if error.errno in NO_KERNEL_COPY:
            return 0
        raise


def _write_at(file: int, data: bytes, at: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(file, view, at)
        view, at = view[written:], at + written


def same_bytes(a: Tensor, b: Tensor, progress: Progress) -> bool:
    """Whether two tensors have the same type, shape and bytes; reads a chunk of each at a time."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    with a.path.open("rb") as one, b.path.open("rb") as other:
        ours, theirs = _chunks(one.fileno(), a.nbytes, a.offset), _chunks(other.fileno(), b.nbytes, b.offset)
        for x, y in zip(ours, theirs, strict=True):
            if x != y:
                return False
            progress(len(x))
    return True


def _chunks(file: int, count: int, at: int) -> Iterator[bytes]:
    """The `count` bytes from offset `at`, in chunks of CHUNK bytes and a shorter last one."""
    end = at + count
    while at < end:
        size = min(CHUNK, end - at)
        chunk = os.pread(file, size, at)
        if len(chunk) != size:
            raise OSError("a file of the checkpoint became shorter while it was read")
        yield chunk
        at += size
