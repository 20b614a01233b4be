"""Copies chosen and traffic counted as one Triton kernel: what `on_cpu.place` and `on_cpu.count` do.

A program takes a block of tokens, keeps its counts in registers, and adds each to its total once.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048  # pairs of a token and an expert, times ranks, of a program


def place(
    expert_ids: Tensor, tables: Sequence[Tensor], source: int,
    totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None,
) -> Tensor:  # fmt: skip
    """Same as `on_cpu.place`."""
    out = torch.empty_like(expert_ids, memory_format=torch.contiguous_format)
    _launch(expert_ids, tables, source, out, totals, num_ranks, (per_rank, width), real)
    return out


def count(expert_ids: Tensor, totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None) -> None:
    """Same as `on_cpu.count`."""
    _launch(expert_ids, (), 0, totals, totals, num_ranks, (per_rank, width), real)


def _launch(
    expert_ids: Tensor, tables: Sequence[Tensor], source: int, out: Tensor, totals: Tensor, num_ranks: int,
    sizes: tuple[int, int], real: Tensor | None,
) -> None:  # fmt: skip
    """Without tables the ids are physical, and nothing is chosen."""
    number, top_k = expert_ids.shape
    ranks, experts = triton.next_power_of_2(num_ranks), triton.next_power_of_2(top_k)
    block = max(min(triton.next_power_of_2(max(number, 1)), TILE // (ranks * experts)), 1)
    if number:
        place_kernel[(triton.cdiv(number, block),)](
            expert_ids.contiguous(), *(tables or [totals] * 3), out, totals, totals if real is None else real,
            number, top_k, source, num_ranks, *sizes,
            COPIES=tables[0].shape[1] if tables else 0, COUNT=len(totals) > 0, BOUND=real is not None,
            BLOCK=block, EXPERTS=experts, RANKS=ranks, NODES=triton.next_power_of_2(num_ranks // sizes[1]),
            num_warps=max(min(block * experts * ranks // 256, 4), 1),
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def place_kernel(
    expert_ids,
    ranks,
    physical,
    preferred,
    out,
    totals,
    real,
    number,
    top_k,
    source,
    num_ranks,
    per_rank,
    width,
    COPIES: tl.constexpr,
    COUNT: tl.constexpr,
    BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NODES: tl.constexpr,
):
    """COPIES: the width of the tables; 0: ids are physical. COUNT: add to the totals, of the first `real` rows."""
    t, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    valid = t < number
    mask = valid[:, None] & (k < top_k)[None, :]
    at = t.to(tl.int64)[:, None] * top_k + k[None, :]
    found = tl.load(expert_ids + at, mask=mask, other=-1).to(tl.int64)
    if COPIES == 1:
        found = tl.load(physical + found, mask=found >= 0, other=-1).to(tl.int64)
    elif COPIES > 1:
        found = _cover(found, ranks, physical, preferred, source, num_ranks, top_k, COPIES, BLOCK, EXPERTS, RANKS)
    if COPIES > 0:
        tl.store(out + at, found.to(out.dtype.element_ty), mask=mask)
    if COUNT:
        if BOUND:
            found = tl.where((t < tl.load(real))[:, None], found, -1)
        _count(found.to(tl.int32), totals, num_ranks, per_rank, width, RANKS, NODES)


@triton.jit
def _cover(
    ids, ranks, physical, preferred, source, num_ranks, top_k,
    COPIES: tl.constexpr, BLOCK: tl.constexpr, EXPERTS: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Physical ids (BLOCK, EXPERTS) of experts by the rule `cover`. Tables are read twice: they are in a cache."""
    g = tl.arange(0, RANKS)[None, None, :]
    known = ids >= 0
    held = tl.zeros((BLOCK, EXPERTS, RANKS), tl.int32)
    for x in tl.static_range(COPIES):
        rank = tl.load(ranks + ids * COPIES + x, mask=known, other=-1).to(tl.int32)
        held = held | (rank[:, :, None] == g).to(tl.int32)
    first = tl.load(preferred + ids, mask=known, other=-1).to(tl.int32)
    liked = held * (first[:, :, None] == g).to(tl.int32)
    away = (g - source + num_ranks) % num_ranks
    # An expert with one nearest copy is computed there, so that the token reaches this rank anyway.
    only = tl.sum(held, 2) == 1
    chosen = tl.where(only, tl.argmax(held, 2), -1)
    reached = tl.max(held * only[:, :, None].to(tl.int32), 1)
    distance = tl.where(held * reached[:, None, :] > 0, tl.where(liked > 0, -1, away), num_ranks)
    chosen = tl.where((chosen < 0) & (tl.min(distance, 2) < num_ranks), tl.argmin(distance, 2), chosen)
    left = held * (chosen < 0)[:, :, None].to(tl.int32)
    while tl.max(tl.max(tl.max(left, 2), 1), 0) > 0:  # each turn takes a rank that holds some of a token's experts left
        score = (tl.sum(left * (top_k + 1) + left * liked, 1)[:, None, :] + 1) * num_ranks - away
        best = tl.argmax(tl.where(g < num_ranks, score, -1), 2)  # (BLOCK, 1)
        taken = tl.sum(left * (g == best[:, :, None]).to(tl.int32), 2) > 0
        chosen = tl.where(taken, best, chosen)
        left = held * (chosen < 0)[:, :, None].to(tl.int32)
    found = tl.full((BLOCK, EXPERTS), -1, tl.int64)
    for x in tl.static_range(COPIES):
        rank = tl.load(ranks + ids * COPIES + x, mask=known, other=-2).to(tl.int32)
        slot = tl.load(physical + ids * COPIES + x, mask=known, other=-1).to(tl.int64)
        found = tl.where(rank == chosen, slot, found)
    return found


@triton.jit
def _count(ids, totals, num_ranks, per_rank, width, RANKS: tl.constexpr, NODES: tl.constexpr):
    """Add the ids (BLOCK, EXPERTS) of a block to the totals; -1 for none."""
    g, d = tl.arange(0, RANKS), tl.arange(0, NODES)
    rank = tl.where(ids >= 0, ids // per_rank, -1)
    node = tl.where(ids >= 0, rank // width, -1)
    here = (rank[:, :, None] == g[None, None, :]).to(tl.int32)  # (BLOCK, EXPERTS, RANKS)
    nodes = tl.max((node[:, :, None] == d[None, None, :]).to(tl.int32), 1)
    num_nodes = num_ranks // width
    _add(totals, g, tl.sum(tl.sum(here, 1), 0), num_ranks)
    _add(totals + num_ranks, g, tl.sum(tl.max(here, 1), 0), num_ranks)
    _add(totals + 2 * num_ranks, d, tl.sum(nodes, 0), num_nodes)
    tl.atomic_add(totals + 2 * num_ranks + num_nodes, tl.sum(tl.max(nodes, 1), 0).to(tl.int64))


@triton.jit
def _add(totals, at, counts, size):
    tl.atomic_add(totals + at, counts.to(tl.int64), mask=(at < size) & (counts > 0))
