"""Move rows by index with one copy each: packing for a collective, unpacking after it, and sums of received parts."""

import math

import numpy as np
import torch
from torch import Tensor

from semmoe.jit import njit
from semmoe.runtime import reference

_WORDS = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))


def row_bytes(rows: Tensor) -> int:
    return math.prod(rows.shape[1:]) * rows.element_size()


def words(rows: Tensor) -> np.ndarray:
    """View a contiguous CPU tensor (M, ...) as an array (M, W) of the widest words that divide its rows."""
    if rows.numel() == 0:
        return np.zeros((len(rows), 0), np.uint8)
    width, start = row_bytes(rows), rows.data_ptr()
    kind = next(kind for size, kind in _WORDS if width % size == 0 and start % size == 0)
    return rows.detach().view(len(rows), -1).view(torch.uint8).view(kind).numpy()


def pack_rows(out: Tensor, rows: Tensor, index: Tensor) -> None:
    """Set out[i] = rows[index[i]]; both have the same type and width, and `out` is contiguous."""
    torch.index_select(rows, 0, index, out=out)


def unpack_rows(out: Tensor, rows: Tensor, index: Tensor) -> None:
    """Set out[index[i]] = rows[i]; both have the same type and width and are contiguous."""
    if not out.is_cpu:
        out[index] = rows
    elif rows.numel():
        _unpack(words(out), words(rows), index.numpy())  # torch's own loop over index_copy_ takes three times as long


@njit(nogil=True)
def _unpack(out, rows, index):
    for i in range(index.shape[0]):
        to = np.uint64(index[i])
        for c in range(rows.shape[1]):
            out[to, np.uint64(c)] = rows[i, c]


def move_bytes(out: Tensor, rows: Tensor, index: Tensor | None, to: int = 0, start: int = 0) -> None:
    """Copy bytes of rows[index] (None: of all rows) from byte `start` of a row to byte `to` of out's rows.

    The number of bytes is that of the narrower of the two. One of them (M, ...) holds rows packed as uint8; both are
    contiguous, on any device.
    """
    if out.numel():
        target, source = (t.detach().view(len(t), -1).view(torch.uint8) for t in (out, rows))
        width = min(target.shape[1] - to, source.shape[1] - start)
        target[:, to : to + width] = (source if index is None else source[index])[:, start : start + width]


def flat_bytes(tensor: Tensor) -> np.ndarray:
    """View a contiguous CPU tensor as (bytes,) uint8."""
    return tensor.detach().view(-1).view(torch.uint8).numpy()


@njit(nogil=True)
def copy_at(out, to, rows, start, width):
    """Copy `width` bytes from each place `start` (M,) in `rows` to that of `to` (M,) in `out`, both flat bytes."""
    for i in range(to.shape[0]):
        there, here = np.uint64(to[i]), np.uint64(start[i])
        for c in range(np.uint64(width)):
            out[there + c] = rows[here + c]


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


def sum_parts(arrived: Tensor, own: Tensor, mine: Tensor, rank: int) -> Tensor:
    """(n, H): the sum in rank order of own[mine], for own (N, H) and mine (n,), and the others' `arrived` (R - 1, n,
    H).

    Sums are in float32 (float64 for float64) and rounded once. `torch.sum` adds in an order of its own, and reads
    16-bit numbers slowly.
    """
    out = torch.empty((len(mine), own.shape[1]), dtype=own.dtype, device=own.device)
    if not own.is_cpu or own.dtype not in (torch.float32, torch.float64, torch.bfloat16):
        parts = [*arrived[:rank], own[mine], *arrived[rank:]]
        return reference.sum_in_order(parts)
    if own.dtype == torch.bfloat16:
        to, others, ours = (t.detach().view(torch.uint16).numpy() for t in (out, arrived, own))
        _sum_bfloat16(to, others, ours, mine.numpy(), rank)
    else:
        _sum(out.numpy(), arrived.detach().numpy(), own.detach().numpy(), mine.numpy(), rank)
    return out


@njit(nogil=True)
def _sum(out, arrived, own, mine, rank):
    """Sum one row at a time, so that its partial sum stays in the cache."""
    width = np.uint64(out.shape[1])
    for i in range(out.shape[0]):
        for j in range(arrived.shape[0] + 1):
            part = own[mine[i]] if j == rank else arrived[j - (j > rank), i]
            if j == 0:
                for c in range(width):
                    out[i, c] = part[c]
            else:
                for c in range(width):
                    out[i, c] += part[c]


@njit(nogil=True)
def _sum_bfloat16(out, arrived, own, mine, rank):
    """Same for bfloat16, given as bits (uint16), the upper half of a float32; sums round to nearest, ties to even."""
    width = np.uint64(out.shape[1])
    total = np.zeros(out.shape[1], np.float32)
    wide, bits = np.empty(out.shape[1], np.uint32), total.view(np.uint32)
    value = wide.view(np.float32)
    for i in range(out.shape[0]):
        for j in range(arrived.shape[0] + 1):
            part = own[mine[i]] if j == rank else arrived[j - (j > rank), i]
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
