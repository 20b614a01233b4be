"""Rows by index, as a Triton kernel."""

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS = 1024  # columns of a row that one program moves


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H); zeros where the index is -1."""
    return gather_both(rows, rows, index, 0, 0)[0]


def gather_both(rows: Tensor, others: Tensor, index: Tensor, first: int, number: int) -> tuple[Tensor, Tensor]:
    """Same as `on_cpu.gather_both`."""
    width = rows.shape[1]
    out, mine = (
        torch.empty((n, width), dtype=r.dtype, device=r.device) for r, n in ((rows, len(index)), (others, number))
    )
    if out.numel():
        grid, block = columns_of(len(index) + number, width)
        given = rows.contiguous(), others.contiguous(), index.contiguous()
        gather_kernel[grid](*given, out, mine, len(index), first, width, BLOCK=block)
    return out, mine


def columns_of(rows: int, width: int) -> tuple[tuple[int, int], int]:
    """The grid of a kernel that moves rows, and the columns of a program."""
    block = max(min(triton.next_power_of_2(width), COLUMNS), 1)
    return (rows, max(triton.cdiv(width, block), 1)), block


@triton.jit(do_not_specialize=["number", "first"])
def gather_kernel(rows, others, index, out, mine, number, first, width, BLOCK: tl.constexpr):
    """Programs up to `number` move rows to out; those after them move others to mine, from the index `first` on."""
    i, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if i < number:
        move_row(rows, tl.load(index + i), out, i, c, width)
    else:
        move_row(others, tl.load(index + first + i - number), mine, i - number, c, width)


@triton.jit
def move_row(rows, row, out, i, c, width):
    """Copy columns c of a row to row i of out; of row -1, zeros."""
    values = tl.load(rows + row.to(tl.int64) * width + c, mask=(c < width) & (row >= 0), other=0)
    tl.store(out + i.to(tl.int64) * width + c, values, mask=c < width)
