"""Stable argsort of rank ids as one Triton kernel: every program counts the whole batch, and sorts its block.

Shapes depend on arguments only, nothing waits for the device, and only the results are allocated, so that it can be
captured in a graph. To count a few blocks again takes less than another launch. Ids are not checked.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # rows per program


def order_of_real(ranks: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `on_cpu.order_of_real`."""
    rows, device = len(ranks), ranks.device
    block = min(BLOCK, max(triton.next_power_of_2(rows), 16))
    order, inverse = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    counts = torch.empty(size, dtype=torch.int32, device=device)
    if rows == 0:
        return order, inverse, counts.zero_()
    given = ranks.contiguous(), real, counts, order, inverse, rows, size
    order_kernel[(triton.cdiv(rows, block),)](*given, BLOCK=block, BINS=max(triton.next_power_of_2(size), 16))
    return order, inverse, counts


@triton.jit(do_not_specialize=["rows"])
def order_kernel(ranks, real, counts, order, inverse, rows, size, BLOCK: tl.constexpr, BINS: tl.constexpr):
    """Sort a block by (rank, row), so that rows of a rank are consecutive; then write every run to its places."""
    own, local, bins = tl.program_id(0), tl.arange(0, BLOCK), tl.arange(0, BINS)
    earlier = tl.zeros((BINS,), tl.int32)  # rows of each rank in the blocks before
    total, those = earlier, earlier  # rows in all blocks, and the real ones among them
    for block in range(tl.num_programs(0)):
        row = block * BLOCK + local
        ids = tl.load(ranks + row, mask=row < rows, other=0).to(tl.int32)
        found = tl.histogram(ids, BINS, mask=row < rows)
        total += found
        earlier += tl.where(block < own, found, 0)
        if own == 0:
            those += tl.histogram(ids, BINS, mask=tl.load(real + row, mask=row < rows, other=0).to(tl.int32) > 0)
    if own == 0:
        tl.store(counts + bins, those, mask=bins < size)
    row = own * BLOCK + local
    ids = tl.load(ranks + row, mask=row < rows, other=0).to(tl.int32)
    found = tl.histogram(ids, BINS, mask=row < rows)
    # From a row's number in its sorted block to its place: the rank's first place, and its rows in blocks before.
    to_place = tl.cumsum(total, 0) - total + earlier - (tl.cumsum(found, 0) - found)
    # BINS * BLOCK is at most 2**18 here; rows past the end sort behind all others.
    keys = tl.sort(tl.where(row < rows, ids * BLOCK + local, BINS * BLOCK + local))
    rank, row = tl.minimum(keys // BLOCK, BINS - 1), own * BLOCK + keys % BLOCK
    place = local + tl.gather(to_place, rank, 0)
    tl.store(inverse + row, place.to(tl.int64), mask=row < rows)
    is_real = tl.load(real + row, mask=row < rows, other=0).to(tl.int32) > 0
    tl.store(order + place, tl.where(is_real, row, -1).to(tl.int64), mask=row < rows)
