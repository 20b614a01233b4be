"""Stable argsort of rank ids as Triton kernels: histogram per block, scan over blocks, scatter.

Shapes depend on arguments only, nothing waits for the device, and only the results and one table (ranks, blocks) are
allocated, so that it can be captured in a graph. A batch that fits in one block takes one launch. Ids are not checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # rows per program
SCAN_BLOCK = 1024  # blocks that the scan processes at a time


def order_of_real(ranks: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `on_cpu.order_of_real`."""
    rows, device = len(ranks), ranks.device
    block = min(BLOCK, max(triton.next_power_of_2(rows), 16))
    blocks, bins = triton.cdiv(rows, block), max(triton.next_power_of_2(size), 16)
    order, inverse = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    # One block writes its counts, several add them.
    make = torch.empty if blocks == 1 else torch.zeros
    counts = make(size, dtype=torch.int32, device=device)
    if rows == 0:
        return order, inverse, counts
    before = torch.empty((size, blocks), dtype=torch.int32, device=device)
    totals = counts if blocks == 1 else torch.empty(size, dtype=torch.int64, device=device)
    ranks = ranks.contiguous()
    if blocks > 1:
        histogram_kernel[(blocks,)](ranks, before, rows, size, blocks, BLOCK=block, BINS=bins)
        scan_kernel[(size,)](before, totals, blocks, BLOCK=SCAN_BLOCK)
    scatter_kernel[(blocks,)](
        ranks,
        real,
        before,
        totals,
        counts,
        order,
        inverse,
        rows,
        size,
        blocks,
        ALONE=blocks == 1,
        BLOCK=block,
        BINS=bins,
    )
    return order, inverse, counts


@triton.jit(do_not_specialize=["rows"])
def histogram_kernel(ranks, before, rows, size, blocks, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Write the number of rows of each rank in a block to before (size, blocks)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    bins = tl.arange(0, BINS)
    ids = tl.load(ranks + i, mask=i < rows, other=0).to(tl.int32)
    found = tl.histogram(ids, BINS, mask=i < rows)
    tl.store(before + bins * blocks + tl.program_id(0), found, mask=bins < size)


@triton.jit
def scan_kernel(before, counts, blocks, BLOCK: tl.constexpr):
    """Replace one rank's rows per block by the sum over previous blocks; write its total to counts (size,)."""
    rank = tl.program_id(0)
    total = tl.zeros((), tl.int32)
    for start in range(0, blocks, BLOCK):
        b = start + tl.arange(0, BLOCK)
        found = tl.load(before + rank * blocks + b, mask=b < blocks, other=0)
        tl.store(before + rank * blocks + b, total + tl.cumsum(found, 0) - found, mask=b < blocks)
        total += tl.sum(found, 0)
    tl.store(counts + rank, total.to(tl.int64))


@triton.jit(do_not_specialize=["rows"])
def scatter_kernel(
    ranks,
    real,
    before,
    totals,
    counted,
    order,
    inverse,
    rows,
    size,
    blocks,
    ALONE: tl.constexpr,
    BLOCK: tl.constexpr,
    BINS: tl.constexpr,
):
    """Sort a block by (rank, row), so that rows of a rank are consecutive; then write every run to its places."""
    start = tl.program_id(0) * BLOCK
    local, bins = tl.arange(0, BLOCK), tl.arange(0, BINS)
    valid = start + local < rows
    ids = tl.load(ranks + start + local, mask=valid, other=0).to(tl.int32)
    found = tl.histogram(ids, BINS, mask=valid)
    is_real = tl.load(real + start + local, mask=valid, other=0).to(tl.int32) > 0
    those = tl.histogram(ids, BINS, mask=valid & is_real)
    if ALONE:
        of_rank, earlier = found, tl.zeros((BINS,), tl.int32)
        tl.store(counted + bins, those.to(counted.dtype.element_ty), mask=bins < size)
    else:
        of_rank = tl.load(totals + bins, mask=bins < size, other=0).to(tl.int32)
        earlier = tl.load(before + bins * blocks + tl.program_id(0), mask=bins < size, other=0)
        tl.atomic_add(counted + bins, those, mask=bins < size)
    first = tl.cumsum(of_rank, 0) - of_rank
    run = tl.cumsum(found, 0) - found
    # BINS * BLOCK is at most 2**18 here; rows past the end sort behind all others.
    keys = tl.sort(tl.where(valid, ids * BLOCK + local, BINS * BLOCK + local))
    rank, row = tl.minimum(keys // BLOCK, BINS - 1), start + keys % BLOCK
    place = local + tl.gather(first + earlier - run, rank, 0)
    tl.store(inverse + row, place.to(tl.int64), mask=row < rows)
    row_is_real = tl.load(real + row, mask=row < rows, other=0).to(tl.int32) > 0
    tl.store(order + place, tl.where(row_is_real, row, -1).to(tl.int64), mask=row < rows)
