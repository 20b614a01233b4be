"""Tokens to equal slices by the path predictor's tables: sum rows, then assign under capacity.

All arithmetic is on integers with one order of ties, so that every rank of a group, on any device, comes to the same
slices as its neighbours without a message.
"""

import numba
import numpy as np

from semmoe.core import DECODE, ScoreTables

SCALE = 2048  # table units of one expected expert
RUNNING_PRIOR, RUNNING_LIMIT = 8, 24  # tokens: the running mean's weight at the start, and its longest memory less that
FRACTION = 8  # bits that the running mean keeps below a table unit
PRICE_STEPS = 14
FIRST_STEP, STEP_DECAY = 1024, 52  # table units for a slice that is full twice over; /64 from step to step


def known_rows(token_ids: np.ndarray, num_rows: int) -> np.ndarray:
    """Row of each token id in a table of V + 1 rows: its own, or the last for ids outside the vocabulary."""
    return np.where((token_ids >= 0) & (token_ids < num_rows - 1), token_ids, num_rows - 1)


def score(
    tables: ScoreTables, layer: int, first_rank: int, num_slices: int, token_ids: np.ndarray, earlier: np.ndarray,
    history: np.ndarray | None = None,
) -> np.ndarray:  # fmt: skip
    """(B, S) int32: experts of each token that ranks `first_rank` to first_rank + S can expect to host, times SCALE.

    token_ids (B,); earlier (J, B, K) the experts chosen at the layers before, most recent first, by falling weight,
    J = min(layer, look-back); history (B, G) int32 from `History` for decoded tokens, None where there is none.
    """
    rows = tables.token_rows[known_rows(token_ids, len(tables.token_rows))]
    out = np.empty((len(token_ids), num_slices), np.int32)
    none = tables.history_scores[layer, -1]
    no_history = np.empty((0, len(none)), np.int32)
    _score(
        out, rows, tables.token_scores[layer], int(tables.token_shift[layer]), tables.path_scores[layer], earlier,
        tables.ordered, (tables.history_scores.shape[1] - 1) // 2, no_history if history is None else history, none,
        first_rank,
    )  # fmt: skip
    return out


@numba.njit(cache=True, nogil=True)
def _score(out, rows, token_scores, shift, path_scores, earlier, ordered, num_experts, history, none, first):
    tokens, slices = out.shape
    for t in range(tokens):
        row = token_scores[rows[t]]
        for s in range(slices):
            out[t, s] = np.int32(row[first + s]) << shift
        if history.shape[0]:
            for s in range(slices):
                out[t, s] += history[t, first + s]
        else:
            for s in range(slices):
                out[t, s] += none[first + s]
        base = 0
        for j in range(earlier.shape[0]):
            for k in range(earlier.shape[2]):
                place = path_scores[base + np.int64(earlier[j, t, k])]
                for s in range(slices):
                    out[t, s] += place[first + s]
                if j < ordered:
                    base += num_experts
            if j >= ordered:
                base += num_experts


class History:
    """What a request's tokens so far say of its next one, a state for every request slot and layer.

    running: the mean of the projected rows of the experts chosen, recent tokens counting more, in 1 / 2**FRACTION table
    units; previous: the rows of the token before. Slots of finished requests are `reset` before they are used again.
    """

    def __init__(self, tables: ScoreTables, num_slots: int) -> None:
        layers, _, ranks = tables.history_scores.shape
        self._rows = tables.history_scores
        self._running = np.zeros((layers, num_slots, ranks), np.int32)
        self._previous = np.zeros((layers, num_slots, ranks), np.int32)
        self._seen = np.zeros((layers, num_slots), np.int64)
        self.reset(np.arange(num_slots))

    def reset(self, slots: np.ndarray) -> None:
        self._running[:, slots], self._seen[:, slots] = 0, 0
        self._previous[:, slots] = self._rows[:, None, -1]

    def contribution(self, layer: int, slots: np.ndarray) -> np.ndarray:
        """(B, G) int32 to add to the scores of one decoded token of each of `slots` (B,)."""
        return (self._running[layer, slots] >> FRACTION) + self._previous[layer, slots]

    def observe(self, layer: int, slots: np.ndarray, expert_ids: np.ndarray) -> None:
        """Tokens of `slots` (B,) chose `expert_ids` (B, K); tokens of one slot in their order."""
        _observe(
            self._running[layer], self._previous[layer], self._seen[layer], slots, expert_ids, self._rows[layer],
            np.empty((len(slots), 0), np.int32), np.zeros(len(slots), np.bool_),
        )  # fmt: skip


def trace_history(tables: ScoreTables, layer: int, trace) -> np.ndarray:
    """(T, G) int32: the contribution of every token of a RoutingTrace, had its request's earlier ones been observed."""
    history = History(tables, trace.num_requests)
    out = np.empty((trace.num_tokens, tables.history_scores.shape[2]), np.int32)
    out[:] = tables.history_scores[layer, -1]
    _observe(
        history._running[layer], history._previous[layer], history._seen[layer], trace.request_of_token(),
        trace.expert_ids[:, layer], tables.history_scores[layer], out, trace.phase == DECODE,
    )  # fmt: skip
    return out


@numba.njit(cache=True, nogil=True)
def _observe(running, previous, seen, slots, expert_ids, rows, out, decoded):
    """Feed tokens one by one; where `decoded`, first write what was known before the token to out (B, G)."""
    ranks, experts = running.shape[1], (rows.shape[0] - 1) // 2
    for t in range(slots.shape[0]):
        slot = slots[t]
        if decoded[t]:
            for g in range(ranks):
                out[t, g] = (running[slot, g] >> FRACTION) + previous[slot, g]
        weight = min(seen[slot], RUNNING_LIMIT) + RUNNING_PRIOR
        seen[slot] += 1
        for g in range(ranks):
            now, last = np.int64(0), np.int32(0)
            for k in range(expert_ids.shape[1]):
                now += rows[expert_ids[t, k], g]
                last += rows[experts + expert_ids[t, k], g]
            running[slot, g] += np.int32(((now << FRACTION) - running[slot, g]) // weight)
            previous[slot, g] = last


def assign(scores: np.ndarray) -> np.ndarray:
    """(B,) int16: tokens to slices of at most ceil(B / S) so that the sum of scores (B, S) int32 is nearly the largest.

    Prices that rise where a slice overflows (dual ascent) say first which slice every token would take; then, one by
    one, the tokens of overfull slices that lose least move to slices with room. Worked example, two slices for four
    tokens with scores [9, 1], [5, 4], [7, 0], [0, 6]: all fits but token 1, which loses least by moving: [0, 1, 0, 1].
    """
    tokens, slices = scores.shape
    return _assign(np.ascontiguousarray(scores.T), max(-(-tokens // slices), 1))


@numba.njit(cache=True, nogil=True)
def _choose(scores, prices, pick, best, counts):
    """The slice of highest score less price for each token, the lowest of equals; and how many chose each."""
    slices, tokens = scores.shape
    best[:] = scores[0] - prices[0]
    pick[:] = 0
    for s in range(1, slices):
        price = prices[s]
        for t in range(tokens):
            value = scores[s, t] - price
            better = value > best[t]
            best[t] = value if better else best[t]
            pick[t] = s if better else pick[t]
    counts[:] = 0
    for t in range(tokens):
        counts[pick[t]] += 1


@numba.njit(cache=True, nogil=True)
def _assign(scores, size):
    slices, tokens = scores.shape
    pick, best = np.empty(tokens, np.int16), np.empty(tokens, np.int32)
    counts, prices, kept = np.zeros(slices, np.int64), np.zeros(slices, np.int32), np.zeros(slices, np.int32)
    step, least = FIRST_STEP, tokens + 1
    for i in range(PRICE_STEPS + 1):
        _choose(scores, prices, pick, best, counts)
        over = 0
        for s in range(slices):
            over += max(counts[s] - size, 0)
        if over < least:
            least = over
            kept[:] = prices
        if over == 0 or i == PRICE_STEPS:
            break
        for s in range(slices):
            prices[s] += np.int32((counts[s] - size) * step // size)
        step = step * STEP_DECAY // 64
    if over != least:
        _choose(scores, kept, pick, best, counts)
    if least:
        _level(scores, kept, pick, best, counts, size)
    return pick


@numba.njit(cache=True, nogil=True)
def _level(scores, prices, pick, best, counts, size):
    """Move tokens off overfull slices, always the one that loses least, ties to the lowest token, then slice."""
    slices, tokens = scores.shape
    room = np.flatnonzero(counts < size)
    moves, number = np.empty(tokens * len(room), np.int64), 0
    for t in range(tokens):
        if counts[pick[t]] > size:
            for s in room:
                loss = np.int64(best[t]) - (scores[s, t] - prices[s])
                moves[number] = (loss * tokens + t) * slices + s
                number += 1
    moved = np.zeros(tokens, np.bool_)
    for move in np.sort(moves[:number]):
        s, t = move % slices, move // slices % tokens
        if not moved[t] and counts[pick[t]] > size and counts[s] < size:
            counts[pick[t]] -= 1
            counts[s] += 1
            pick[t] = s
            moved[t] = True
