"""The kernels on a CPU: the compiled loops of `semmoe.tokens` on the memory of tensors."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from semmoe.numeric.jit import njit
from semmoe.runtime.rows import byte_rows
from semmoe.runtime.tables import ScoreTables, Turns
from semmoe.tokens import kernels as loops
from semmoe.tokens import slices
from semmoe.tokens.copychoice import cover
from semmoe.tokens.kernels import FRACTION


def _arrays(*tensors: Tensor) -> list[np.ndarray]:
    return [tensor.numpy() for tensor in tensors]


def look_up_tokens(
    tables: ScoreTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`."""
    return torch.from_numpy(slices.look_up_tokens(tables.policy, layers, first_rank, num_slices, token_ids.numpy()))


def score(
    tables: ScoreTables, layer: int, first_rank: int, tokens: Tensor, earlier: Tensor, history: Tensor, real: Tensor
) -> Tensor:
    """(B, S) int32: same as `semmoe.tokens.slices.score`, and 0 for rows that are not `real` (B,)."""
    out = slices.score(tables.policy, layer, first_rank, *_arrays(tokens, earlier, history))
    out[~real.numpy()] = 0
    return torch.from_numpy(out)


def contribution(rows: Tensor, running: Tensor, previous: Tensor, slots: Tensor, decoding: Tensor) -> Tensor:
    """(B, G) int32 to add to the scores of tokens, by one layer's rows (2 * E + 1, G) and states (slots, G).

    decoding (B,) bool: decoded tokens. A prompt's tokens run together, so the routing of earlier ones is not yet known.
    """
    out = torch.empty((len(slots), rows.shape[1]), dtype=torch.int32)
    _contribution(*_arrays(out, rows[-1], running, previous, slots, decoding))
    return out


@njit(nogil=True)
def _contribution(out, mean, running, previous, slots, decoding):
    for t in range(out.shape[0]):
        slot = slots[t]
        for g in range(out.shape[1]):
            known = (running[slot, g] >> FRACTION) + previous[slot, g]
            out[t, g] = known if decoding[t] else np.int32(mean[g])


def observe(rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, slots: Tensor, expert_ids: Tensor) -> Tensor:
    """Observe one token of each of `slots` (B,), distinct except for slot 0, which is padding.

    expert_ids (B, K): the experts of each token. Returns them, with 0 for padding.
    """
    known = torch.empty_like(expert_ids, memory_format=torch.contiguous_format)
    _without_padding(*_arrays(known, expert_ids, slots))
    _observe(rows, running, previous, seen, slots.numpy(), known.numpy())
    return known


@njit(nogil=True)
def _without_padding(out, expert_ids, slots):
    for t in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[t, k] = expert_ids[t, k] if slots[t] != 0 else 0


def observe_in_turn(
    rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, turns: Turns, expert_ids: Tensor
) -> None:
    """Observe at all layers the experts (L, N, K) of tokens, by rows (L, 2 * E + 1, G) and states (L, slots, G)."""
    slots = np.repeat(turns.slots.numpy(), np.diff(turns.first.numpy()))
    ids = expert_ids[:, turns.rows].numpy()
    for layer in range(len(rows)):
        _observe(rows[layer], running[layer], previous[layer], seen[layer], slots, ids[layer])


def _observe(
    rows: Tensor, running: Tensor, previous: Tensor, seen: Tensor, slots: np.ndarray, expert_ids: np.ndarray
) -> None:
    nothing = np.empty((len(slots), 0), np.int32), np.zeros(len(slots), np.bool_)
    loops.observe(*_arrays(running, previous, seen), slots, expert_ids, rows.numpy(), *nothing)


def by_weight(expert_ids: Tensor, weights: Tensor, kind: torch.dtype) -> Tensor:
    """Expert ids (n, K) by falling weight (n, K), in type `kind`; of equal weights the first comes first."""
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


def assign(scores: Tensor) -> Tensor:
    """(B,) int16: slices, same as `semmoe.tokens.slices.assign`."""
    return torch.from_numpy(slices.assign(scores.numpy()))


def gather_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H), zeros where the index is -1."""
    out = rows.new_empty((len(index), *rows.shape[1:]))
    _gather(byte_rows(out).numpy(), byte_rows(rows).numpy(), index.numpy())
    return out


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
