"""`semmoe.tokens.slices` in plain torch, on any device without waiting for it: the specification of the kernels."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from semmoe.tokens import slices
from semmoe.tokens.kernels import (
    BUCKETS,
    FINE_BITS,
    FIRST_STEP,
    FRACTION,
    LOWEST,
    PRICE_STEPS,
    RUNNING_LIMIT,
    RUNNING_PRIOR,
    STEP_DECAY,
    chunks,
)
from semmoe.tokens.slices import PathScores, slice_size


@dataclass(frozen=True)
class Turns:
    """The tokens of a pass in which slots have several, by slot and in their order; without padding."""

    slots: Tensor  # (R,) int64, distinct
    first: Tensor  # (R + 1,) int64: where each slot's tokens begin in `rows`
    rows: Tensor  # (M,) int64

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> "Turns":
        """slots (N,): that of each row, 0 for padding."""
        order = np.argsort(slots, kind="stable")[np.count_nonzero(slots == 0) :]
        touched, first = np.unique(slots[order], return_index=True)
        return cls(*(torch.tensor(part, device=device) for part in (touched, np.append(first, len(order)), order)))


@dataclass(frozen=True, kw_only=True)
class DeviceTables:
    """`PathScores` as tensors of the same shapes."""

    token_rows: Tensor
    token_scores: Tensor
    token_shift: Tensor  # (L,) int32
    path_scores: Tensor
    history_scores: Tensor
    lookback: int
    ordered: int

    @classmethod
    def of(cls, tables: PathScores, device: str | torch.device = "cpu") -> "DeviceTables":
        def tensor(array: np.ndarray) -> Tensor:
            return torch.tensor(array, device=device)

        return cls(
            token_rows=tensor(tables.token_rows),
            token_scores=tensor(tables.token_scores),
            token_shift=tensor(tables.token_shift.astype(np.int32)),
            path_scores=tensor(tables.path_scores),
            history_scores=tensor(tables.history_scores),
            lookback=tables.lookback,
            ordered=tables.ordered,
        )

    @property
    def num_experts(self) -> int:
        return (self.history_scores.shape[1] - 1) // 2


def look_up_tokens(
    tables: DeviceTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`."""
    last, columns = len(tables.token_rows) - 1, slice(first_rank, first_rank + num_slices)
    ids = token_ids.long()
    rows = tables.token_rows[torch.where((ids >= 0) & (ids < last), ids, last)].long()
    return torch.stack([tables.token_scores[l, rows, columns].int() << tables.token_shift[l] for l in layers])


def score(
    tables: DeviceTables, layer: int, first_rank: int, tokens: Tensor, earlier: Tensor, history: Tensor | None = None,
    real: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """(B, S) int32: same as `semmoe.tokens.slices.score`, and 0 for rows that are not `real` (B,)."""
    columns = slice(first_rank, first_rank + tokens.shape[1])
    out = tokens + (tables.history_scores[layer, -1:] if history is None else history)[:, columns].int()
    base = 0
    for j, chosen in enumerate(earlier.unbind()):
        for experts in chosen.long().unbind(1):
            out = out + tables.path_scores[layer, base + experts, columns].int()
            base += tables.num_experts if j < tables.ordered else 0
        base += 0 if j < tables.ordered else tables.num_experts
    return out if real is None else out.masked_fill(~real[:, None], 0)


def contribution(rows: Tensor, running: Tensor, previous: Tensor, slots: Tensor, decoding: Tensor) -> Tensor:
    """(B, G) int32 by one layer's rows (2 * E + 1, G) and states (slots, G): same as `History.contribution`."""
    known = (running[slots] >> FRACTION) + previous[slots]
    return torch.where(decoding[:, None], known, rows[-1].int())


def observe(rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, slots: Tensor, expert_ids: Tensor) -> Tensor:
    """Observe one token of each of `slots` (B,), distinct except for slot 0, which is padding.

    expert_ids (B, K): the experts of each token. Returns them, with 0 for padding.
    """
    told, experts = expert_ids.masked_fill((slots == 0)[:, None], 0), (len(rows) - 1) // 2
    ids, before, times = told.long(), running[slots].long(), seen[slots]
    now = rows[ids].sum(1, dtype=torch.int64)
    weight = times.clamp(max=RUNNING_LIMIT) + RUNNING_PRIOR
    change = torch.div((now << FRACTION) - before, weight[:, None], rounding_mode="floor")
    running[slots] = (before + change).int()
    previous[slots] = rows[experts + ids].sum(1, dtype=torch.int32)
    seen[slots] = times + 1
    return told


def observe_in_turn(
    rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, turns: Turns, expert_ids: Tensor
) -> None:
    """Observe at all layers what tokens chose (L, N, K), by rows (L, 2 * E + 1, G) and states (L, slots, G).

    It is computed on the host, which waits.
    """
    states = running, previous, seen
    means, last, times = arrays = [state[:, turns.slots].cpu().numpy() for state in states]
    local = np.repeat(np.arange(len(turns.slots)), np.diff(turns.first.cpu().numpy()))
    ids, tables = expert_ids[:, turns.rows].long().cpu().numpy(), rows.cpu().numpy()
    for layer in range(len(rows)):
        slices.observe(means[layer], last[layer], times[layer], local, ids[layer], tables[layer])
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
    scores = scores.long()
    prices, step = _start(scores)
    kept, least = prices, torch.full_like(step, tokens + 1)
    for _ in range(PRICE_STEPS + 1):
        counts = _counts(_choose(scores - prices)[0], slices)
        over = (counts - size).clamp(min=0).sum()
        better = (over <= least) & (least > 0)  # the numba loop ends where all fits
        kept, least = torch.where(better, prices, kept), torch.where(better, over, least)
        prices = prices + torch.div(counts * step, size, rounding_mode="floor") - step
        step = step * STEP_DECAY // 64
    values = scores - kept
    pick = _choose(values)[0]
    for _ in range(slices):
        pick = _level(values, pick, size)
    return pick.to(torch.int16)


def _start(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Initial prices (S,) and the first step, a scalar tensor."""
    totals, tokens = scores.sum(0), len(scores)
    spread = (scores.amax(1) - scores.amin(1)).sum()
    return (totals - totals.min()) // tokens, spread * FIRST_STEP // (64 * tokens)


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
    applies = _least(torch.ones_like(pick, dtype=torch.bool), pick, bucket, excess)
    moves = _least(applies, target, bucket, room)
    return torch.where(moves, target, pick)


def _bucket(loss: Tensor) -> Tensor:
    edges = (2 << FINE_BITS) << torch.arange(31 - FINE_BITS, device=loss.device)
    octave = (loss[:, None] >= edges).sum(1)
    return (octave << FINE_BITS) + (loss >> octave)


def _least(chosen: Tensor, group: Tensor, bucket: Tensor, quota: Tensor) -> Tensor:
    """(B,) bool: the tokens of `chosen` that are the first quota[g] of their group by (bucket, token)."""
    counts = torch.zeros(len(quota) * BUCKETS, dtype=torch.int64, device=quota.device)
    counts = counts.index_add(0, group * BUCKETS + bucket, chosen.long()).view(-1, BUCKETS)
    until = counts.cumsum(1)
    limit = (until < quota[:, None]).sum(1).clamp(max=BUCKETS - 1)
    left = quota - (until - counts).gather(1, limit[:, None])[:, 0]
    at_limit = chosen & (bucket == limit[group])
    groups = torch.arange(len(quota), device=quota.device)
    place = (at_limit[:, None] & (group[:, None] == groups)).cumsum(0).gather(1, group[:, None])[:, 0]
    return chosen & (quota[group] > 0) & ((bucket < limit[group]) | (at_limit & (place <= left[group])))
