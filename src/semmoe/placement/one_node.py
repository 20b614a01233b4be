"""The tables of `replicas` for one node with uniform costs, in half the time.

On one node a copy serves its own rank, and the primary copy all ranks without one. So home h costs a set

    price h + activation * (its experts without a copy on h) + per_rank * (distinct ranks of their primary copies)

and a move changes few of its terms. Loops multiply by zeros and ones, since branches that depend on routing take longer
than arithmetic.
"""

import numpy as np

from semmoe.placement.homes import bare, charge_on_node, find_lowest, inlined, next_primary
from semmoe.placement.replicas import note


@bare
def list_changes(state, tables, u, at):
    """List the entries of `sums` to which set u adds, and the amounts; return their number."""
    G, weight, low = state.price.shape[0], state.weight[u], state.group[u] * state.group_size
    _, add, _, _, _, _, served, at_home, value = tables.begin
    copies = _read(state, u, low, at)
    home = at.candidate_homes[0]
    best = at.cost[home]
    # the set's value, where its pairs are computed, and what further copies gain
    n = note(at, 0, value, -weight * best)
    for i in range(state.sets.shape[1]):
        e, first = state.sets[u, i], at.first[i]
        x = low + home if at.has[i, home] > 0 else first
        n = note(at, n, served + state.slot_of[e, x], weight)
        n = note(at, n, at_home + e * G + low + home, weight)
        for s in range(at.cost.shape[0]):
            gain = best - at.own[i, s]
            at.joined[i, low + s] = weight * gain if gain > 0 else 0.0
            n = note(at, n, add + e * G + low + s, at.joined[i, low + s])
    for k in range(copies):
        n = _list_copy(state, tables, u, low, k, copies, weight, at, n)
    _clear(state, at, low)
    return n


@inlined
def _read(state, u, low, at):
    """Fill a set's homes, and the copies of its experts; return the number of copies."""
    (activation, per_rank, _), (K, S), G = state.weights, at.own.shape, state.price.shape[0]
    charge_on_node(state, u, at.first, at.has, at.cost, at.reached)
    copies = 0
    for i in range(K):
        e = state.sets[u, i]
        for y in range(G):
            at.ranks[copies], at.owner[copies], at.slots[copies] = y, i, state.slot_of[e, y]
            copies += state.slot_of[e, y] >= 0
        for s in range(S):
            alone = per_rank if at.reached[at.first[i], s] == 1 else 0.0
            at.own[i, s] = at.cost[s] - (1.0 - at.has[i, s]) * (activation + alone)
    find_lowest(at.cost, at.candidate_homes)
    for b in range(at.candidate_homes.shape[0]):
        for y in range(G):
            at.reach[b, y] = per_rank if at.reached[y, at.candidate_homes[b]] == 0 else 0.0
    return copies


@inlined
def _clear(state, at, low):
    """Set the counts by rank to zero again."""
    for y in at.first:
        for s in range(at.cost.shape[0]):
            at.reached[y, s] = 0.0
    for i in range(at.first.shape[0]):
        for s in range(at.cost.shape[0]):
            at.joined[i, low + s] = 0.0


@inlined
def _list_copy(state, tables, u, low, k, copies, weight, at, n):
    """List what moves of the set's copy k change."""
    (E, G), P = tables.add.shape, tables.drop.shape[0]
    move, _, drop, promote, twice, instead, _, _, _ = tables.begin
    i, x, p = at.owner[k], at.ranks[k], at.slots[k]
    e, first, best = state.sets[u, i], at.first[i], at.cost[at.candidate_homes[0]]
    # the copy goes away, or becomes primary
    if state.copies[e] > 1:
        to = next_primary(state, e, x) if first == x else first
        dropped = weight * (best - _led(state, at, i, low, x, to))
        n = note(at, n, drop + p, dropped)
        n = note(at, n, promote + p, weight * (best - _led(state, at, i, low, -1, x)))
        for j in range(at.first.shape[0]):
            n = note(at, n, instead + p * E + state.sets[u, j], dropped + at.joined[j, x])
    # the copy moves
    _fill_after(state, at, i, low, x, first == x)
    for y in range(G):
        at.after[y] = weight * (best - at.after[y]) * (1.0 if state.slot_of[e, y] < 0 else 0.0)
        n = note(at, n, move + p * G + y, at.after[y])
    # a swap with another expert of the set leaves the set's value: `twice` takes the changes out again
    for other in range(copies):
        q = at.slots[other]
        n = note(at, n, twice + min(p, q) * P + max(p, q), at.after[at.ranks[other]])
    return n


@inlined
def _led(state, at, i, low, gone, leader):
    """What the set costs at best if rank `leader` has the primary copy of its expert i; gone: a rank that loses its
    copy, or -1."""
    best = np.inf
    for b in range(at.candidate_homes.shape[0]):
        s = at.candidate_homes[b]
        lost, away = low + s == gone, at.has[i, s] == 0
        cost = at.cost[s]
        if lost or (away and leader != at.first[i]):
            cost = at.own[i, s] + state.weights[0] + at.reach[b, leader]
        best = cost if cost < best else best
    return best


@inlined
def _fill_after(state, at, i, low, x, leads):
    """Fill `after` (G,) with what the set costs at best after the copy on rank x of its expert i went to each rank."""
    lowest = np.inf
    # homes whose cost does not depend on where a copy goes
    for b in range(at.candidate_homes.shape[0]):
        s = at.candidate_homes[b]
        lost, cost = low + s == x, at.cost[s]
        if leads and (lost or at.has[i, s] == 0):
            continue
        if lost:
            cost += state.weights[0] + at.reach[b, at.first[i]]
        lowest = cost if cost < lowest else lowest
    for y in range(at.after.shape[0]):
        at.after[y] = lowest
    # homes that use the primary copy, wherever it goes
    for b in range(at.candidate_homes.shape[0] if leads else 0):
        s = at.candidate_homes[b]
        if low + s == x or at.has[i, s] == 0:
            base = at.own[i, s] + state.weights[0]
            for y in range(at.after.shape[0]):
                cost = base + at.reach[b, y]
                at.after[y] = cost if cost < at.after[y] else at.after[y]
    # homes that the copy comes to
    for s in range(at.cost.shape[0]):
        at.after[low + s] = at.own[i, s] if at.own[i, s] < at.after[low + s] else at.after[low + s]
