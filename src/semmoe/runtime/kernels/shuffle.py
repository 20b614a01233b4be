"""Triton kernels of the shuffled pair: rows by index, and SRS / SAG over buffers of all ranks.

`peers` is a tensor (R,) int64 of data pointers, one buffer per rank, as symmetric memory gives them: a rank reads what
it needs from every buffer itself and permutes while reading. The caller (`semmoe.runtime.fused`) ensures that all
buffers are written before and unchanged until all ranks have read them. Shapes follow from arguments, nothing waits for
the device.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # columns of a row that one program moves


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H); zeros where the index is -1."""
    out = torch.empty((len(index), rows.shape[1]), dtype=rows.dtype, device=rows.device)
    if out.numel():
        gather_kernel[_grid(out)](rows.contiguous(), index.contiguous(), out, rows.shape[1], BLOCK=_block(out))
    return out


def shuffled_reduce_scatter(peers: Tensor, slots: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """peers: partial sums (N, width); slots (S,): this rank's tokens, -1 for padding -> their sums (S, width).

    Added in rank order in float32 (float64 for float64) and rounded once; zeros for padding.
    """
    out = torch.empty((len(slots), width), dtype=dtype, device=slots.device)
    if out.numel():
        reduce_scatter_kernel[_grid(out)](
            peers, slots.contiguous(), out, len(peers), width, WIDE=dtype == torch.float64, BLOCK=_block(out)
        )
    return out


def shuffled_all_gather(peers: Tensor, inverse: Tensor, slice_rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """peers: slices (slice_rows, width); inverse (N,): each token's slot -> rows (N, width) in token order."""
    out = torch.empty((len(inverse), width), dtype=dtype, device=inverse.device)
    if out.numel():
        all_gather_kernel[_grid(out)](peers, inverse.contiguous(), out, slice_rows, width, BLOCK=_block(out))
    return out


def _block(out: Tensor) -> int:
    return min(triton.next_power_of_2(out.shape[1]), COLUMNS)


def _grid(out: Tensor) -> tuple[int, int]:
    return len(out), triton.cdiv(out.shape[1], _block(out))


@triton.jit
def gather_kernel(rows, index, out, width, BLOCK: tl.constexpr):
    i, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index + i)
    values = tl.load(rows + row * width + c, mask=(c < width) & (row >= 0), other=0)
    tl.store(out + i * width + c, values, mask=c < width)


@triton.jit
def reduce_scatter_kernel(peers, slots, out, size, width, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    i, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    token = tl.load(slots + i)
    mask = (c < width) & (token >= 0)
    kind: tl.constexpr = tl.float64 if WIDE else tl.float32
    total = _row_of(peers, 0, token, c, width, mask, out).to(kind)  # not 0 + it: that loses the sign of -0
    for j in range(1, size):
        total += _row_of(peers, j, token, c, width, mask, out).to(kind)
    tl.store(out + i * width + c, total.to(out.dtype.element_ty), mask=c < width)


@triton.jit
def all_gather_kernel(peers, inverse, out, slice_rows, width, BLOCK: tl.constexpr):
    i, c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(inverse + i)
    values = _row_of(peers, slot // slice_rows, slot % slice_rows, c, width, c < width, out)
    tl.store(out + i * width + c, values, mask=c < width)


@triton.jit
def _row_of(peers, rank, row, columns, width, mask, like):
    """Load columns of a row from the buffer of one rank, whose elements have the type of `like`."""
    buffer = tl.load(peers + rank).to(tl.pointer_type(like.dtype.element_ty))
    return tl.load(buffer + row * width + columns, mask=mask, other=0)
