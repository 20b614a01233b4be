"""Local search over any layouts, for any costs: swaps, replacements and promotions, by the tables of `replicas`.

The search is that of `swaps`, with moves that are estimated from the tables and counted as what they turn out to be.
"""

import numpy as np

from semmoe.placement.homes import index, next_near, next_primary, njit
from semmoe.placement.loads import highest, load_gain
from semmoe.placement.replicas import contribute, make_tables
from semmoe.placement.search import Turn, collect, copy_ints, free_again, may_move, settle, start

SWAP, REPLACE, PROMOTE = 0, 1, 2


@njit
def best_move(state, tables, prices, turn):
    """Return (kind, slot p, slot q or expert b) of the best move of experts that may move; kind -1: none."""
    S = state.slots.shape[1]
    best, kind, first, other = -np.inf, -1, -1, -1
    for p in range(state.slots.size):
        a = state.slots[p // S, p % S]
        gain, q = _best_partner(state, tables, prices, turn, best, p)
        if gain > best:
            best, kind, first, other = gain, SWAP, p, q
        if state.copies[a] == 1:
            continue
        gain, b = _best_successor(state, tables, prices, turn, best, p)
        if gain > best:
            best, kind, first, other = gain, REPLACE, p, b
        if state.primary[a] != p // S:
            gain = _promotion(state, tables, prices, turn.top, p)
            if gain > best and may_move(turn, gain, a, a):
                best, kind, first, other = gain, PROMOTE, p, a
    return kind, first, other


@njit
def _best_partner(state, tables, prices, turn, best, p):
    """Return (gain, slot) of the best swap of slot p with one of a higher rank, if better than `best`."""
    move_cost = prices.move_cost
    slots, slot_of = state.slots, state.slot_of
    move, twice, served = tables.move, tables.twice, tables.served
    S = slots.shape[1]
    x, other = p // S, -1
    a = slots[x, p % S]
    sent = a, _share(served[p], state.expert_load[a])  # of its pairs, that its copy in slot p computes
    for q in range((x + 1) * S, slots.size):
        y = q // S
        b = slots[y, q % S]
        if slot_of[a, y] >= 0 or slot_of[b, x] >= 0:
            continue
        gain = (move[p, y] + move[q, x] - twice[p, q] - twice[q, p]) / state.total_weight
        gain += move_cost[a, x] - move_cost[a, y] + move_cost[b, y] - move_cost[b, x]
        # no swap saves more load than all that x and y have above the others
        if gain + prices.load_price * (turn.top - prices.loads.least[x, y]) <= best:
            continue
        back = _share(served[q], state.expert_load[b])
        gain += load_gain(prices, turn.top, x, y, sent, (b, back, back))
        if gain > best and may_move(turn, gain, a, b):
            best, other = gain, q
    return best if other >= 0 else -np.inf, other


@njit
def _best_successor(state, tables, prices, turn, best, p):
    """Return (gain, expert) of the best expert to take slot p, whose expert has other copies, if better than `best`."""
    move_cost = prices.move_cost
    slot_of, primary = state.slot_of, state.primary
    drop, add, instead = tables.drop, tables.add, tables.instead
    S = state.slots.shape[1]
    x, other = p // S, -1
    a = state.slots[x, p % S]
    sent = a, _share(tables.served[p], state.expert_load[a])
    z = _fallback_rank(state, a, x)  # a's pairs on x go there
    slack = prices.load_price * (turn.top - prices.loads.least[min(x, z), max(x, z)])
    for b in range(primary.shape[0]):
        if slot_of[b, x] >= 0:
            continue
        gain = (drop[p] + add[b, x] - instead[p, b]) / state.total_weight + move_cost[a, x] - move_cost[b, x]
        if gain + slack <= best:
            continue
        # b's new copy takes a share from its other copies: from z, if that is where its primary is
        came = _share(_taken(state, tables.at_home, b, x), state.expert_load[b])
        gain += load_gain(prices, turn.top, x, z, sent, (b, came, came if primary[b] == z else 0.0))
        if gain > best and may_move(turn, gain, a, b):
            best, other = gain, b
    return best if other >= 0 else -np.inf, other


@njit
def _fallback_rank(state, expert, rank):
    """Return the rank that computes most of what an expert's copy on a rank does, if that copy is gone."""
    near = next_near(state, expert, state.node_of[rank], rank)
    if near >= 0 or state.primary[expert] != rank:
        return near if near >= 0 else state.primary[expert]
    return next_primary(state, expert, rank)


@njit
def _taken(state, at_home, expert, rank):
    """Return the pairs of an expert that a further copy on a rank would compute: the rank's, or all of its node's."""
    node, size = state.node_of[rank], state.node_of.shape[0] // state.near.shape[1]
    if state.near[expert, node] >= 0 or state.near.shape[1] == 1:
        return at_home[expert, rank]
    total = 0.0
    for h in range(node * size, (node + 1) * size):
        total += at_home[expert, h]
    return total


@njit
def _promotion(state, tables, prices, top, p):
    """Return the gain if the copy in slot p becomes its expert's primary."""
    S = state.slots.shape[1]
    x, a = p // S, state.slots[p // S, p % S]
    z = state.primary[a]
    # the primary computes the pairs of other homes than its own, and these go to x
    remote = tables.served[state.slot_of[a, z]] - tables.at_home[a, z]
    sent = a, _share(remote, state.expert_load[a])
    return tables.promote[p] / state.total_weight + load_gain(prices, top, z, x, sent, (a, 0.0, 0.0))


@njit
def _share(pairs, all_pairs):
    return pairs / max(all_pairs, 1e-9)


@njit
def make_move(state, kind, p, other):
    """Change slots, primaries and what follows from them by a move; p and other as `best_move` returns them."""
    S = state.slots.shape[1]
    x, a = p // S, state.slots[p // S, p % S]
    if kind == PROMOTE:
        state.primary[a] = x
        return
    b = state.slots[other // S, other % S] if kind == SWAP else other
    _put(state, p, a, b)
    if kind == SWAP:
        y = other // S
        _put(state, other, b, a)
        if state.primary[b] == y:
            state.primary[b] = x
        if state.primary[a] == x:
            state.primary[a] = y
    elif state.primary[a] == x:
        state.primary[a] = next_primary(state, a, x)


@njit
def _put(state, p, old, new):
    """Put expert `new` in the place of `old` in slot p."""
    S = state.slots.shape[1]
    x = p // S
    m = state.node_of[x]
    state.near[old, m] = next_near(state, old, m, x)
    state.near[new, m] = x if state.near[new, m] < 0 else min(state.near[new, m], x)
    state.slot_of[old, x], state.slot_of[new, x] = -1, p
    state.copies[old] -= 1
    state.copies[new] += 1
    state.slots[x, p % S] = new


def _settle(state, tables, price_steps):
    """Settle prices and make the tables anew, after slots and primaries were changed."""
    index(state)
    settle(state, price_steps)
    tables.sums[:] = 0.0
    every = np.arange(len(state.sets))
    contribute(state, tables, every, every.size, 1.0)


@njit
def _spread(state, served, prices):
    """Fill the loads of ranks: each expert's load in each mix, spread over its copies as in the profile."""
    S, load, mixes = state.slots.shape[1], prices.loads.now, prices.mixes
    load[:] = 0.0
    for p in range(state.slots.size):
        e = state.slots[p // S, p % S]
        share = _share(served[p], state.expert_load[e])
        for j in range(mixes.shape[1]):
            load[p // S, j] += share * mixes[e, j]


@njit
def sum_move_costs(slots, move_cost):
    """Return what the experts in the slots (G, P / G) cost where they are, of move_cost (E, G)."""
    total = 0.0
    for g in range(slots.shape[0]):
        for e in slots[g]:
            total += move_cost[e, g]
    return total


def search_moves(state, scratch, prices, effort):
    """Search as `swaps.search_swaps` does; same arguments and results."""
    start(scratch, effort.seed)
    tables, moves = make_tables(state), 0
    for _ in range(effort.rounds):
        _settle(state, tables, effort.price_steps)
        moves = _make_moves(state, scratch, tables, prices, effort, moves)
    _settle(state, tables, 0)
    _spread(state, tables.served, prices)
    return -tables.value[0] / state.total_weight, highest(prices.loads), moves


@njit
def _make_moves(state, scratch, tables, prices, effort, moves):
    """Make the moves of one round, leave the best layout found, and return `moves` plus the number made."""
    S, E = state.slots.shape[1], state.primary.shape[0]
    slots, primary = state.slots.copy(), state.primary.copy()
    free, best, last = np.zeros(E, np.int64), np.inf, -1
    for step in range(effort.steps + 1):
        # what the layout costs, of which the tables hold the rows
        _spread(state, tables.served, prices)
        top = highest(prices.loads)
        now = prices.load_price * top - tables.value[0] / state.total_weight
        now += sum_move_costs(state.slots, prices.move_cost)
        if now < best - 1e-9:
            best, last = now, step - 1
            copy_ints(state.slots, slots)
            copy_ints(state.primary, primary)
        kind, p, other = best_move(state, tables, prices, Turn(top, free, step, now - best + 1e-9))
        if kind < 0 or step - last > effort.patience or step == effort.steps:
            break
        moves += 1
        a = state.slots[p // S, p % S]
        b = state.slots[other // S, other % S] if kind == SWAP else other
        count = collect(state, scratch, a, b, moves)
        # what sets with a or b contribute is taken out before the move and put in again after it
        for sign in (-1.0, 1.0):  # written once, since each call costs seconds of compilation
            contribute(state, tables, scratch.touched, count, sign)
            if sign < 0:
                make_move(state, kind, p, other)
        free[a] = free_again(step, effort.tenure)
        free[b] = free_again(step, effort.tenure)
    copy_ints(slots, state.slots)
    copy_ints(primary, state.primary)
    return moves
