"""The copy choice by the rule `cover` as a Triton kernel: one program per token, nothing but its own ids is read."""

import torch
import triton
import triton.language as tl
from torch import Tensor

WARP_TILE = 256  # experts of a token times ranks that one warp looks through


def cover_copies(
    expert_ids: Tensor, ranks: Tensor, physical: Tensor, preferred: Tensor, source: int, num_ranks: int
) -> Tensor:
    """Same as `on_cpu.cover_copies`."""
    n, K = expert_ids.shape
    out = torch.empty_like(expert_ids)
    if n > 0:
        cover_kernel[(n,)](
            expert_ids.contiguous(),
            ranks,
            physical,
            preferred,
            out,
            source,
            num_ranks,
            K,
            COPIES=ranks.shape[1],
            EXPERTS=triton.next_power_of_2(K),
            RANKS=triton.next_power_of_2(num_ranks),
            num_warps=1 if K * num_ranks <= WARP_TILE else 4,
        )
    return out


@triton.jit
def cover_kernel(
    expert_ids,
    ranks,
    physical,
    preferred,
    out,
    source,
    num_ranks,
    K,
    COPIES: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Write the physical ids of a token's experts."""
    k, g = tl.arange(0, EXPERTS), tl.arange(0, RANKS)
    at = tl.program_id(0).to(tl.int64) * K + k
    ids = tl.load(expert_ids + at, mask=k < K, other=-1).to(tl.int64)
    known = ids >= 0
    if COPIES == 1:
        only_one = tl.load(physical + ids, mask=known, other=-1)
        tl.store(out + at, only_one.to(out.dtype.element_ty), mask=k < K)
        return
    held = tl.zeros((EXPERTS, RANKS), tl.int32)
    for x in tl.static_range(COPIES):
        rank = tl.load(ranks + ids * COPIES + x, mask=known, other=-1).to(tl.int32)
        held = held | (rank[:, None] == g[None, :]).to(tl.int32)
    first = tl.load(preferred + ids, mask=known, other=-1).to(tl.int32)
    liked = held * (first[:, None] == g[None, :]).to(tl.int32)
    away = (g - source + num_ranks) % num_ranks
    only = tl.sum(held, 1) == 1
    chosen = tl.where(only, tl.argmax(held, 1), -1)
    reached = tl.max(held * only[:, None].to(tl.int32), 0)
    distance = tl.where(liked > 0, -1, away[None, :])
    distance = tl.where(held * reached[None, :] > 0, distance, num_ranks)
    found = (chosen < 0) & (tl.min(distance, 1) < num_ranks)
    chosen = tl.where(found, tl.argmin(distance, 1), chosen)
    left = held * (chosen < 0)[:, None].to(tl.int32)
    while tl.max(tl.max(left, 1), 0) > 0:  # each turn takes a rank that holds some of the experts left
        score = (tl.sum(left * (K + 1) + left * liked, 0) + 1) * num_ranks - away
        best = tl.argmax(tl.where(g < num_ranks, score, -1), 0)
        taken = tl.sum(left * (g == best)[None, :].to(tl.int32), 1) > 0
        chosen = tl.where(taken, best, chosen)
        left = held * (chosen < 0)[:, None].to(tl.int32)
    result = tl.full((EXPERTS,), -1, tl.int64)
    for x in tl.static_range(COPIES):
        rank = tl.load(ranks + ids * COPIES + x, mask=known, other=-2).to(tl.int32)
        slot = tl.load(physical + ids * COPIES + x, mask=known, other=-1).to(tl.int64)
        result = tl.where(rank == chosen, slot, result)
    tl.store(out + at, result.to(out.dtype.element_ty), mask=k < K)
