"""Sums of rows that ranks computed, in rank order, so that they do not depend on the rank that adds them."""

import numpy as np
import torch
from torch import Tensor

from semmoe.jit import njit


def add_rows(out: Tensor, rows: Tensor, index: Tensor) -> None:
    """Add rows[i] to out[index[i]]; indices are distinct, and `out` is float32 if rows are narrower."""
    if rows.numel() == 0:
        return
    if out.is_cpu and out.dtype == rows.dtype:
        _add_rows(out.numpy(), rows.detach().contiguous().numpy(), index.numpy())
    else:
        out.index_add_(0, index, rows.to(out.dtype))


@njit(nogil=True)
def _add_rows(out, rows, index):
    for i in range(index.shape[0]):
        to = np.uint64(index[i])
        for c in range(np.uint64(out.shape[1])):
            out[to, c] += rows[i, c]


def sum_parts(arrived: Tensor, own: Tensor, rank: int) -> Tensor:
    """(n, H): the sum in rank order of this rank's rows (n, H) and the others' `arrived` (R - 1, n, H).

    Sums are in float32 (float64 for float64) and rounded once. `torch.sum` adds in an order of its own, and reads
    16-bit numbers slowly.
    """
    if not own.is_cpu or own.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        return sum_in_order([*arrived[:rank], own, *arrived[rank:]])
    out = torch.empty_like(own)
    if own.dtype == torch.bfloat16:
        to, others, ours = (t.detach().view(torch.uint16).numpy() for t in (out, arrived, own))
        _sum_bfloat16(to, others, ours, rank)
    else:
        _sum(out.numpy(), arrived.detach().numpy(), own.detach().numpy(), rank)
    return out


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum of tensors of equal shape, added from the first to the last."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


@njit(nogil=True)
def _sum(out, arrived, own, rank):
    """Sum one row at a time, so that its partial sum stays in the cache."""
    width = np.uint64(out.shape[1])
    for i in range(out.shape[0]):
        for j in range(arrived.shape[0] + 1):
            part = own[i] if j == rank else arrived[j - (j > rank), i]
            if j == 0:
                for c in range(width):
                    out[i, c] = part[c]
            else:
                for c in range(width):
                    out[i, c] += part[c]


@njit(nogil=True)
def _sum_bfloat16(out, arrived, own, rank):
    """Same for bfloat16, given as bits (uint16), the upper half of a float32; sums round to nearest, ties to even."""
    width = np.uint64(out.shape[1])
    total = np.zeros(out.shape[1], np.float32)
    wide, bits = np.empty(out.shape[1], np.uint32), total.view(np.uint32)
    value = wide.view(np.float32)
    for i in range(out.shape[0]):
        for j in range(arrived.shape[0] + 1):
            part = own[i] if j == rank else arrived[j - (j > rank), i]
            for c in range(width):
                wide[c] = np.uint32(part[c]) << np.uint32(16)
            if j == 0:
                for c in range(width):
                    total[c] = value[c]
            else:
                for c in range(width):
                    total[c] += value[c]
        for c in range(width):
            b = bits[c]
            odd = (b >> np.uint32(16)) & np.uint32(1)
            nearest = (b + np.uint32(0x7FFF) + odd) >> np.uint32(16)
            is_nan = (b & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
            out[i, c] = np.uint16(0x7FC0) if is_nan else np.uint16(nearest)
