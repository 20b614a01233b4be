"""Rows between ranks: packed side by side for one message, and summed in rank order.

The order makes a sum independent of the rank that adds it.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


def byte_rows(rows: Tensor) -> Tensor:
    """(N, bytes) uint8: the memory of rows (N, H)."""
    width = rows.shape[1:].numel() * rows.element_size()
    return rows.contiguous().view(-1).view(torch.uint8).view(len(rows), width)


def pack_rows(columns: Sequence[Tensor]) -> Tensor:
    """(M, bytes) uint8: the rows of several tensors (M, H) side by side, so that one message holds them."""
    return torch.cat([byte_rows(rows) for rows in columns], dim=1)


def unpack_rows(rows: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The tensors (M, H) that `pack_rows` put side by side, of the types and widths of `like`."""
    parts = rows.split([column.shape[1] * column.element_size() for column in like], dim=1)
    aligned = [part.clone(memory_format=torch.contiguous_format).view(-1) for part in parts]
    return [part.view(column.dtype).view(-1, column.shape[1]) for part, column in zip(aligned, like, strict=True)]


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum of tensors of equal shape, added from the first to the last.

    Sums are in float32 (float64 for float64) and rounded once. `torch.sum` adds in another order.
    """
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)
