"""Rows by index, as a Triton kernel."""

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
