"""Pass routing on to the histories of requests, as Triton kernels: `by_weight`, `restore` and `observe_in_turn`.

Shapes are static and nothing waits for the device. Rows of padding share a slot that is never read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.runtime.kernels.shuffle import columns_of, move_row
from semmoe.runtime.tables import Rows, ScoreTables, States, Turns
from semmoe.tokens.kernels import FRACTION, RUNNING_LIMIT, RUNNING_PRIOR

TILE = 256  # rows times ranks, or times experts of a token, of a program
SETTLED = (RUNNING_PRIOR + RUNNING_LIMIT).bit_length() - 1  # the last weight of a running mean is 2**SETTLED
assert RUNNING_PRIOR + RUNNING_LIMIT == 1 << SETTLED

_FRACTION, _SETTLED = tl.constexpr(FRACTION), tl.constexpr(SETTLED)
_LIMIT, _PRIOR = tl.constexpr(RUNNING_LIMIT), tl.constexpr(RUNNING_PRIOR)


def restore(
    rows: Tensor, expert_ids: Tensor, inverse: Tensor,
    layer: int, routed: Tensor, batch: Rows, tables: ScoreTables, states: States,
) -> Tensor:  # fmt: skip
    """Same as `on_cpu.restore`."""
    number, width, ranks, top_k = len(inverse), rows.shape[1], states.running.shape[2], routed.shape[2]
    out = torch.empty((number, width), dtype=rows.dtype, device=rows.device)
    if number:
        grid, block = columns_of(number, width)
        restore_kernel[grid](
            out, rows.contiguous(), inverse, routed, expert_ids.contiguous(), batch.real, batch.slots.contiguous(),
            tables.history_scores[layer], *(state[layer] for state in states),
            layer, number, width, ranks, tables.num_experts, top_k, OBSERVES=batch.turns is None, BLOCK=block,
            EXPERTS=triton.next_power_of_2(top_k), WIDTH=triton.next_power_of_2(ranks),
        )  # fmt: skip
    return out


def observe_in_turn(tables: ScoreTables, states: States, turns: Turns, routed: Tensor) -> None:
    """Same as `on_cpu.observe_in_turn`, without waiting: sums of all tokens, then slot by slot."""
    (layers, batch, top_k), rows = routed.shape, tables.history_scores
    tokens, ranks = len(turns.rows), rows.shape[2]
    if tokens:
        sums = torch.empty((layers, tokens, ranks), dtype=torch.int32, device=rows.device)
        (programs,), block = _blocks(tokens, ranks)
        shared = turns.rows, routed, tokens, batch, ranks, rows.shape[1], top_k, block.pop("WIDTH")
        sums_kernel[(programs, layers)](sums, rows, *shared, **block)
        slots = states.running.shape[1], turns.slots, turns.first
        in_turn_kernel[(len(turns.slots), layers)](sums, rows, *states, *slots, *shared, num_warps=1)


def by_weight(expert_ids: Tensor, weights: Tensor, kind: torch.dtype, logical: Tensor | None = None) -> Tensor:
    """(n, K): same as `on_cpu.by_weight`."""
    out = torch.empty(expert_ids.shape, dtype=kind, device=expert_ids.device)
    if len(out):
        grid, block = _blocks(*out.shape)
        given = expert_ids.contiguous(), weights.contiguous(), out if logical is None else logical, len(out)
        by_weight_kernel[grid](out, *given, MAPS=logical is not None, TOP_K=out.shape[1], **block)
    return out


def _blocks(rows: int, columns: int) -> tuple[tuple[int], dict[str, int]]:
    width = triton.next_power_of_2(columns)
    block = max(min(triton.next_power_of_2(rows), TILE // width), 1)
    return (triton.cdiv(rows, block),), {
        "BLOCK": block,
        "WIDTH": width,
        "num_warps": max(min(block * width // 64, 4), 1),
    }


@triton.jit(
    do_not_specialize=["layer", "number"], do_not_specialize_on_alignment=["table", "running", "previous", "seen"]
)
def restore_kernel(
    out, rows, inverse, routed, expert_ids, real, slots, table, running, previous, seen,
    layer, number, width, ranks, experts, top_k,
    OBSERVES: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Move a row to its place; its first program also moves its experts, and updates its slot's history."""
    i = tl.program_id(0)
    place = tl.load(inverse + i)
    move_row(rows, place, out, i, tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), width)
    if tl.program_id(1) == 0:
        k, g = tl.arange(0, EXPERTS), tl.arange(0, WIDTH)
        found = tl.load(expert_ids + place * top_k + k, mask=k < top_k, other=0).to(tl.int32)
        found = tl.where(tl.load(real + i).to(tl.int32) > 0, found, 0)
        at = (layer.to(tl.int64) * number + i) * top_k + k
        tl.store(routed + at, found.to(routed.dtype.element_ty), mask=k < top_k)
        if OBSERVES:
            mask, at = (k < top_k)[:, None] & (g < ranks)[None, :], found[:, None] * ranks + g[None, :]
            now = tl.sum(tl.load(table + at, mask=mask, other=0).to(tl.int32), 0)
            last = tl.sum(tl.load(table + experts * ranks + at, mask=mask, other=0).to(tl.int32), 0)
            slot = tl.load(slots + i).to(tl.int64)
            state, inside = slot * ranks + g, g < ranks
            times = tl.load(seen + slot)
            before = tl.load(running + state, mask=inside, other=0)
            step = _divided((now << _FRACTION) - before, (tl.minimum(times, _LIMIT) + _PRIOR).to(tl.int32))
            tl.store(running + state, before + step, mask=inside)
            tl.store(previous + state, last, mask=inside)
            tl.store(seen + slot, times + 1)


@triton.jit
def _divided(change, weight):
    """Rounded towards minus infinity, as // in Python."""
    down = tl.maximum(weight - 1 - change, 0) // weight
    return tl.where(change < 0, -down, tl.maximum(change, 0) // weight)


@triton.jit(do_not_specialize=["tokens", "batch"])
def sums_kernel(
    sums, rows, order, expert_ids, tokens, batch, ranks, table, TOP_K: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a layer's rows for each token, in the order of turns."""
    t, g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    layer = tl.program_id(1)
    valid = t < tokens
    mask = valid[:, None] & (g < ranks)
    token = layer * batch + tl.load(order + t, mask=valid, other=0)
    now = tl.zeros((BLOCK, WIDTH), tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(expert_ids + token * TOP_K + k, mask=valid, other=0).to(tl.int32)
        now += tl.load(rows + (layer * table + expert[:, None]) * ranks + g, mask=mask, other=0).to(tl.int32)
    tl.store(sums + (layer.to(tl.int64) * tokens + t[:, None]) * ranks + g, now, mask=mask)


@triton.jit(do_not_specialize=["num_slots", "tokens", "batch"])
def in_turn_kernel(
    sums, rows, running, previous, seen, num_slots, slots, first, order, expert_ids, tokens, batch, ranks, table,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """One slot's tokens at one layer. Tokens after the first few divide by a power of two: a shift, eight in a turn."""
    layer, g = tl.program_id(1).to(tl.int64), tl.arange(0, WIDTH)
    mask = g < ranks
    t, end = tl.load(first + tl.program_id(0)), tl.load(first + tl.program_id(0) + 1)
    slot = layer * num_slots + tl.load(slots + tl.program_id(0))
    times = tl.load(seen + slot)
    tl.store(seen + slot, times + end - t)
    mean = tl.load(running + slot * ranks + g, mask=mask, other=0)
    of_layer = sums + layer * tokens * ranks + g
    while (t < end) & (times < _LIMIT):
        now = tl.load(of_layer + t * ranks, mask=mask, other=0)
        mean += _divided((now << _FRACTION) - mean, (times + _PRIOR).to(tl.int32))
        times += 1
        t += 1
    while t < end:
        for i in tl.static_range(8):
            now = tl.load(of_layer + (t + i) * ranks, mask=mask & (t + i < end), other=0)
            mean = tl.where(t + i < end, mean + (((now << _FRACTION) - mean) >> _SETTLED), mean)
        t += 8
    tl.store(running + slot * ranks + g, mean, mask=mask)
    token, last = layer * batch + tl.load(order + end - 1), tl.zeros((WIDTH,), tl.int32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(expert_ids + token * TOP_K + k).to(tl.int32) + table // 2
        last += tl.load(rows + (layer * table + expert) * ranks + g, mask=mask, other=0).to(tl.int32)
    tl.store(previous + slot * ranks + g, last, mask=mask)


@triton.jit(do_not_specialize=["number"])
def by_weight_kernel(
    out,
    expert_ids,
    weights,
    logical,
    number,
    MAPS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Sort experts by falling weight: a place is the number of experts before it. NaN comes first, as in torch."""
    t, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    valid = t < number
    mask, at = valid[:, None] & (k < TOP_K), t[:, None] * TOP_K + k
    own = tl.load(weights + at, mask=mask, other=0).to(tl.float32)
    own = tl.where(own != own, float("inf"), own)
    place = tl.zeros((BLOCK, WIDTH), tl.int32)
    for j in tl.static_range(TOP_K):
        other = tl.load(weights + t * TOP_K + j, mask=valid, other=0).to(tl.float32)
        other = tl.where(other != other, float("inf"), other)[:, None]
        place += ((other > own) | ((other == own) & (j < k))).to(tl.int32)
    ids = tl.load(expert_ids + at, mask=mask, other=0)
    if MAPS:
        ids = tl.load(logical + ids, mask=mask & (ids >= 0), other=-1)
    tl.store(out + t[:, None] * TOP_K + place, ids.to(out.dtype.element_ty), mask=mask)
