"""The kernels on a CPU: the compiled loops of `semmoe.tokens` on the memory of tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from semmoe.numeric.jit import njit
from semmoe.runtime.rows import byte_rows
from semmoe.runtime.tables import Rows, ScoreTables, States, Turns
from semmoe.tokens import kernels as loops
from semmoe.tokens import slices as by_policy
from semmoe.tokens.copychoice import cover
from semmoe.tokens.kernels import FRACTION


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


def look_up_tokens(
    tables: ScoreTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`."""
    return torch.from_numpy(by_policy.look_up_tokens(tables.policy, layers, first_rank, num_slices, token_ids.numpy()))


def slices(
    tables: ScoreTables, layer: int, first_rank: int, looked_up: Tensor, routed: Tensor, rows: Rows, states: States
) -> tuple[Tensor, Tensor, Tensor]:
    """Choose the slice of each row of a pass, and sort the rows by it: order, inverse and counts of `ShuffleHandle`.

    looked_up (L, N, S) from `look_up_tokens`, for N rows in S equal slices of the ranks from `first_rank` on. routed
    (L, N, K): the experts of all rows at earlier layers, by falling weight. Rows that are not real score 0.
    """
    earlier = routed[max(layer - tables.lookback, 0) : layer].flip(0)  # latest first
    known = np.empty((len(rows.slots), tables.history_scores.shape[2]), np.int32)
    history = tables.history_scores[layer, -1], states.running[layer], states.previous[layer]
    _contribution(known, *_arrays(*history, rows.slots, rows.decoding))
    scores = by_policy.score(tables.policy, layer, first_rank, looked_up[layer].numpy(), earlier.numpy(), known)
    scores[~rows.real.numpy()] = 0
    return order_of_real(torch.from_numpy(by_policy.assign(scores)), rows.real, looked_up.shape[2])


@njit(nogil=True)
def _contribution(out, mean, running, previous, slots, decoding):
    """Write what histories add to scores (B, G). Of a prompt's tokens, which run together, none is known."""
    for t in range(out.shape[0]):
        slot = slots[t]
        for g in range(out.shape[1]):
            known = (running[slot, g] >> FRACTION) + previous[slot, g]
            out[t, g] = known if decoding[t] else np.int32(mean[g])


def restore(
    rows: Tensor, expert_ids: Tensor, inverse: Tensor,
    layer: int, routed: Tensor, batch: Rows, tables: ScoreTables, states: States,
) -> Tensor:  # fmt: skip
    """Put rows (N, H) and their experts (N, K) of all slices back in the pass's order, by `inverse` of `ShuffleHandle`.

    Returns the rows. The experts are written to routed[layer] of (L, N, K), with 0 for padding. They update the states
    of their slots, which are distinct except for padding, unless a slot has several tokens.
    """
    _in_order(*_arrays(routed[layer], expert_ids, inverse, batch.real))
    if batch.turns is None:
        _observe(tables, states, layer, batch.slots.numpy(), routed[layer].numpy())
    return gather_rows(rows, inverse)


@njit(nogil=True)
def _in_order(out, expert_ids, inverse, real):
    for t in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[t, k] = expert_ids[inverse[t], k] if real[t] else 0


def observe_in_turn(tables: ScoreTables, states: States, turns: Turns, routed: Tensor) -> None:
    """Update the states of slots with several tokens each by the experts (L, N, K) of all layers."""
    slots = np.repeat(turns.slots.numpy(), np.diff(turns.first.numpy()))
    for layer, ids in enumerate(routed[:, turns.rows].numpy()):
        _observe(tables, states, layer, slots, ids)


def _observe(tables: ScoreTables, states: States, layer: int, slots: np.ndarray, expert_ids: np.ndarray) -> None:
    nothing = np.empty((len(slots), 0), np.int32), np.zeros(len(slots), np.bool_)
    own = _arrays(*(state[layer] for state in states))
    loops.observe(*own, slots, expert_ids, tables.history_scores[layer].numpy(), *nothing)


def by_weight(expert_ids: Tensor, weights: Tensor, kind: torch.dtype, logical: Tensor | None = None) -> Tensor:
    """Expert ids (n, K) by falling weight (n, K), in type `kind`; of equal weights the first comes first.

    logical (P,): the expert of each physical one, if ids are physical, -1 for none.
    """
    if logical is not None:
        expert_ids = torch.where(expert_ids < 0, -1, logical[expert_ids.long()])
    out = torch.empty(expert_ids.shape, dtype=kind)
    _by_weight(*_arrays(out, expert_ids, weights.float()))
    return out


@njit(nogil=True)
def _by_weight(out, expert_ids, weights):
    """Sort each row by insertion, which is stable and fast for a few experts; no number is the largest weight."""
    top_k = out.shape[1]
    order, value = np.empty(top_k, np.int64), np.empty(top_k, np.float32)
    for t in range(out.shape[0]):
        for k in range(top_k):
            value[k] = np.float32(np.inf) if np.isnan(weights[t, k]) else weights[t, k]
            place = k
            while place > 0 and value[order[place - 1]] < value[k]:
                order[place] = order[place - 1]
                place -= 1
            order[place] = k
        for k in range(top_k):
            out[t, k] = expert_ids[t, order[k]]


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H), zeros where the index is -1."""
    out = rows.new_empty((len(index), *rows.shape[1:]))
    _gather(byte_rows(out).numpy(), byte_rows(rows).numpy(), index.numpy())
    return out


def gather_both(rows: Tensor, others: Tensor, index: Tensor, first: int, number: int) -> tuple[Tensor, Tensor]:
    """rows (N, H) by index (M,), and others (N, H) by `number` of its entries from `first` on; zeros for -1."""
    return gather_rows(rows, index), gather_rows(others, index[first : first + number])


@njit(nogil=True)
def _gather(out, rows, index):
    width = np.uint64(out.shape[1])
    for i in range(out.shape[0]):
        if index[i] < 0:
            for c in range(width):
                out[i, c] = 0
        else:
            of = np.uint64(index[i])
            for c in range(width):
                out[i, c] = rows[of, c]


def order_of_real(ranks: Tensor, real: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort the rows by rank (N,), of 0 to size - 1: order, inverse and counts of `ShuffleHandle`, by `real` (N,)."""
    order, inverse = np.empty((2, len(ranks)), np.int64)
    counts = np.zeros(size, np.int32)
    _sort(ranks.numpy(), real.numpy(), order, inverse, counts)
    return torch.from_numpy(order), torch.from_numpy(inverse), torch.from_numpy(counts)


@njit(nogil=True)
def _sort(ranks, real, order, inverse, counts):
    """Fill order, inverse and counts (zero before) by a counting sort, which is stable."""
    place = np.zeros(counts.shape[0], np.int64)
    for i in range(ranks.shape[0]):
        place[ranks[i]] += 1
        counts[ranks[i]] += real[i]
    first = 0
    for r in range(counts.shape[0]):  # from each rank's number of rows to its first place
        number = place[r]
        place[r] = first
        first += number
    for i in range(ranks.shape[0]):
        to = place[ranks[i]]
        place[ranks[i]] += 1
        order[to] = i if real[i] else -1
        inverse[i] = to


def place(
    expert_ids: Tensor, tables: Sequence[Tensor], source: int,
    totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None,
) -> Tensor:  # fmt: skip
    """(n, K) physical ids of experts (n, K), in their type, -1 for -1, by the rule `cover` for tokens of rank `source`.

    tables: ranks (E, X) and physical ids (E, X) of the copies nearest to it, padded with -1; the preferred rank (E,).
    The ids are counted as by `count`, unless totals is empty.
    """
    ranks, physical, preferred = _arrays(*tables)
    ids = expert_ids.long().numpy()
    one = physical.shape[1] == 1
    found = _only(ids, physical) if one else cover(ids, (ranks, physical, preferred), source, num_ranks)
    out = torch.from_numpy(found).to(expert_ids.dtype)
    if len(totals):
        count(out, totals, num_ranks, per_rank, width, real)
    return out


@njit(nogil=True)
def _only(expert_ids, physical):
    out = np.empty_like(expert_ids)
    for t in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[t, k] = physical[expert_ids[t, k], 0] if expert_ids[t, k] >= 0 else -1
    return out


def count(expert_ids: Tensor, totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None) -> None:
    """Add physical ids (n, K), -1 for none, to the totals (2 * R + D + 1,) int64 of `TrafficCounter`, R ranks, D nodes.

    per_rank: experts per rank; width: ranks per node; real (1,): only this number of the first rows counts.
    """
    number = len(expert_ids) if real is None else min(int(real), len(expert_ids))
    _count(expert_ids.numpy(), number, totals.numpy(), num_ranks, per_rank, width)


@njit(nogil=True)
def _count(expert_ids, number, totals, num_ranks, per_rank, width):
    reached = np.full(totals.shape[0], -1, np.int64)  # the last token that each total of rows was raised for
    for t in range(number):
        for k in range(expert_ids.shape[1]):
            if expert_ids[t, k] >= 0:
                rank = expert_ids[t, k] // per_rank
                totals[rank] += 1
                for place in (num_ranks + rank, 2 * num_ranks + rank // width, totals.shape[0] - 1):
                    totals[place] += reached[place] != t
                    reached[place] = t
