"""A safetensors file as a header and bytes: read, and copied with other tensor names and row orders.

A file is 8 bytes for the length of the header (little-endian); the header, a JSON object from tensor name to `dtype`,
`shape` and `data_offsets`, with an optional `__metadata__` of strings; then the tensors' bytes. The safetensors library
checks the header, every offset and size included, before a byte is read or written. Its arrays are not used: NumPy has
neither bfloat16 nor FP8, and a tensor can be renamed without reading it.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

Progress = Callable[[int], None]  # called with the bytes done since the last call
Stage = Callable[[str, int], Progress]  # (description, total bytes): begins a stage of the work

MAX_DIMENSIONS = 32
CHUNK_BYTES = 16 << 20  # held in memory at a time
INTEGERS = {"U8": "u1", "I8": "i1", "I16": "<i2", "I32": "<i4", "I64": "<i8"}
FLOATS = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Tensor:
    """Where a tensor is stored: `nbytes` bytes of `path` from `offset`."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, CHUNK_BYTES at a time."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.nbytes, CHUNK_BYTES):
                size = min(CHUNK_BYTES, self.nbytes - start)
                chunk = file.read(size)
                if len(chunk) != size:
                    raise OSError(f"{self.path} became shorter while it was read")
                yield chunk

    def values(self) -> np.ndarray:
        """The values of a tensor whose type is one of INTEGERS."""
        return np.frombuffer(b"".join(self.chunks()), INTEGERS[self.dtype]).reshape(self.shape)

    @property
    def rows(self) -> int:
        """Size of the leading dimension, not counting those of size 1, such as in ERNIE's bias (1, E)."""
        return next((size for size in self.shape if size != 1), 1)

    def row(self, row: int) -> "Tensor":
        """Row `row` of the leading dimension, which is a whole number of bytes by the rules of the layout."""
        size = self.nbytes // self.rows
        return Tensor(self.path, self.dtype, self.shape[1:], self.offset + row * size, size)

    def reordered(self, order: np.ndarray) -> Iterator[bytes]:
        """Yield the bytes of the rows in another order; order (E,): the old row at each new row."""
        for row in order.tolist():
            yield from self.row(row).chunks()


@dataclass(frozen=True)
class Shard:
    """One file of a checkpoint. `tensors` are in the order of their bytes, which fill the rest of the file."""

    path: Path
    metadata: dict[str, str] | None
    tensors: dict[str, Tensor]
    data_start: int  # offset of the first tensor
    nbytes: int  # size of the whole file


def read_shard(path: Path) -> Shard:
    """Read the header of a safetensors file; raises ValueError that names the file if it is not valid."""
    if not path.is_file():  # to read a pipe would block
        raise ValueError(f"{path} is missing, or is not a file")
    try:
        with safe_open(path, framework="numpy"), path.open("rb") as file:  # it refuses a header that the file belies
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        start = 8 + length
        metadata = header.pop("__metadata__", None)
        tensors = [(name, _tensor(path, name, entry, start)) for name, entry in header.items()]
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path} is not a valid safetensors file: {error}") from None
    tensors.sort(key=lambda item: (item[1].offset, item[1].nbytes))
    return Shard(path, metadata, dict(tensors), start, path.stat().st_size)


def _tensor(path: Path, name: str, entry: dict[str, Any], start: int) -> Tensor:
    """The tensor of an entry that the safetensors library accepts. Raises ValueError for what cannot be kept."""
    shown = repr(name[:200])
    if not name.isprintable():
        raise ValueError(f"the name {shown} holds characters that cannot be printed")
    if set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{shown} needs dtype, shape and data_offsets, and nothing else")
    if len(entry["shape"]) > MAX_DIMENSIONS:
        raise ValueError(f"{shown} has {len(entry['shape'])} dimensions, more than {MAX_DIMENSIONS}")
    first, last = entry["data_offsets"]
    return Tensor(path, entry["dtype"], tuple(entry["shape"]), start + first, last - first)


def write_shard(
    source: Shard, target: Path, names: dict[str, str], contents: dict[str, Iterable[bytes]], progress: Progress
) -> None:
    """Copy `source` to `target` with other names and contents of some tensors; all other bytes are the same.

    names: new name by old name. contents: by old name, chunks that are written for the tensor's, of the same length.
    """
    with target.open("wb") as file:
        file.write(_header(source, names))
        progress(source.data_start)
        for name, tensor in source.tensors.items():
            for chunk in contents.get(name, tensor.chunks()):
                file.write(chunk)
                progress(len(chunk))


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


def same_bytes(a: Tensor, b: Tensor, progress: Progress) -> bool:
    """Whether two tensors have the same type, shape and bytes."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    for ours, theirs in zip(a.chunks(), b.chunks(), strict=True):
        if ours != theirs:
            return False
        progress(len(ours))
    return True
