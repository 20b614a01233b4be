"""`semmoe.tokens.slices.assign` as a Triton kernel: one program assigns the batch.

Nothing waits for the device and only the result is allocated. It is bitwise equal to that of `semmoe.runtime.scores`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.tokens.kernels import BUCKETS, FINE_BITS, FIRST_STEP, LOWEST, PRICE_STEPS, STEP_DECAY

WARP_TILE = 128  # scores for a warp; with less than two or more than eight warps an H100 takes longer
ASSIGN_TILE = 4096  # scores that the program processes at a time; with 8192 it spills registers on NVIDIA

_LOWEST = tl.constexpr(LOWEST)
_FIRST_STEP, _STEP_DECAY, _PRICE_STEPS = tl.constexpr(FIRST_STEP), tl.constexpr(STEP_DECAY), tl.constexpr(PRICE_STEPS)
_BUCKETS, _FINE_BITS, _COARSE = tl.constexpr(BUCKETS), tl.constexpr(FINE_BITS), tl.constexpr(2 << FINE_BITS)


def assign(scores: Tensor) -> Tensor:
    """(B,) int16: slices, same as `semmoe.tokens.slices.assign`."""
    tokens, slices = scores.shape
    out = torch.empty(tokens, dtype=torch.int16, device=scores.device)
    width = triton.next_power_of_2(slices)
    block = min(triton.next_power_of_2(max(tokens, 16)), max(ASSIGN_TILE // width, 16))
    if tokens:
        kernel = assign_one_kernel if tokens <= block else assign_kernel
        warps = min(max(block * width // WARP_TILE, 2), 8)
        given = scores.contiguous(), out, tokens, slices, -(-tokens // slices)
        kernel[(1,)](*given, BLOCK=block, WIDTH=width, num_warps=warps)
    return out


@triton.jit(do_not_specialize=["tokens"])
def assign_one_kernel(scores, out, tokens, slices, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """As `assign_kernel`, for tokens in one block, which is read once."""
    columns = tl.arange(0, WIDTH)
    real = columns < slices
    tile, valid = _tile(scores, 0, tokens, slices, BLOCK, WIDTH)
    totals, spread = _sums(tile, valid, real)
    prices, step = _first(totals, spread, real, tokens)
    kept, least = prices, tokens + 1
    i = 0
    while (i <= _PRICE_STEPS) & (least > 0):
        pick, _best = _choose(tile, prices, real, columns, WIDTH)
        counts = _counts(pick, valid, columns)
        kept, least, prices, step = _turn(kept, least, prices, step, counts, size, real)
        i += 1
    values = tile - kept[None, :]
    pick, _best = _choose(tile, kept, real, columns, WIDTH)
    counts = _counts(pick, valid, columns)
    while tl.sum(tl.maximum(counts - size, 0), 0) > 0:
        excess = tl.maximum(counts - size, 0)
        room = tl.where(real, tl.maximum(size - counts, 0), 0)
        target, value = _choose(tile, kept, room > 0, columns, WIDTH)
        bucket = _bucket(values, value, excess, pick[:, None] == columns[None, :])
        leaving = tl.histogram(pick * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=valid)
        limit, left = _limits(leaving, excess, WIDTH)
        applies, left = _least(valid, pick, bucket, limit, left, columns)
        arriving = tl.histogram(target * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=applies)
        limit, left = _limits(arriving, room, WIDTH)
        moves, left = _least(applies, target, bucket, limit, left, columns)
        pick = tl.where(moves, target, pick)
        counts = _counts(pick, valid, columns)
    tl.store(out + tl.arange(0, BLOCK), pick.to(tl.int16), mask=valid)


@triton.jit
def _sums(tile, valid, real):
    """(WIDTH,) sums of a block's scores by slice, and the sum of its tokens' spreads."""
    inside = valid[:, None] & real[None, :]
    high = tl.max(tl.where(inside, tile, _LOWEST), 1)
    low = tl.min(tl.where(inside, tile, -(_LOWEST + 1)), 1)
    spread = tl.sum(tl.where(valid, high.to(tl.int64) - low, 0), 0)
    return tl.sum(tl.where(inside, tile, 0).to(tl.int64), 0), spread


@triton.jit
def _first(totals, spread, real, tokens):
    """Prices start at a slice's mean score above the lowest slice's; the first step follows from the mean spread."""
    lowest = tl.min(tl.where(real, totals, 0x7FFFFFFFFFFFFFFF), 0)
    prices = tl.where(real, (totals - lowest) // tokens, 0).to(tl.int32)
    return prices, spread * _FIRST_STEP // (64 * tokens.to(tl.int64))


@triton.jit
def _turn(kept, least, prices, step, counts, size, real):
    """The prices that overfill slices least are kept; they rise where it is too full, by less every time."""
    over = tl.sum(tl.maximum(counts - size, 0), 0)
    kept = tl.where(over <= least, prices, kept)
    prices += tl.where(real, counts.to(tl.int64) * step // size - step, 0).to(tl.int32)
    return kept, tl.minimum(over, least), prices, step * _STEP_DECAY // 64


@triton.jit
def _counts(pick, valid, columns):
    """(WIDTH,) tokens of each slice."""
    return tl.sum((valid[:, None] & (pick[:, None] == columns[None, :])).to(tl.int32), 0)


@triton.jit(do_not_specialize=["tokens"])
def assign_kernel(scores, out, tokens, slices, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    columns = tl.arange(0, WIDTH)
    real = columns < slices
    totals, spread = tl.zeros((WIDTH,), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, tokens, BLOCK):
        tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
        own, of_block = _sums(tile, valid, real)
        totals += own
        spread += of_block
    prices, step = _first(totals, spread, real, tokens)
    kept, least = prices, tokens + 1
    i = 0
    while (i <= _PRICE_STEPS) & (least > 0):
        counts = tl.zeros((WIDTH,), tl.int32)
        for start in range(0, tokens, BLOCK):
            tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
            pick, _best = _choose(tile, prices, real, columns, WIDTH)
            counts += _counts(pick, valid, columns)
        kept, least, prices, step = _turn(kept, least, prices, step, counts, size, real)
        i += 1
    counts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, tokens, BLOCK):
        tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
        pick, _best = _choose(tile, kept, real, columns, WIDTH)
        counts += _counts(pick, valid, columns)
        tl.store(out + start + tl.arange(0, BLOCK), pick.to(tl.int16), mask=valid)
    while tl.sum(tl.maximum(counts - size, 0), 0) > 0:
        counts = _level(scores, out, kept, counts, tokens, slices, size, BLOCK, WIDTH)


@triton.jit
def _tile(scores, start, tokens, slices, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    t, s = start + tl.arange(0, BLOCK), tl.arange(0, WIDTH)
    valid = t < tokens
    inside = valid[:, None] & (s < slices)[None, :]
    return tl.load(scores + t[:, None] * slices + s[None, :], mask=inside, other=0), valid


@triton.jit
def _choose(tile, prices, allowed, columns, WIDTH: tl.constexpr):
    """The allowed column of highest score less price (the lowest of equals), and that difference."""
    values = tl.where(allowed[None, :], tile - prices[None, :], _LOWEST)
    best = tl.max(values, 1)
    return tl.min(tl.where(values == best[:, None], columns[None, :], WIDTH), 1), best


@triton.jit
def _level(scores, out, prices, counts, tokens, slices, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """One round of moves in three passes: which tokens may leave, where they apply, which move. Returns the counts."""
    columns = tl.arange(0, WIDTH)
    excess = tl.maximum(counts - size, 0)
    room = tl.where(columns < slices, tl.maximum(size - counts, 0), 0)
    tl.debug_barrier()  # slices that other threads wrote
    leaving = tl.zeros((WIDTH * _BUCKETS,), tl.int32)
    for start in range(0, tokens, BLOCK):
        source, target, bucket, valid = _moves(scores, out, prices, excess, room, start, tokens, slices, BLOCK, WIDTH)
        leaving += tl.histogram(source * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=valid)
    source_limit, source_left = _limits(leaving, excess, WIDTH)
    arriving, left = tl.zeros((WIDTH * _BUCKETS,), tl.int32), source_left
    for start in range(0, tokens, BLOCK):
        source, target, bucket, valid = _moves(scores, out, prices, excess, room, start, tokens, slices, BLOCK, WIDTH)
        applies, left = _least(valid, source, bucket, source_limit, left, columns)
        arriving += tl.histogram(target * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=applies)
    target_limit, target_left = _limits(arriving, room, WIDTH)
    left = source_left
    for start in range(0, tokens, BLOCK):
        source, target, bucket, valid = _moves(scores, out, prices, excess, room, start, tokens, slices, BLOCK, WIDTH)
        applies, left = _least(valid, source, bucket, source_limit, left, columns)
        moves, target_left = _least(applies, target, bucket, target_limit, target_left, columns)
        moved = moves[:, None]
        counts += tl.sum((moved & (target[:, None] == columns[None, :])).to(tl.int32), 0)
        counts -= tl.sum((moved & (source[:, None] == columns[None, :])).to(tl.int32), 0)
        tl.debug_barrier()  # all threads have read these slices
        tl.store(out + start + tl.arange(0, BLOCK), target.to(tl.int16), mask=moves)
    return counts


@triton.jit
def _moves(scores, out, prices, excess, room, start, tokens, slices, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """For a block's tokens: their slice, the best slice with room, and the bucket of the loss between the two."""
    columns = tl.arange(0, WIDTH)
    tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
    target, value = _choose(tile, prices, room > 0, columns, WIDTH)
    source = tl.load(out + start + tl.arange(0, BLOCK), mask=valid, other=0).to(tl.int32)
    bucket = _bucket(tile - prices[None, :], value, excess, source[:, None] == columns[None, :])
    return source, target, bucket, valid


@triton.jit
def _bucket(values, value, excess, here):
    """The order of magnitude of what tokens lose by moving from `here`, one-hot, to a slice of this value."""
    best = tl.sum(tl.where(here, values, 0), 1)
    loss = tl.where(_of(excess, here) > 0, best - value, 0)
    octave = tl.zeros_like(loss)  # the least by which the loss is shifted to less than _COARSE
    for i in tl.static_range(5):
        octave += tl.where((loss >> (octave + ((16 >> i) - 1))) >= _COARSE, 16 >> i, 0)
    return (octave << _FINE_BITS) + (loss >> octave)


@triton.jit
def _of(values, one_hot):
    """values[s] (WIDTH,) of each token's slice s, given as one_hot (BLOCK, WIDTH)."""
    return tl.sum(tl.where(one_hot, values[None, :], 0), 1)


@triton.jit
def _limits(counts, quota, WIDTH: tl.constexpr):
    """For each slice the bucket in which its quota ends (-1: none), and how much of the quota remains for it."""
    counts = tl.reshape(counts, (WIDTH, _BUCKETS))
    buckets = tl.arange(0, _BUCKETS)[None, :]
    limit = tl.sum((tl.cumsum(counts, 1) < quota[:, None]).to(tl.int32), 1)
    limit = tl.where(quota > 0, tl.minimum(limit, _BUCKETS - 1), -1)
    return limit, quota - tl.sum(tl.where(buckets < limit[:, None], counts, 0), 1)


@triton.jit
def _least(chosen, group, bucket, limit, left, columns):
    """Which of a block's tokens are within the quota of their group, and how much of it remains at the limit."""
    one_hot = group[:, None] == columns[None, :]
    end = _of(limit, one_hot)
    at_limit = (chosen & (bucket == end))[:, None] & one_hot
    place = tl.cumsum(at_limit.to(tl.int32), 0)
    within = at_limit & (place <= left[None, :])
    taken = within.to(tl.int32)
    return (chosen & (bucket < end)) | (tl.sum(taken, 1) > 0), left - tl.sum(taken, 0)
