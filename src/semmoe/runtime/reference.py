"""What the runtime computes, in plain torch: the specification that every fast path is tested against.

Functions for a collective take the inputs of all ranks and return the outputs of all ranks. Sums are in rank order, in
float32 (float64 for float64), and rounded once, so that a result does not depend on the rank that computes it. Partial
sums depend on the placement of experts, so that results differ between placements in their last bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class RankOrder(NamedTuple):
    """Rows sorted by rank, stable; arrays or tensors alike.

    Worked example, ranks [1, 0, 1, 1, 0] of two: order = [1, 4, 0, 2, 3], inverse = [2, 0, 3, 4, 1], counts = [2, 3].
    With slices of four rows: order = [1, 4, -1, -1, 0, 2, 3, -1], inverse = [4, 0, 5, 6, 1].
    """

    order: Tensor  # (N,) int64: the row in each place; with slices (size * slice_rows,), -1 for padding
    inverse: Tensor  # (N,) int64: the place of each row
    counts: Tensor  # (size,) int64: rows of each rank


def argsort_ranks(ranks: Tensor, size: int, slice_rows: int | None = None) -> RankOrder:
    """Sort rank ids (N,) of 0 to size - 1. slice_rows: places per rank; by default one per row of the rank."""
    ranks = ranks.long()
    by_rank = torch.argsort(ranks, stable=True)
    counts = (ranks[:, None] == torch.arange(size, device=ranks.device)).sum(0)  # torch.bincount waits for the device
    places = torch.arange(len(ranks), device=ranks.device)
    if slice_rows is not None:
        assert int(counts.max()) <= slice_rows, f"a slice of {int(counts.max())} rows exceeds its size of {slice_rows}"
        first = counts.cumsum(0) - counts
        places += (torch.arange(size, device=ranks.device) * slice_rows - first)[ranks[by_rank]]
    order = ranks.new_full((len(ranks) if slice_rows is None else size * slice_rows,), -1)
    order[places] = by_rank
    return RankOrder(order, torch.empty_like(by_rank).scatter_(0, by_rank, places), counts)


def order_of_real(ranks: Tensor, real: Tensor, size: int) -> RankOrder:
    """As `argsort_ranks`, but rows that are not `real` (N,) bool have the order -1 and no count (int32)."""
    order, inverse, _ = argsort_ranks(ranks, size)
    filled = real[order]
    every = torch.arange(size, device=ranks.device)
    counts = ((ranks[:, None] == every) & real[:, None]).sum(0, dtype=torch.int32)
    return RankOrder(torch.where(filled, order, -1), inverse, counts)


def cover_copies(
    expert_ids: Tensor, ranks: Tensor, physical: Tensor, preferred: Tensor, source: int, num_ranks: int
) -> Tensor:
    """(n, K) physical ids of experts (n, K), -1 for -1, by the rule `cover` of `copychoice` for tokens of one rank.

    ranks (E, X) and physical (E, X) of the copies nearest to the source rank, padded with -1; preferred (E,).
    """
    known, ids, K = expert_ids >= 0, expert_ids.long().clamp(min=0), expert_ids.shape[1]
    every = torch.arange(num_ranks, device=ids.device)
    held = (ranks[ids][..., None] == every).any(2) & known[..., None]  # (n, K, G)
    away = (every - source) % num_ranks
    liked = held & (preferred[ids][..., None] == every)
    chosen = torch.where(held.sum(2) == 1, held.int().argmax(2), -1)
    reached = (held & (chosen >= 0)[..., None]).any(1, keepdim=True)
    distance = torch.where(liked, -1, away).masked_fill(~(held & reached), num_ranks)
    nearest = distance.min(2)
    chosen = torch.where((chosen < 0) & (nearest.values < num_ranks), nearest.indices, chosen)
    for _ in range(K):
        left = (held & (chosen < 0)[..., None]).int()
        score = (left * (K + 1) + left * liked).sum(1)  # (n, G)
        best = ((score + 1) * num_ranks - away).argmax(1)[:, None]
        taken = left.gather(2, best[..., None].expand(-1, K, 1))[..., 0] > 0
        chosen = torch.where(taken, best, chosen)
    copy = (ranks[ids] == chosen[..., None]) & known[..., None]
    return torch.where(copy, physical[ids], -1).amax(2).long()


def shuffled_reduce_scatter(partials: list[Tensor], ranks: Tensor) -> list[Tensor]:
    """partials (N, H) of every rank, ranks (N,) of the tokens -> (n, H) for every rank: the sums of its tokens."""
    total = sum_in_order(partials)
    return [total[ranks == j] for j in range(len(partials))]


def shuffled_all_gather(rows: list[Tensor], ranks: Tensor) -> Tensor:
    """The rows (n, ...) of every rank, its tokens in their order -> (N, ...), the same on every rank."""
    out = rows[0].new_empty((len(ranks), *rows[0].shape[1:]))
    for j, part in enumerate(rows):
        out[ranks == j] = part
    return out


def sum_in_order(parts: list[Tensor]) -> Tensor:
    """The sum of tensors of equal shape, added from the first to the last."""
    total = parts[0].to(torch.promote_types(parts[0].dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return total.to(parts[0].dtype)


def dispatch(
    hidden: list[Tensor], expert_ids: list[Tensor], weights: list[Tensor], targets: list[Tensor]
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """What every rank receives: rows (M, H), expert ids (M, K) with -1 for experts of other ranks, weights (M, K).

    Arguments of every rank: tokens (n, H), expert ids (n, K), weights (n, K) and the rank that computes each chosen
    expert (n, K), -1 for none. A token is sent once to each rank that computes any of its experts. Rows from other
    ranks come first, in rank order; own tokens are last.
    """
    out = []
    for rank in range(len(hidden)):
        rows = []
        for j in [*(j for j in range(len(hidden)) if j != rank), rank]:
            here = targets[j] == rank
            sent = here.any(dim=1)
            ids = torch.where(here, expert_ids[j], -1)
            rows.append((hidden[j][sent], ids[sent], weights[j][sent]))
        hidden_, ids_, weights_ = (torch.cat(columns) for columns in zip(*rows, strict=True))
        out.append((hidden_, ids_, weights_))
    return out


def combine(results: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """(n, H) for every rank: the results of its tokens from all ranks, added in rank order; 0 if there is none."""
    size, out = len(results), []
    for j, target in enumerate(targets):
        kind = torch.promote_types(results[j].dtype, torch.float32)
        total = torch.zeros((len(target), results[j].shape[1]), dtype=kind)
        for rank in range(size):
            sources = [*(i for i in range(size) if i != rank), rank]
            counts = [int((targets[i] == rank).any(dim=1).sum()) for i in sources]
            total[(target == rank).any(dim=1)] += results[rank].split(counts)[sources.index(j)]
        out.append(total.to(results[j].dtype))
    return out
