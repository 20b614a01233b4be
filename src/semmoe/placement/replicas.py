"""Tables of what every move of a layout with copies would change, on the ranks of one node (at most 64).

A set's value is the best of its homes' worths, and a move changes the worths of few homes, so that the set's change is
found from the worths alone. Changes are summed over sets for the copy in slot p, of expert a on rank x:

    move[p, y]   the copy goes to rank y, and the primary with it if it is the primary copy
    drop[p]      the copy goes away; the lowest other copy becomes primary
    promote[p]   the copy becomes primary
    add[b, y]    expert b gets one more copy, on rank y

A swap or a replacement is two of these. Sets that hold both experts would be counted twice; `twice` and `instead` are
the parts of the sums that come from them, and such a set's value is taken to stay as it is. This is exact for experts
without further copies and an estimate else; what a move that was made has changed is always computed, not estimated.

Letters beside core's: a set's K experts are bits 0 to K - 1 of masks; C candidates for its home host one of them.
"""

from collections import namedtuple

import numpy as np

from semmoe.placement.homes import ONE, ZERO, inlined, lowest_bit, njit

STAYS = ONE << np.uint64(63)  # a bit that is no expert's
WIDTH, MOST_KEPT = 512, 1 << 23  # changes kept of a set, and of all sets

# What is summed over sets, for slots (P,), experts (E,) and ranks (G,): views of `sums`.
Tables = namedtuple(
    "Tables",
    [
        "move",  # (P, G)
        "add",  # (E, G)
        "drop",  # (P,)
        "promote",  # (P,)
        "twice",  # (P, P): of move[p, rank of q], from sets that hold q's expert too
        "instead",  # (P, E): of drop[p] + add[b, rank of p], from sets that hold b too
        "served",  # (P,) pairs that each copy computes
        "at_home",  # (E, G) pairs of each expert whose token's home is the rank
        "value",  # (1,) sum of values
        "sums",  # all of these
        "begin",  # where each of them begins there
        "where",  # (U, W) int32: the entries of `sums` to which each set adds
        "what",  # (U, W): what it adds
        "kept",  # (U,) how many these are; -1: too many to keep
        "slot_of",  # (E, G) the slot of each expert's copy on each rank, -1 if there is none
    ],
)


def make_tables(state) -> Tables:
    (E, G), P, U = (len(state.primary), len(state.slots)), state.slots.size, len(state.sets)
    shapes = ((P, G), (E, G), (P,), (P,), (P, P), (P, E), (P,), (E, G), (1,))
    ends = np.cumsum([np.prod(shape) for shape in shapes])
    sums, W = np.zeros(ends[-1]), min(WIDTH, max(MOST_KEPT // max(U, 1), 1))
    views = [part.reshape(shape) for part, shape in zip(np.split(sums, ends[:-1]), shapes, strict=True)]
    kept = np.zeros((U, W), np.int32), np.zeros((U, W)), np.zeros(U, np.int64)
    return Tables._make([*views, sums, (0, *ends[:-1].tolist()), *kept, np.full((E, G), -1)])


@njit
def contribute(state, tables, sets, count, sign):
    """Add what `sets[:count]` contribute to the tables, or with sign -1 take it out, before the layout changes.

    What a set adds is kept, where there is room, so that it need not be computed again to be taken out.
    """
    K, G = state.sets.shape[1], state.price.shape[0]
    scratch, most, sums = _scratch(K, G), _most_changes(state), tables.sums
    where, what = np.zeros(most, np.int64), np.zeros(most)
    for c in range(count):
        u = sets[c]
        n = tables.kept[u]
        if sign < 0 and n >= 0:
            for i in range(n):
                sums[tables.where[u, i]] -= tables.what[u, i]
            continue
        n = _list_changes(state, tables, u, scratch, where, what)
        for i in range(n):
            sums[where[i]] += sign * what[i]
        tables.kept[u] = -1
        if n <= tables.where.shape[1]:
            for i in range(n):
                tables.where[u, i], tables.what[u, i] = where[i], what[i]
            tables.kept[u] = n


@njit
def _most_changes(state):
    """The most entries of the tables to which one set can add."""
    K, G, P = state.sets.shape[1], state.price.shape[0], state.slots.size
    copies = min(K * G, P)
    return copies * (G + copies + K + 2) + K * (G + 2 + G * K) + 2


@inlined
def _note(entry, amount, where, what, n):
    """Write down a change; returns how many there are."""
    where[n], what[n] = entry, amount
    return n + (amount != 0.0)


@inlined
def _list_changes(state, tables, u, scratch, where, what):
    """Fill where and what with the entries of `sums` to which set u adds, and the amounts; returns their number."""
    costs, per_rank, weight = state.weights, state.weights[1], state.weight[u]
    price, slot_of, (E, G), P = state.price, tables.slot_of, tables.add.shape, tables.drop.shape[0]
    low = state.group[u] * state.group_size
    high, K = low + state.group_size, state.sets.shape[1]
    (experts, primary, starts, hosts, shared, at), (ranks, slots, joined, after), spots, bases = scratch
    _, add, drop, promote, twice, instead, served, at_home, value = tables.begin
    copies = ranks, slots, starts
    reached = _read(state.sets, u, state.masks, state.primary, slot_of, experts, hosts, primary, shared, at, copies)
    count, best, second, home = _candidates(low, high, price, hosts, shared, spots, costs)
    elsewhere = -price[low:high].min() - per_rank * reached  # worth of the best home that hosts none
    if home < 0:
        home, best = low + np.argmin(price[low:high]), elsewhere
    n = _note(value, weight * best, where, what, 0)
    for i in range(K):
        e, start, end = experts[i], starts[i], starts[i + 1]
        by = home if (hosts[i] >> np.uint64(home)) & ONE else primary[i]
        n = _note(served + slot_of[e, by], weight, where, what, n)
        n = _note(at_home + e * G + home, weight, where, what, n)
        _join(i, low, high, price, spots, count, shared, reached, costs, joined)
        for y in range(low, high):  # also on ranks that have a copy of it, where nobody looks
            n = _note(add + e * G + y, weight * max(joined[y] - best, 0.0), where, what, n)
        for own in range(start, end):
            x, p = ranks[own], slots[own]
            if x == primary[i]:
                left = hosts[i] & ~(ONE << np.uint64(x))
                m = _bases(i, x, True, shared, spots, count, elsewhere, costs, bases)
                dropped = _move_primary(i, left, primary, at, bases, m, best, per_rank, after)
            else:
                after[:] = _without(i, x, spots, count, shared, second, elsewhere, costs) if x == home else best
                dropped = after[0] - best
                m = _bases(i, primary[i], False, shared, spots, count, elsewhere, costs, bases)
                n = _note(promote + p, weight * (_best_with(at[x], bases, m, per_rank) - best), where, what, n)
            n = _note(drop + p, weight * dropped, where, what, n)
            for y in range(low, high):
                after[y] = joined[y] if joined[y] > after[y] else after[y]
            for y in range(G):
                n = _note(p * G + y, weight * (after[y] - best), where, what, n)
            for k in range(starts[K]):
                if (hosts[i] >> np.uint64(ranks[k])) & ONE == ZERO:
                    n = _note(twice + p * P + slots[k], weight * (after[ranks[k]] - best), where, what, n)
            for j in range(K if end - start > 1 else 0):
                n = _note(instead + p * E + experts[j], weight * dropped, where, what, n)
    n = _list_instead(experts, hosts, shared, spots, count, best, weight, costs, slot_of, instead, where, what, n)
    for i in range(K):
        at[primary[i]] = ZERO
    return n


@njit
def _scratch(K, G):
    """Arrays for one set at a time: what is read of it, its copies and worths, and the candidates for its home."""
    experts, primary, starts = np.zeros(K, np.int64), np.zeros(K, np.int64), np.zeros(K + 1, np.int64)
    hosts, shared, at = np.zeros(K, np.uint64), np.zeros(K, np.uint64), np.zeros(G, np.uint64)
    ranks, slots, joined, after = np.zeros(K * G, np.int64), np.zeros(K * G, np.int64), np.zeros(G), np.zeros(G)
    spots = np.zeros(G, np.int64), np.zeros(G), np.zeros(G, np.uint64)
    bases = np.zeros(G + 1), np.zeros(G + 1, np.uint64)
    return (experts, primary, starts, hosts, shared, at), (ranks, slots, joined, after), spots, bases


@inlined
def _read(sets, u, masks, primaries, slot_of, experts, hosts, primary, shared, at, copies):
    """Read a set; returns the number of ranks that its primaries are on.

    shared (K,): the other experts of the set with the same primary; at (G,): the experts with primaries on each rank;
    the copies of expert i are starts[i] to starts[i + 1] of ranks and slots.
    """
    (ranks, slots, starts), reached, count = copies, 0, 0
    for i in range(sets.shape[1]):
        e = experts[i] = sets[u, i]
        left = hosts[i] = masks[e, 0]
        x = primary[i] = primaries[e]
        reached += at[x] == ZERO
        at[x] |= ONE << np.uint64(i)
        starts[i] = count
        while left:
            g = lowest_bit(left)
            left &= left - ONE
            ranks[count], slots[count] = g, slot_of[e, g]
            count += 1
    starts[sets.shape[1]] = count
    for i in range(sets.shape[1]):
        shared[i] = at[primary[i]] & ~(ONE << np.uint64(i))
    return reached


@inlined
def _candidates(low, high, price, hosts, shared, spots, costs):
    """Fill `spots`: ranks, worths, experts not there, each (C,); returns (C, best, second best, rank of the best)."""
    (homes, worth, away), (activation, per_rank, _) = spots, costs
    K = hosts.shape[0]
    full, count, best, second, home = (ONE << np.uint64(K)) - ONE, 0, -np.inf, -np.inf, -1
    for h in range(low, high):
        local = ZERO
        for i in range(K):
            local |= ((hosts[i] >> np.uint64(h)) & ONE) << np.uint64(i)
        if local == ZERO:
            continue
        gone, ranks, here = full & ~local, 0, 0
        for i in range(K):
            bit = ONE << np.uint64(i)
            if gone & bit:
                ranks += (shared[i] & gone & (bit - ONE)) == ZERO
            else:
                here += 1
        worth[count] = activation * here - per_rank * ranks - price[h]
        homes[count], away[count] = h, gone
        if worth[count] > best:
            best, second, home = worth[count], best, h
        elif worth[count] > second:
            second = worth[count]
        count += 1
    return count, best, second, home


@inlined
def _join(i, low, high, price, spots, count, shared, reached, costs, joined):
    """Fill joined[low:high]: the worth of each home with a further copy of expert i there."""
    (homes, worth, away), (activation, per_rank, _) = spots, costs
    start = activation - per_rank * reached + (per_rank if shared[i] == ZERO else 0.0)
    for y in range(low, high):
        joined[y] = start - price[y]
    for k in range(count):
        joined[homes[k]] = worth[k] + activation + (per_rank if (shared[i] & away[k]) == ZERO else 0.0)


@inlined
def _without(i, x, spots, count, shared, second, elsewhere, costs):
    """Best worth if expert i's copy on x, which is home and not its primary, is gone."""
    (homes, worth, away), (activation, per_rank, _) = spots, costs
    bit = ONE << np.uint64(i)
    full = (ONE << np.uint64(shared.shape[0])) - ONE
    for k in range(count):
        if homes[k] == x and away[k] | bit != full:
            return max(worth[k] - activation - (per_rank if (shared[i] & away[k]) == ZERO else 0.0), second)
    return second if count > 1 else elsewhere


@inlined
def _bases(i, x, lost, shared, spots, count, elsewhere, costs, bases):
    """Fill `bases` for expert i's primary to leave rank x, where its copy is lost or stays; returns their number.

    bases: each home's worth wherever the primary goes, but that it costs another row unless one of the experts whose
    bits are `needed` (n,) has its primary there too; STAYS if it never does.
    """
    (homes, worth, away), (activation, per_rank, _), (base, needed) = spots, costs, bases
    bit, n, full = ONE << np.uint64(i), 0, (ONE << np.uint64(shared.shape[0])) - ONE
    for k in range(count):
        gone = away[k]
        alone = (shared[i] & gone) == ZERO
        base[n], needed[n] = worth[k], STAYS
        if homes[k] == x and lost:
            if gone | bit == full:
                continue
            base[n], needed[n] = worth[k] - activation, gone
        elif gone & bit:
            base[n], needed[n] = worth[k] + (per_rank if alone else 0.0), gone
        n += 1
    if n == 0:
        base[0], needed[0] = elsewhere + (per_rank if shared[i] == ZERO else 0.0), full
    return max(n, 1)


@inlined
def _best_with(there, bases, n, per_rank):
    """Best worth if the primary goes where the experts whose bits are `there` have theirs."""
    (base, needed), top = bases, -np.inf
    for k in range(n):
        worth = base[k] - (per_rank if ((there | STAYS) & needed[k]) == ZERO else 0.0)
        top = worth if worth > top else top
    return top


@inlined
def _move_primary(i, others, primary, at, bases, n, best, per_rank, after):
    """Fill after (G,): the best worth if expert i's primary copy goes from its rank to each rank.

    Returns the change if it is dropped for one of `others`, the ranks of further copies.
    """
    heir, base = lowest_bit(others) if others else -1, bases[0]
    alike = _best_with(ZERO, bases, n, per_rank)
    after[:] = alike
    dropped, bit = alike - best if others else 0.0, ONE << np.uint64(i)
    top = -np.inf
    for k in range(n):
        top = base[k] if base[k] > top else top
    if alike == top:  # no rank is better than any
        return dropped
    for j in range(primary.shape[0]):
        y = primary[j]
        known = (at[y] & ~bit & ((ONE << np.uint64(j)) - ONE)) != ZERO
        if j == i or known or ((others >> np.uint64(y)) & ONE and y != heir):
            continue
        after[y] = _best_with(at[y] & ~bit, bases, n, per_rank)
        if y == heir:
            dropped = after[y] - best
    return dropped


@inlined
def _list_instead(experts, hosts, shared, spots, count, best, weight, costs, slot_of, instead, where, what, n):
    """Note what further copies of an expert on candidates' ranks gain, at the slots of the set's experts there."""
    (homes, worth, away), (activation, per_rank, _), E = spots, costs, slot_of.shape[0]
    for j in range(experts.shape[0]):
        for k in range(count):
            x = homes[k]
            here = worth[k] + activation + (per_rank if (shared[j] & away[k]) == ZERO else 0.0)
            if here <= best or (hosts[j] >> np.uint64(x)) & ONE:
                continue
            for i in range(experts.shape[0]):
                if (hosts[i] >> np.uint64(x)) & ONE and hosts[i] & (hosts[i] - ONE):
                    entry = instead + slot_of[experts[i], x] * E + experts[j]
                    n = _note(entry, weight * (here - best), where, what, n)
    return n
