"""`semmoe.tokens.slices` as Triton kernels: one program per block of tokens scores them, one program assigns the batch.

Shapes are static, nothing waits for the device, and only the results are allocated, so that both can be captured in a
graph. Results are bitwise equal to those of `semmoe.runtime.scores`. The number of tokens is not specialised: Triton
would compile passes of one token, and of multiples of 16, anew while requests wait, and what is 1 is a constant then.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.runtime.scores import DeviceTables
from semmoe.tokens.kernels import BUCKETS, FINE_BITS, FIRST_STEP, LOWEST, PRICE_STEPS, STEP_DECAY

SCORE_BLOCK = 32  # tokens per program
ASSIGN_TILE = 4096  # scores that the assigning program processes at a time; with 8192 it spills registers on NVIDIA

_LOWEST = tl.constexpr(LOWEST)
_FIRST_STEP, _STEP_DECAY, _PRICE_STEPS = tl.constexpr(FIRST_STEP), tl.constexpr(STEP_DECAY), tl.constexpr(PRICE_STEPS)
_BUCKETS, _FINE_BITS, _COARSE = tl.constexpr(BUCKETS), tl.constexpr(FINE_BITS), tl.constexpr(2 << FINE_BITS)


def look_up_tokens(
    tables: DeviceTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`, for layers that follow each other."""
    tokens = len(token_ids)
    assert list(layers) == list(range(layers[0], layers[0] + len(layers))), layers
    out = torch.empty((len(layers), tokens, num_slices), dtype=torch.int32, device=token_ids.device)
    if tokens:
        look_up_kernel[(triton.cdiv(tokens, SCORE_BLOCK), len(layers))](
            out,
            token_ids.contiguous(),
            tables.token_rows,
            tables.token_scores[layers[0]],
            tables.token_shift[layers[0] :],
            tokens,
            len(tables.token_rows) - 1,
            first_rank,
            tables.token_scores.shape[2],
            num_slices,
            tables.token_scores.shape[1],
            BLOCK=SCORE_BLOCK,
            WIDTH=triton.next_power_of_2(num_slices),
        )
    return out


def score(
    tables: DeviceTables, layer: int, first_rank: int, tokens: Tensor, earlier: Tensor, history: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(B, S) int32: same as `semmoe.runtime.scores.score`."""
    out, (number, num_slices) = torch.empty_like(tokens), tokens.shape
    past = tables.history_scores[layer, -1:] if history is None else history.contiguous()
    if number:
        score_kernel[(triton.cdiv(number, SCORE_BLOCK),)](
            out,
            tokens.contiguous(),
            tables.path_scores[layer],
            earlier.contiguous(),
            past,
            past if real is None else real,
            number,
            first_rank,
            tables.token_scores.shape[2],
            num_slices,
            HAS_HISTORY=history is not None,
            REAL=real is not None,
            LAYERS=earlier.shape[0],
            TOP_K=earlier.shape[2],
            ORDERED=tables.ordered,
            EXPERTS=tables.num_experts,
            BLOCK=SCORE_BLOCK,
            WIDTH=triton.next_power_of_2(num_slices),
        )
    return out


@triton.jit(do_not_specialize=["tokens"])
def look_up_kernel(
    out,
    token_ids,
    token_rows,
    token_scores,
    shifts,
    tokens,
    last,
    first,
    ranks,
    slices,
    rows,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, WIDTH)[None, :]
    valid = t < tokens
    mask = valid[:, None] & (s < slices)
    ids = tl.load(token_ids + t, mask=valid, other=0).to(tl.int64)
    row = tl.load(token_rows + tl.where((ids >= 0) & (ids < last), ids, last), mask=valid, other=0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    places = token_scores + (layer * rows + row)[:, None] * ranks + first + s
    found = tl.load(places, mask=mask, other=0).to(tl.int32) << tl.load(shifts + layer)
    tl.store(out + (layer * tokens + t)[:, None] * slices + s, found, mask=mask)


@triton.jit(do_not_specialize=["tokens"])
def score_kernel(
    out,
    looked_up,
    path_scores,
    earlier,
    history,
    real,
    tokens,
    first,
    ranks,
    slices,
    HAS_HISTORY: tl.constexpr,
    REAL: tl.constexpr,
    LAYERS: tl.constexpr,
    TOP_K: tl.constexpr,
    ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, WIDTH)[None, :]
    valid = t < tokens
    mask = valid[:, None] & (s < slices)
    total = tl.load(looked_up + t[:, None] * slices + s, mask=mask, other=0)
    past = t if HAS_HISTORY else t * 0
    total += tl.load(history + past[:, None].to(tl.int64) * ranks + first + s, mask=mask, other=0).to(tl.int32)
    for j in tl.static_range(LAYERS):
        for k in tl.static_range(TOP_K):
            nearer = min(j, ORDERED)
            base = (nearer * TOP_K + (j - nearer) + (k if j < ORDERED else 0)) * EXPERTS
            expert = tl.load(earlier + (j * tokens + t) * TOP_K + k, mask=valid, other=0).to(tl.int32)
            places = path_scores + (base + expert)[:, None] * ranks + first + s
            total += tl.load(places, mask=mask, other=0).to(tl.int32)
    if REAL:
        total = tl.where(tl.load(real + t, mask=valid, other=0).to(tl.int32)[:, None] > 0, total, 0)
    tl.store(out + t[:, None] * slices + s, total, mask=mask)


def assign(scores: Tensor) -> Tensor:
    """(B,) int16: slices, same as `semmoe.tokens.slices.assign`."""
    tokens, slices = scores.shape
    out = torch.empty(tokens, dtype=torch.int16, device=scores.device)
    width = triton.next_power_of_2(slices)
    block = min(triton.next_power_of_2(max(tokens, 16)), max(ASSIGN_TILE // width, 16))
    if tokens:
        assign_kernel[(1,)](
            scores.contiguous(), out, tokens, slices, -(-tokens // slices), ONE=tokens <= block, BLOCK=block,
            WIDTH=width, num_warps=min(max(block * width // 256, 1), 8),
        )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["tokens"])
def assign_kernel(scores, out, tokens, slices, size, ONE: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """ONE: whether all tokens are in one block."""
    columns = tl.arange(0, WIDTH)
    real = columns < slices
    # Prices start at a slice's mean score above the lowest slice's; the first step follows from the mean spread.
    totals, spread = tl.zeros((WIDTH,), tl.int64), tl.zeros((), tl.int64)
    for start in range(0, tokens, BLOCK):
        tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
        inside = valid[:, None] & real[None, :]
        totals += tl.sum(tl.where(inside, tile, 0).to(tl.int64), 0)
        high = tl.max(tl.where(inside, tile, _LOWEST), 1)
        low = tl.min(tl.where(inside, tile, -(_LOWEST + 1)), 1)
        spread += tl.sum(tl.where(valid, high.to(tl.int64) - low, 0), 0)
    lowest = tl.min(tl.where(real, totals, 0x7FFFFFFFFFFFFFFF), 0)
    prices = tl.where(real, (totals - lowest) // tokens, 0).to(tl.int32)
    step = spread * _FIRST_STEP // (64 * tokens.to(tl.int64))
    kept, least = prices, tokens + 1
    i = 0
    while (i <= _PRICE_STEPS) & (least > 0):
        counts = tl.zeros((WIDTH,), tl.int32)
        for start in range(0, tokens, BLOCK):
            tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
            pick, _best = _choose(tile, prices, real, columns, WIDTH)
            counts += tl.sum((valid[:, None] & (pick[:, None] == columns[None, :])).to(tl.int32), 0)
        over = tl.sum(tl.maximum(counts - size, 0), 0)
        kept = tl.where(over <= least, prices, kept)
        least = tl.minimum(over, least)
        prices += tl.where(real, counts.to(tl.int64) * step // size - step, 0).to(tl.int32)
        step = step * _STEP_DECAY // 64
        i += 1
    counts = tl.zeros((WIDTH,), tl.int32)
    for start in range(0, tokens, BLOCK):
        tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
        pick, _best = _choose(tile, kept, real, columns, WIDTH)
        counts += tl.sum((valid[:, None] & (pick[:, None] == columns[None, :])).to(tl.int32), 0)
        tl.store(out + start + tl.arange(0, BLOCK), pick.to(tl.int16), mask=valid)
    while tl.sum(tl.maximum(counts - size, 0), 0) > 0:
        if ONE:
            counts = _level_one(scores, out, kept, counts, tokens, slices, size, BLOCK, WIDTH)
        else:
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
def _level_one(scores, out, prices, counts, tokens, slices, size, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """As `_level`, for tokens in one block, which are read once."""
    columns = tl.arange(0, WIDTH)
    excess = tl.maximum(counts - size, 0)
    room = tl.where(columns < slices, tl.maximum(size - counts, 0), 0)
    tl.debug_barrier()  # slices that other threads wrote
    source, target, bucket, valid = _moves(scores, out, prices, excess, room, 0, tokens, slices, BLOCK, WIDTH)
    leaving = tl.histogram(source * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=valid)
    limit, left = _limits(leaving, excess, WIDTH)
    applies, left = _least(valid, source, bucket, limit, left, columns)
    arriving = tl.histogram(target * _BUCKETS + bucket, WIDTH * _BUCKETS, mask=applies)
    limit, left = _limits(arriving, room, WIDTH)
    moves, left = _least(applies, target, bucket, limit, left, columns)
    moved = moves[:, None]
    counts += tl.sum((moved & (target[:, None] == columns[None, :])).to(tl.int32), 0)
    counts -= tl.sum((moved & (source[:, None] == columns[None, :])).to(tl.int32), 0)
    tl.debug_barrier()  # all threads have read these slices
    tl.store(out + tl.arange(0, BLOCK), target.to(tl.int16), mask=moves)
    return counts


@triton.jit
def _moves(scores, out, prices, excess, room, start, tokens, slices, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """For a block's tokens: their slice, the best slice with room, and the bucket of the loss between the two."""
    columns = tl.arange(0, WIDTH)
    tile, valid = _tile(scores, start, tokens, slices, BLOCK, WIDTH)
    target, value = _choose(tile, prices, room > 0, columns, WIDTH)
    source = tl.load(out + start + tl.arange(0, BLOCK), mask=valid, other=0).to(tl.int32)
    here = source[:, None] == columns[None, :]
    best = tl.sum(tl.where(here, tile - prices[None, :], 0), 1)
    loss = tl.where(_of(excess, here) > 0, best - value, 0)
    octave = tl.zeros_like(loss)  # the least by which the loss is shifted to less than _COARSE
    for i in tl.static_range(5):
        octave += tl.where((loss >> (octave + ((16 >> i) - 1))) >= _COARSE, 16 >> i, 0)
    return source, target, (octave << _FINE_BITS) + (loss >> octave), valid


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
