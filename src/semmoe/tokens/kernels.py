"""The loops of `tokens.slices`, compiled: look-ups, sums of rows, and the assignment to equal slices.

All arithmetic is on integers and ties have a fixed order, so that all ranks of a group, on any device, compute the same
slices without communication.
"""

import numpy as np

from semmoe.numeric.jit import njit

SCALE = 2048  # table units per expected expert
RUNNING_PRIOR, RUNNING_LIMIT = 8, 24  # tokens: initial weight of the running mean, and the maximum added to it
FRACTION = 8  # fractional bits of the running mean, below a table unit
CHUNK = 512  # tokens that are assigned together, on a GPU by one program
# Price steps; in 1/64 the first, relative to the scores' spread, for a slice with twice its capacity, and the decay per
# step. More slices than FEW_SLICES need the second triple, whose steps are more and finer.
FEW_SLICES, PRICING = 8, ((10, 16, 50), (24, 12, 56))
FINE_BITS, BUCKETS = 2, 128  # losses are ordered by buckets, 2**FINE_BITS buckets per octave
LOWEST = -(1 << 31)


@njit(nogil=True)
def look_up(out, rows, token_scores, shift, first):
    """Write each token's row to out (B, S). Unsigned indices need no test for negative ones: loops are vectorised."""
    for t in range(out.shape[0]):
        row = np.uint64(rows[t])
        for s in range(out.shape[1]):
            out[t, s] = np.int32(token_scores[row, np.uint64(first + s)]) << shift


@njit(nogil=True)
def score(out, looked_up, path_scores, earlier, ordered, num_experts, history, has_history, first):
    tokens, slices = out.shape
    layers, top_k = earlier.shape[0], earlier.shape[2]
    for t in range(tokens):
        past = t if has_history else 0
        for s in range(slices):
            out[t, s] = looked_up[t, s] + history[past, first + s]
        base = 0
        for j in range(layers):
            for k in range(top_k):
                place = np.uint64(base + np.int64(earlier[j, t, k]))
                for s in range(slices):
                    out[t, s] += path_scores[place, np.uint64(first + s)]
                base += num_experts if j < ordered else 0
            base += 0 if j < ordered else num_experts


@njit(nogil=True)
def observe(running, previous, seen, slots, expert_ids, rows, out, decoded):
    """Update the states of request slots at one layer: tokens of `slots` (B,) chose `expert_ids` (B, K), by `rows`.

    running (slots, G): the mean of the projected rows of the chosen experts, weighted towards recent tokens, in units
    of 1 / 2**FRACTION table units. previous (slots, G): the rows of the previous token. seen (slots,): numbers of
    tokens. A slot's tokens are in their order. For `decoded` tokens their contribution is first written to out (B, G).
    """
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


def num_chunks(num_tokens: int, num_slices: int) -> int:
    """Into how many chunks `assign` divides B tokens, of up to CHUNK tokens each, or one for each slice."""
    rows = max(-(-num_tokens // num_slices), 1)
    return -(-rows // max(CHUNK // num_slices, 1))


def chunks(num_tokens: int, num_slices: int) -> list[np.ndarray]:
    """The tokens (T,) of each chunk, ascending.

    S successive tokens go to one chunk and the next S to the next: every chunk has tokens of all prompts, and the
    slices of all chunks together have at most ceil(B / S) tokens.
    """
    number, tokens = num_chunks(num_tokens, num_slices), np.arange(num_tokens)
    return [tokens[tokens // num_slices % number == chunk] for chunk in range(number)]


@njit(nogil=True)
def assign(rows):
    tokens, slices = rows.shape
    size = max(-(-tokens // slices), 1)
    steps, first_step, decay = PRICING[int(slices > FEW_SLICES)]
    scores, prices, step = _start(rows, first_step)
    pick, best = np.zeros(tokens, np.int16), np.empty(tokens, np.int32)
    counts, every = np.zeros(slices, np.int64), np.ones(slices, np.bool_)
    kept = prices.copy()  # the prices of the best round so far
    least = tokens + 1
    for i in range(steps + 1):
        _choose(scores, prices, every, pick, best)
        over = _count(pick, counts, size)
        if over <= least:
            least = over
            for s in range(slices):  # an assignment to the slice would take seconds to compile
                kept[s] = prices[s]
        if over == 0 or i == steps:
            break
        for s in range(slices):
            prices[s] += np.int32(counts[s] * step // size - step)
        step = step * decay // 64
    if over != least:
        _choose(scores, kept, every, pick, best)
        _count(pick, counts, size)
    rounds = 0
    while least > 0 and rounds < slices:  # every round fills a slice, for good
        least = _level(scores, kept, pick, best, counts, size)
        rounds += 1
    return pick


@njit(nogil=True)
def _start(rows, first_step):
    """Scores (S, B), initial prices (S,), which are mean scores above the lowest slice's, and the first price step."""
    tokens, slices = rows.shape
    scores, totals = np.empty((slices, tokens), np.int32), np.zeros(slices, np.int64)
    spread = np.int64(0)  # sum of each token's highest score less its lowest
    high, low = np.full(tokens, LOWEST, np.int32), np.full(tokens, -(LOWEST + 1), np.int32)
    lowest = np.int64(1 << 62)  # of the totals; their minimum by NumPy takes half a second to compile
    for s in range(slices):
        total = np.int64(0)
        for t in range(tokens):
            value = np.int32(rows[t, s])
            scores[s, t] = value
            total += value
            high[t] = max(high[t], value)
            low[t] = min(low[t], value)
        totals[s] = total
        lowest = min(lowest, total)
    for t in range(tokens):
        spread += np.int64(high[t]) - low[t]
    number, prices = max(tokens, 1), np.empty(slices, np.int32)
    for s in range(slices):
        prices[s] = np.int32((totals[s] - lowest) // number)
    return scores, prices, spread * first_step // (64 * number)


@njit(nogil=True)
def _choose(scores, prices, allowed, pick, best):
    """For each token the allowed slice of highest score less price (the lowest of equals), and that difference."""
    slices, tokens = scores.shape
    number = np.zeros(tokens, np.int32)  # as wide as the scores, so that the loop runs on vectors
    best[:] = LOWEST
    for s in range(slices):
        if allowed[s]:
            price, this = prices[s], np.int32(s)
            for t in range(tokens):
                value = np.int32(scores[s, t] - price)
                number[t] = this if value > best[t] else number[t]
                best[t] = max(value, best[t])
    for t in range(tokens):
        pick[t] = np.int16(number[t])


@njit(nogil=True)
def _count(pick, counts, size):
    """Write the number of tokens of each slice to counts (S,); return how many tokens exceed the slices' size."""
    over = 0
    for s in range(counts.shape[0]):
        this, number = np.int16(s), np.int32(0)
        for t in range(pick.shape[0]):
            number += np.int32(pick[t] == this)
        counts[s] = number
        over += max(counts[s] - size, 0)
    return over


@njit(nogil=True)
def _level(scores, prices, pick, best, counts, size):
    """One round of moves to the best slice with room, at prices; returns how many tokens then exceed slices' size.

    From each overfull slice the surplus tokens of least loss move. Where they overfill a slice, the next round moves
    its surplus on. Losses are compared by bucket; among equals the lower token is first.
    """
    tokens = len(pick)
    target, value = np.zeros(tokens, np.int16), np.empty(tokens, np.int32)
    _choose(scores, prices, counts < size, target, value)
    loss = np.zeros(tokens, np.int64)
    for t in range(tokens):
        if counts[pick[t]] > size:
            loss[t] = _bucket(np.int64(best[t]) - value[t])
    for t in _least(pick, loss, np.maximum(counts - size, 0)):
        pick[t], best[t] = target[t], value[t]
    return _count(pick, counts, size)


@njit(nogil=True)
def _bucket(loss):
    """Order of magnitude of a loss, exact below 2**(FINE_BITS + 1)."""
    octave = 0
    while loss >> octave >= 2 << FINE_BITS:
        octave += 1
    return (octave << FINE_BITS) + (loss >> octave)


@njit(nogil=True)
def _least(group, loss, quota):
    """The tokens, ascending, that are the first quota[g] of their group by (loss bucket, token)."""
    tokens = len(group)
    counts = np.zeros((quota.shape[0], BUCKETS), np.int64)
    for t in range(tokens):
        if quota[group[t]] > 0:
            counts[group[t], loss[t]] += 1
    # the bucket in which the quota ends, and how much of the quota remains for that bucket
    limit, left = np.full(quota.shape[0], -1), quota.copy()
    for g in range(quota.shape[0]):
        if quota[g] > 0:
            limit[g] = 0
            while limit[g] < BUCKETS - 1 and counts[g, limit[g]] < left[g]:
                left[g] -= counts[g, limit[g]]
                limit[g] += 1
    out, number = np.empty(tokens, np.int64), 0
    for t in range(tokens):
        g = group[t]
        at_limit = loss[t] == limit[g] and left[g] > 0
        if loss[t] < limit[g] or at_limit:
            left[g] -= at_limit
            out[number] = t
            number += 1
    return out[:number]
