"""The histories of requests as Triton kernels: `scores.observe`, `scores.contribution` and `shuffler.by_weight`.

Shapes are static and nothing waits for the device. Rows of padding share a slot that is never read.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.tokens.kernels import FRACTION, RUNNING_LIMIT, RUNNING_PRIOR

TILE = 256  # rows times ranks, or times experts of a token, of a program

_FRACTION, _LIMIT, _PRIOR = tl.constexpr(FRACTION), tl.constexpr(RUNNING_LIMIT), tl.constexpr(RUNNING_PRIOR)


def contribution(rows: Tensor, running: Tensor, previous: Tensor, slots: Tensor, decoding: Tensor) -> Tensor:
    """(B, G) int32: same as `semmoe.runtime.scores.contribution`."""
    out = torch.empty((len(slots), running.shape[1]), dtype=torch.int32, device=slots.device)
    if len(slots):
        grid, block = _blocks(*out.shape)
        contribution_kernel[grid](
            out, rows[-1], running, previous, slots.contiguous(), decoding.contiguous(), *out.shape, **block
        )
    return out


def observe(
    rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, slots: Tensor, expert_ids: Tensor, top_k: int
) -> Tensor:
    """(B, C): same as `semmoe.runtime.scores.observe`."""
    out = torch.empty_like(expert_ids, memory_format=torch.contiguous_format)
    if len(slots):
        grid, block = _blocks(len(slots), running.shape[1])
        observe_kernel[grid](
            out, rows, running, previous, seen, slots.contiguous(), expert_ids.contiguous(), len(slots),
            running.shape[1], (len(rows) - 1) // 2, COLUMNS=expert_ids.shape[1], TOP_K=top_k, **block,
        )  # fmt: skip
    return out


def by_weight(expert_ids: Tensor, weights: Tensor, kind: torch.dtype) -> Tensor:
    """(n, K): same as `semmoe.runtime.shuffler.by_weight`."""
    out = torch.empty(expert_ids.shape, dtype=kind, device=expert_ids.device)
    if len(out):
        grid, block = _blocks(*out.shape)
        given = expert_ids.contiguous(), weights.contiguous(), len(out)
        by_weight_kernel[grid](out, *given, TOP_K=out.shape[1], **block)
    return out


def _blocks(rows: int, columns: int) -> tuple[tuple[int], dict[str, int]]:
    width = triton.next_power_of_2(columns)
    block = max(min(triton.next_power_of_2(rows), TILE // width), 1)
    return (triton.cdiv(rows, block),), {
        "BLOCK": block,
        "WIDTH": width,
        "num_warps": max(min(block * width // 64, 4), 1),
    }


@triton.jit(do_not_specialize=["number"])
def contribution_kernel(
    out, mean, running, previous, slots, decoding, number, ranks, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    t, g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    valid = t < number
    mask = valid[:, None] & (g < ranks)
    state = tl.load(slots + t, mask=valid, other=0).to(tl.int64)[:, None] * ranks + g
    known = (tl.load(running + state, mask=mask, other=0) >> _FRACTION) + tl.load(previous + state, mask=mask, other=0)
    unknown = tl.load(mean + g, mask=g < ranks, other=0).to(tl.int32)
    decodes = tl.load(decoding + t, mask=valid, other=0).to(tl.int32)[:, None] > 0
    tl.store(out + t[:, None] * ranks + g, tl.where(decodes, known, unknown), mask=mask)


@triton.jit(do_not_specialize=["number"])
def observe_kernel(
    out,
    rows,
    running,
    previous,
    seen,
    slots,
    expert_ids,
    number,
    ranks,
    experts,
    COLUMNS: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t, g = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, WIDTH)[None, :]
    valid = t < number
    mask = valid[:, None] & (g < ranks)
    slot = tl.load(slots + t, mask=valid, other=0).to(tl.int64)
    now, last = tl.zeros((BLOCK, WIDTH), tl.int64), tl.zeros((BLOCK, WIDTH), tl.int32)
    for c in tl.static_range(COLUMNS):
        found = tl.load(expert_ids + t * COLUMNS + c, mask=valid, other=0)
        found = tl.where(slot != 0, found, 0)
        tl.store(out + t * COLUMNS + c, found, mask=valid)
        if c < TOP_K:
            expert = found.to(tl.int64)[:, None]
            now += tl.load(rows + expert * ranks + g, mask=mask, other=0).to(tl.int64)
            last += tl.load(rows + (experts + expert) * ranks + g, mask=mask, other=0).to(tl.int32)
    state = slot[:, None] * ranks + g
    times = tl.load(seen + slot, mask=valid, other=0)
    before = tl.load(running + state, mask=mask, other=0).to(tl.int64)
    weight = (tl.minimum(times, _LIMIT) + _PRIOR)[:, None]
    change = (now << _FRACTION) - before
    down = (tl.maximum(weight - 1 - change, 0)) // weight  # rounded towards minus infinity, as // in Python
    step = tl.where(change < 0, -down, tl.maximum(change, 0) // weight)
    tl.store(running + state, (before + step).to(tl.int32), mask=mask)
    tl.store(previous + state, last, mask=mask)
    tl.store(seen + slot, times + 1, mask=valid)


@triton.jit(do_not_specialize=["number"])
def by_weight_kernel(out, expert_ids, weights, number, TOP_K: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr):
    """An expert's place is the number of those before it; a weight that is no number comes first, as in torch."""
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
    tl.store(out + t[:, None] * TOP_K + place, ids.to(out.dtype.element_ty), mask=mask)
