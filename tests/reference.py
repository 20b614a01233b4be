"""The runtime in plain torch: the specification that kernels and collectives are tested against.

Functions with the names of `semmoe.runtime.kernels` run on any device and never wait for it, so that a test may put
this module in their place. Functions for a collective take the inputs of all ranks and return the outputs of all ranks.
Sums are in rank order, in float32 (float64 for float64), and rounded once, so that a result does not depend on the rank
that computes it. Partial sums depend on the placement of experts, so that results differ between placements in their
last bits.
"""

from collections.abc import Sequence

import numpy as np
import oracles
import torch
from torch import Tensor

from semmoe.runtime.rows import sum_in_order
from semmoe.runtime.tables import Rows, ScoreTables, States, Turns
from semmoe.tokens.kernels import (
    BUCKETS,
    FEW_SLICES,
    FINE_BITS,
    FRACTION,
    LOWEST,
    PRICING,
    RUNNING_LIMIT,
    RUNNING_PRIOR,
    chunks,
)
from semmoe.tokens.slices import slice_size


def order_of_real(ranks: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort rank ids (N,) of 0 to size - 1; rows that are not `real` (N,) bool have the order -1 and no count."""
    ranks = ranks.long()
    order = torch.argsort(ranks, stable=True)
    every = torch.arange(size, device=ranks.device)
    counts = ((ranks[:, None] == every) & real[:, None]).sum(0, dtype=torch.int32)
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(ranks), device=ranks.device))
    return torch.where(real[order], order, -1), inverse, counts


def by_weight(expert_ids: Tensor, weights: Tensor, kind: torch.dtype, logical: Tensor | None = None) -> Tensor:
    """Expert ids (n, K) by falling weight (n, K), in type `kind`; of equal weights the first comes first.

    logical (P,): the expert of each physical id.
    """
    if logical is not None:
        expert_ids = torch.where(expert_ids < 0, -1, logical[expert_ids.long()])
    return torch.gather(expert_ids, 1, weights.argsort(dim=1, descending=True, stable=True)).to(kind)


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H), zeros where the index is -1."""
    return rows[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)


def gather_both(rows: Tensor, others: Tensor, index: Tensor, first: int, number: int) -> tuple[Tensor, Tensor]:
    """rows (N, H) by index (M,), and others (N, H) by `number` of its entries from `first` on."""
    return gather_rows(rows, index), gather_rows(others, index[first : first + number])


def count(expert_ids: Tensor, totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None) -> None:
    """Add physical ids (n, K), -1 for none, to totals of pairs (R,), rows (R,), rows of nodes (D,) and tokens (1,)."""
    if real is not None:
        counts = (torch.arange(len(expert_ids), device=expert_ids.device) < real)[:, None]
        expert_ids = torch.where(counts, expert_ids, -1)
    owners = torch.where(expert_ids < 0, num_ranks, expert_ids // per_rank).long()
    reached = owners.new_zeros((len(owners), num_ranks + 1)).scatter_(1, owners, 1)
    pairs = owners.new_zeros(num_ranks + 1).scatter_add_(0, owners.flatten(), torch.ones_like(owners.flatten()))
    nodes = reached[:, :-1].unflatten(1, (-1, width)).amax(dim=2)  # (n, nodes)
    tokens = nodes.amax(dim=1).sum(0, keepdim=True)
    totals += torch.cat([pairs[:-1], reached.sum(dim=0)[:-1], nodes.sum(dim=0), tokens])


def place(
    expert_ids: Tensor, tables: Sequence[Tensor], source: int,
    totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None,
) -> Tensor:  # fmt: skip
    """(n, K) physical ids of experts (n, K), -1 for -1, by the rule `cover` of `copychoice` for tokens of one rank.

    tables: ranks (E, X) and physical (E, X) of the copies nearest to the source rank, padded with -1; preferred (E,).
    The physical ids are counted unless totals is empty.
    """
    ranks, physical, preferred = tables
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
    out = torch.where(copy, physical[ids], -1).amax(2).to(expert_ids.dtype)
    if len(totals):
        count(out, totals, num_ranks, per_rank, width, real)
    return out


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


def look_up_tokens(
    tables: ScoreTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`."""
    last, columns = len(tables.token_rows) - 1, slice(first_rank, first_rank + num_slices)
    ids = token_ids.long()
    rows = tables.token_rows[torch.where((ids >= 0) & (ids < last), ids, last)].long()
    return torch.stack([tables.token_scores[l, rows, columns].int() << tables.token_shift[l] for l in layers])


def slices(
    tables: ScoreTables, layer: int, first_rank: int, looked_up: Tensor, routed: Tensor, rows: Rows, states: States
) -> tuple[Tensor, Tensor, Tensor]:
    """The slices of a pass's rows at a layer, as order, inverse and counts: see `on_cpu.slices`."""
    earlier = routed[max(layer - tables.lookback, 0) : layer].flip(0)
    known = (state[layer] for state in states[:2])
    history = contribution(tables.history_scores[layer], *known, rows.slots, rows.decoding)
    scores = score(tables, layer, first_rank, looked_up[layer], earlier, history, rows.real)
    return order_of_real(assign(scores), rows.real, looked_up.shape[2])


def score(
    tables: ScoreTables, layer: int, first_rank: int, tokens: Tensor, earlier: Tensor, history: Tensor, real: Tensor
) -> Tensor:
    """(B, S) int32: same as `semmoe.tokens.slices.score`, and 0 for rows that are not `real` (B,)."""
    columns = slice(first_rank, first_rank + tokens.shape[1])
    out = tokens + history[:, columns].int()
    base = 0
    for j, chosen in enumerate(earlier.unbind()):
        for experts in chosen.long().unbind(1):
            out = out + tables.path_scores[layer, base + experts, columns].int()
            base += tables.num_experts if j < tables.ordered else 0
        base += 0 if j < tables.ordered else tables.num_experts
    return out.masked_fill(~real[:, None], 0)


def contribution(rows: Tensor, running: Tensor, previous: Tensor, slots: Tensor, decoding: Tensor) -> Tensor:
    """(B, G) int32 by one layer's rows (2 * E + 1, G) and states (slots, G): as in `on_cpu.slices`."""
    known = (running[slots] >> FRACTION) + previous[slots]
    return torch.where(decoding[:, None], known, rows[-1].int())


def restore(
    rows: Tensor, expert_ids: Tensor, inverse: Tensor,
    layer: int, routed: Tensor, batch: Rows, tables: ScoreTables, states: States,
) -> Tensor:  # fmt: skip
    """Put rows and their experts back in order, and observe the experts: see `on_cpu.restore`."""
    routed[layer] = expert_ids[inverse].masked_fill(~batch.real[:, None], 0).to(routed.dtype)
    if batch.turns is None:
        observe(tables.history_scores[layer], *(state[layer] for state in states), batch.slots, routed[layer])
    return rows[inverse]


def observe(rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, slots: Tensor, expert_ids: Tensor) -> None:
    """Observe the experts (B, K) of one token of each of `slots` (B,), distinct except for slot 0, which is padding."""
    experts = (len(rows) - 1) // 2
    ids, before, times = expert_ids.long(), running[slots].long(), seen[slots]
    now = rows[ids].sum(1, dtype=torch.int64)
    weight = times.clamp(max=RUNNING_LIMIT) + RUNNING_PRIOR
    change = torch.div((now << FRACTION) - before, weight[:, None], rounding_mode="floor")
    running[slots] = (before + change).int()
    previous[slots] = rows[experts + ids].sum(1, dtype=torch.int32)
    seen[slots] = times + 1


def observe_in_turn(tables: ScoreTables, states: States, turns: Turns, routed: Tensor) -> None:
    """Observe at all layers what tokens chose (L, N, K). It is computed on the host, which waits."""
    means, last, times = arrays = [state[:, turns.slots].cpu().numpy() for state in states]
    local = np.repeat(np.arange(len(turns.slots)), np.diff(turns.first.cpu().numpy()))
    ids, rows = routed[:, turns.rows].long().cpu().numpy(), tables.history_scores.cpu().numpy()
    for layer in range(len(rows)):
        oracles.observe(means[layer], last[layer], times[layer], local, ids[layer], rows[layer])
    for state, array in zip(states, arrays, strict=True):
        state[:, turns.slots] = torch.from_numpy(array).to(state.device)


def assign(scores: Tensor) -> Tensor:
    """(B,) int16: slices, same as `semmoe.tokens.slices.assign`."""
    tokens, num_slices = scores.shape
    out, parts = torch.empty(tokens, dtype=torch.int16, device=scores.device), chunks(tokens, num_slices)
    every = torch.arange(slice_size(tokens, num_slices) * num_slices, device=scores.device).view(-1, num_slices)
    for chunk, part in enumerate(parts if tokens else ()):
        rows = every[chunk :: len(parts)].reshape(-1)[: len(part)]  # which are `part`, without a copy from the host
        out[rows] = _assign(scores[rows])
    return out


def _assign(scores: Tensor) -> Tensor:
    tokens, slices = scores.shape
    size = -(-tokens // slices)
    steps, first_step, decay = PRICING[slices > FEW_SLICES]
    scores = scores.long()
    prices, step = _start(scores, first_step)
    kept, least = prices, torch.full_like(step, tokens + 1)
    for _ in range(steps + 1):
        counts = _counts(_choose(scores - prices)[0], slices)
        over = (counts - size).clamp(min=0).sum()
        better = (over <= least) & (least > 0)  # the numba loop ends where all fits
        kept, least = torch.where(better, prices, kept), torch.where(better, over, least)
        prices = prices + torch.div(counts * step, size, rounding_mode="floor") - step
        step = step * decay // 64
    values = scores - kept
    pick = _choose(values)[0]
    for _ in range(slices):
        pick = _level(values, pick, size)
    return pick.to(torch.int16)


def _start(scores: Tensor, first_step: int) -> tuple[Tensor, Tensor]:
    """Initial prices (S,) and the first step, a scalar tensor."""
    totals, tokens = scores.sum(0), len(scores)
    spread = (scores.amax(1) - scores.amin(1)).sum()
    return (totals - totals.min()) // tokens, spread * first_step // (64 * tokens)


def _choose(values: Tensor) -> tuple[Tensor, Tensor]:
    """The column of the largest value in each row of values (B, S) (the lowest of equals), and that value."""
    best = values.amax(1)
    columns = torch.arange(values.shape[1], device=values.device)
    return torch.where(values == best[:, None], columns, values.shape[1]).amin(1), best


def _counts(pick: Tensor, slices: int) -> Tensor:
    return (pick[:, None] == torch.arange(slices, device=pick.device)).sum(0)


def _level(values: Tensor, pick: Tensor, size: int) -> Tensor:
    """`pick` (B,) after one round of moves from overfull slices to those with room."""
    counts = _counts(pick, values.shape[1])
    excess, room = (counts - size).clamp(min=0), (size - counts).clamp(min=0)
    target, value = _choose(torch.where(room > 0, values, LOWEST))
    loss = values.gather(1, pick[:, None])[:, 0] - value
    bucket = torch.where(excess[pick] > 0, _bucket(loss), 0)
    return torch.where(_least(pick, bucket, excess), target, pick)


def _bucket(loss: Tensor) -> Tensor:
    edges = (2 << FINE_BITS) << torch.arange(31 - FINE_BITS, device=loss.device)
    octave = (loss[:, None] >= edges).sum(1)
    return (octave << FINE_BITS) + (loss >> octave)


def _least(group: Tensor, bucket: Tensor, quota: Tensor) -> Tensor:
    """(B,) bool: the tokens that are the first quota[g] of their group by (bucket, token)."""
    counts = torch.zeros(len(quota) * BUCKETS, dtype=torch.int64, device=quota.device)
    counts = counts.index_add(0, group * BUCKETS + bucket, torch.ones_like(group)).view(-1, BUCKETS)
    until = counts.cumsum(1)
    limit = (until < quota[:, None]).sum(1).clamp(max=BUCKETS - 1)
    left = quota - (until - counts).gather(1, limit[:, None])[:, 0]
    at_limit = bucket == limit[group]
    groups = torch.arange(len(quota), device=quota.device)
    place = (at_limit[:, None] & (group[:, None] == groups)).cumsum(0).gather(1, group[:, None])[:, 0]
    return (quota[group] > 0) & ((bucket < limit[group]) | (at_limit & (place <= left[group])))
