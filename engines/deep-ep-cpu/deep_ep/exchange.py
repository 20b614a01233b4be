"""Rows from every rank of a group to every other, as bytes, in one exchange of sizes and one of contents."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """What `pack` needs to know to give a tensor back: the shape behind the rows and the type."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def fields_of(tensors: Sequence[Tensor]) -> list[Field]:
    return [Field(tuple(t.shape[1:]), t.dtype) for t in tensors]


def pack(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors (n, ...) side by side as bytes (n, B)."""
    n = len(tensors[0])
    return torch.cat([t.contiguous().view(torch.uint8).view(n, f.num_bytes) if n else _no_rows(f)
                      for t, f in zip(tensors, fields_of(tensors), strict=True)], dim=1)  # fmt: skip


def _no_rows(field: Field) -> Tensor:
    return torch.empty(0, field.num_bytes, dtype=torch.uint8)


def unpack(rows: Tensor, fields: Sequence[Field]) -> list[Tensor]:
    """The reverse of `pack`."""
    parts = rows.split([f.num_bytes for f in fields], dim=1)
    return [part.contiguous().view(-1).view(f.dtype).view(len(rows), *f.shape)
            for part, f in zip(parts, fields, strict=True)]  # fmt: skip


def exchange(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], counts: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Send rows of `tensors`, ordered by destination, counts[r] of them to rank r; what came, ordered by source.

    Returns the tensors received and how many rows each rank sent.
    """
    rows, fields = pack(tensors), fields_of(tensors)
    sent = torch.tensor(counts, dtype=torch.int64)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    sizes = came.tolist()
    width = sum(f.num_bytes for f in fields)
    out = torch.empty(sum(sizes) * width, dtype=torch.uint8)
    dist.all_to_all_single(out, rows.reshape(-1), [n * width for n in sizes], [n * width for n in counts], group=group)
    return unpack(out.view(sum(sizes), width), fields), sizes
