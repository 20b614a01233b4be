"""The slices of a pass's rows as a Triton kernel: scores, the assignment to equal slices, and their order.

A program assigns a chunk of the batch. Nothing waits for the device, and only the results are allocated. Results are
bitwise equal to those on a CPU.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.runtime.kernels.argsort import order_of_real
from semmoe.runtime.kernels.scores import score_tile
from semmoe.runtime.tables import Rows, ScoreTables, States
from semmoe.tokens.kernels import BUCKETS, FEW_SLICES, FINE_BITS, LOWEST, PRICING, num_chunks

WARP_TILE = 128, 512  # scores for a warp: at least, up to eight warps of a program, and where it has more

_LOWEST, _BUCKETS = tl.constexpr(LOWEST), tl.constexpr(BUCKETS)
_BUCKET_BITS = tl.constexpr(BUCKETS.bit_length() - 1)
_FEW_SLICES, _PRICING = tl.constexpr(FEW_SLICES), tl.constexpr(PRICING)
_FINE_BITS, _COARSE = tl.constexpr(FINE_BITS), tl.constexpr(2 << FINE_BITS)


def slices(
    tables: ScoreTables, layer: int, first_rank: int, looked_up: Tensor, routed: Tensor, rows: Rows, states: States
) -> tuple[Tensor, Tensor, Tensor]:
    """Same as `on_cpu.slices`: in one launch, or two for a batch of several chunks."""
    _, tokens, size = looked_up.shape
    order, inverse = torch.empty((2, tokens), dtype=torch.int64, device=looked_up.device)
    counts = torch.empty(size, dtype=torch.int32, device=looked_up.device)
    chunks, width = num_chunks(tokens, size), triton.next_power_of_2(size)
    pick = torch.empty(tokens if chunks > 1 else 0, dtype=torch.int16, device=looked_up.device)
    block = triton.next_power_of_2(max(triton.cdiv(triton.cdiv(tokens, size), chunks) * size, 16))
    small, large = (block * width // scores_of_warp for scores_of_warp in WARP_TILE)
    if tokens == 0:
        return order, inverse, counts.zero_()
    slices_kernel[(chunks,)](
        order,
        inverse,
        counts,
        pick,
        looked_up,
        tables.path_scores[layer],
        routed,
        tables.history_scores[layer, -1],
        states.running[layer],
        states.previous[layer],
        rows.slots.contiguous(),
        rows.decoding.contiguous(),
        rows.real,
        layer,
        tokens,
        first_rank,
        tables.history_scores.shape[2],
        size,
        routed.shape[2],
        LAYERS=min(layer, tables.lookback),
        ORDERED=tables.ordered,
        EXPERTS=tables.num_experts,
        BLOCK=block,
        WIDTH=width,
        WHOLE=chunks == 1,
        num_warps=max(min(small, 8), min(large, 32), 2),
    )
    return (order, inverse, counts) if chunks == 1 else order_of_real(pick, rows.real, size)


@triton.jit(do_not_specialize=["layer", "tokens"], do_not_specialize_on_alignment=["mean", "running", "previous"])
def slices_kernel(
    order, inverse, counts, pick, looked_up, path_scores, routed, mean, running, previous, slots, decoding, real,
    layer, tokens, first, ranks, slices, top_k,
    LAYERS: tl.constexpr, ORDERED: tl.constexpr, EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """BLOCK has room for a chunk. WHOLE: the batch is one, and is put in order; else only slices are picked."""
    columns = tl.arange(0, WIDTH)
    t, size = tl.arange(0, BLOCK), tokens // slices
    if not WHOLE:  # as `semmoe.tokens.kernels.chunks`
        t = (t // slices * tl.num_programs(0) + tl.program_id(0)) * slices + t % slices
        size = tl.cdiv(size - tl.program_id(0), tl.num_programs(0))
    valid = t < tokens
    inside = valid[:, None] & (columns < slices)[None, :]
    is_real = tl.load(real + t, mask=valid, other=0).to(tl.int32) > 0
    tile = score_tile(
        t[:, None], columns[None, :], inside, is_real[:, None], looked_up, path_scores, routed, mean, running, previous,
        slots, decoding, layer, tokens, first, ranks, slices, top_k, LAYERS, ORDERED, EXPERTS,
    )  # fmt: skip
    picked = assign_tile(tile, inside, valid, columns, columns < slices, size, WIDTH)
    if WHOLE:
        own = picked[:, None] == columns[None, :]
        before = tl.sum(tl.where(own, tl.cumsum(own.to(tl.int32), 0), 0), 1) - 1  # rows of the slice that come first
        place = picked * size + before
        tl.store(inverse + t, place.to(tl.int64), mask=valid)
        tl.store(order + place, tl.where(is_real, t, -1).to(tl.int64), mask=valid)
        found = tl.sum((own & is_real[:, None]).to(tl.int32), 0)
        tl.store(counts + columns, found, mask=columns < slices)
    else:
        tl.store(pick + t, picked.to(tl.int16), mask=valid)


@triton.jit
def assign_tile(tile, inside, valid, columns, real, size, WIDTH: tl.constexpr):
    """(BLOCK,) slices by `semmoe.tokens.kernels.assign`, WIDTH for no row; real (WIDTH,): columns that are slices."""
    number = tl.sum(valid.to(tl.int32), 0)
    pricing: tl.constexpr = _PRICING[WIDTH > _FEW_SLICES]
    prices, step = _first(tile, inside, real, number, pricing[1])
    kept, least = prices, number + 1
    i = 0
    while (i <= pricing[0]) & (least > 0):
        pick = tl.where(valid, _choose(tile, prices, real, columns, WIDTH)[0], WIDTH)
        counts = _counts(pick, columns)
        kept, least, prices, step = _turn(kept, least, prices, step, counts, size, real, pricing[2])
        i += 1
    pick = tl.where(valid, _choose(tile, kept, real, columns, WIDTH)[0], WIDTH)
    counts = _counts(pick, columns)
    while tl.sum(tl.maximum(counts - size, 0), 0) > 0:
        target, value = _choose(tile, kept, real & (counts < size), columns, WIDTH)
        here = pick[:, None] == columns[None, :]
        best = tl.sum(tl.where(here, tile - kept[None, :], 0), 1)  # computed again: to keep it, registers would spill
        pick = tl.where(_least(here, _bucket(best - value), tl.maximum(counts - size, 0)), target, pick)
        counts = _counts(pick, columns)
    return pick


@triton.jit
def _first(tile, inside, real, number, first_step):
    """Prices start at a slice's mean score above the lowest slice's; the first step follows from the mean spread."""
    high, low = tl.max(tl.where(inside, tile, _LOWEST), 1), tl.min(tl.where(inside, tile, -(_LOWEST + 1)), 1)
    spread = tl.sum(tl.maximum(high.to(tl.int64) - low, 0), 0)  # below 0 in rows that are not there
    totals = tl.sum(tl.where(inside, tile, 0).to(tl.int64), 0)
    lowest = tl.min(tl.where(real, totals, 0x7FFFFFFFFFFFFFFF), 0)
    prices = tl.where(real, (totals - lowest) // number, 0).to(tl.int32)
    return prices, spread * first_step // (64 * number.to(tl.int64))


@triton.jit
def _turn(kept, least, prices, step, counts, size, real, decay):
    """The prices that overfill slices least are kept; they rise where it is too full, by less every time."""
    over = tl.sum(tl.maximum(counts - size, 0), 0)
    kept = tl.where(over <= least, prices, kept)
    prices += tl.where(real, counts.to(tl.int64) * step // size - step, 0).to(tl.int32)
    return kept, tl.minimum(over, least), prices, step * decay // 64


@triton.jit
def _counts(pick, columns):
    """(WIDTH,) tokens of each slice."""
    return tl.sum((pick[:, None] == columns[None, :]).to(tl.int32), 0)


@triton.jit
def _choose(tile, prices, allowed, columns, WIDTH: tl.constexpr):
    """The allowed column of highest score less price (the lowest of equals), and that difference."""
    values = tl.where(allowed[None, :], tile - prices[None, :], _LOWEST)
    best = tl.max(values, 1)
    return tl.min(tl.where(values == best[:, None], columns[None, :], WIDTH), 1), best


@triton.jit
def _bucket(loss):
    """The order of magnitude of a loss."""
    octave = tl.zeros_like(loss)  # the least by which the loss is shifted to less than _COARSE
    for i in tl.static_range(5):
        octave += tl.where((loss >> (octave + ((16 >> i) - 1))) >= _COARSE, 16 >> i, 0)
    return (octave << _FINE_BITS) + (loss >> octave)


@triton.jit
def _least(here, bucket, quota):
    """(BLOCK,) the first tokens of each slice by (bucket, token), as many as its quota; here: each token's slice.

    The bucket in which a quota ends is found by halving; a histogram takes several times as many instructions.
    """
    bucket = bucket[:, None]
    end, before = tl.zeros_like(quota), tl.zeros_like(quota)  # the bucket, and the tokens of buckets before it
    for half in tl.static_range(_BUCKET_BITS):
        width = (_BUCKETS // 2) >> half
        number = tl.sum((here & (bucket < (end + width)[None, :])).to(tl.int32), 0)
        before = tl.where(number < quota, number, before)
        end += tl.where(number < quota, width, 0)
    at_end = here & (bucket == end[None, :])
    within = at_end & (tl.cumsum(at_end.to(tl.int32), 0) <= (quota - before)[None, :])
    return tl.sum((within | (here & (bucket < end[None, :]))).to(tl.int32), 1) > 0
