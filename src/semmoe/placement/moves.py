"""Local search over any layouts, for any costs: swaps, replacements and promotions, by tables of their gains.

The tables are filled by `swaps` without copies and for uniform costs, where a swap's gain is exact. Else `replicas`, or
`one_node` for uniform costs, estimates the gain of a move; the cost of the layout after it is exact. The best move is
made. Then only sets that hold an expert that moved have their contributions taken out and put in again. Where no move
gains, the search continues (tabu search, Glover 1989): it makes the move that costs least, leaves these experts alone
for a while, and keeps the best layout that it saw.
"""

import numpy as np

from semmoe.placement.homes import bare, index, inlined, next_near, next_primary, njit
from semmoe.placement.loads import highest, load_gain
from semmoe.placement.one_node import list_changes as list_on_one_node
from semmoe.placement.replicas import keep, list_changes, make_tables, take_out
from semmoe.placement.search import Turn, collect, copy_ints, free_again, may_move, settle, start
from semmoe.placement.swaps import contribute as contribute_swaps

SWAP, REPLACE, PROMOTE = 0, 1, 2
# The modules that fill the tables.
SWAPS, ONE_NODE, REPLICAS = 0, 1, 2


@njit
def best_move(state, tables, prices, turn):
    """Return (kind, slot p, slot q or expert b) of the best move of experts that may move; kind -1: none."""
    S = state.slots.shape[1]
    best, kind, first, other = -np.inf, -1, -1, -1
    reach, joins = _reaches(state, tables, prices), _joins(state, tables, prices)
    for p in range(state.slots.size):
        a = state.slots[p // S, p % S]
        gain, q = _best_partner(state, tables, prices, turn, best, reach, p)
        if gain > best:
            best, kind, first, other = gain, SWAP, p, q
        if state.copies[a] == 1:
            continue
        gain, b = _best_successor(state, tables, prices, turn, best, joins, p)
        if gain > best:
            best, kind, first, other = gain, REPLACE, p, b
        if state.primary[a] != p // S:
            gain = _promotion(state, tables, prices, turn.top, p)
            if gain > best and may_move(turn, gain, a, a):
                best, kind, first, other = gain, PROMOTE, p, a
    return kind, first, other


@njit
def _reaches(state, tables, prices):
    """Return (G, P) what each slot's copy gains at most on each rank, with nothing in return.

    Of the load it has the slope alone: the highest load is convex in the loads of ranks, and falls by no more.
    """
    (G, S), slope = state.slots.shape, prices.loads.slope
    out = np.empty((G, G * S))
    for p in range(G * S):
        x = p // S
        a = state.slots[x, p % S]
        share = prices.load_price * _share(state, tables.served, p)
        for y in range(G):
            moved = prices.move_cost[a, x] - prices.move_cost[a, y] + share * (slope[a, x] - slope[a, y])
            out[y, p] = tables.move[p, y] / state.total_weight + moved
    return out


@bare
def _best_partner(state, tables, prices, turn, best, reach, p):
    """Return (gain, slot) of the best swap of slot p with one of a later rank, if better than `best`."""
    (G, S), other = state.slots.shape, -1
    x, weight = p // S, state.total_weight
    a = state.slots[x, p % S]
    for y in range(x + 1, G):
        if state.slot_of[a, y] >= 0:  # no rank has an expert twice
            continue
        for q in range(y * S, (y + 1) * S):
            if reach[y, p] + reach[x, q] - tables.twice[p, q] / weight <= best:
                continue
            b = state.slots[y, q % S]
            if state.slot_of[b, x] < 0:
                gain = _swap_gain(state, tables, prices, turn.top, (a, p, x), (b, q, y))
                if gain > best and may_move(turn, gain, a, b):
                    best, other = gain, q
    return best if other >= 0 else -np.inf, other


@inlined
def _swap_gain(state, tables, prices, top, one, other):
    """The gain of a swap of two experts, each with its slot and its rank, the lower slot first."""
    (a, p, x), (b, q, y) = one, other
    rows = tables.move[p, y] + tables.move[q, x] - tables.twice[p, q]
    moved = prices.move_cost[a, x] - prices.move_cost[a, y] + prices.move_cost[b, y] - prices.move_cost[b, x]
    back = _share(state, tables.served, q)
    sent = a, _share(state, tables.served, p)
    return rows / state.total_weight + moved + load_gain(prices, top, x, y, sent, (b, back, back))


@njit
def _joins(state, tables, prices):
    """Return three tables (E, G) of a further copy of each expert on each rank: its gain with nothing in return, by the
    slope of the load as in `_reaches`; the share of the expert's pairs that it takes; and the further gain where the
    slot's former expert goes to the same primary rank."""
    E, G = tables.add.shape
    slope, price = prices.loads.slope, prices.load_price
    gains, shares, meets = np.zeros((E, G)), np.zeros((E, G)), np.zeros((E, G))
    for b in range(E if state.slots.size > E else 0):  # without copies nothing asks
        for x in range(G):
            if state.slot_of[b, x] < 0:
                came = _portion(_taken(state, tables.at_home, b, x), state.expert_load[b])
                lost = price * came * slope[b, x] + prices.move_cost[b, x]
                gains[b, x] = tables.add[b, x] / state.total_weight - lost
                shares[b, x], meets[b, x] = came, price * came * slope[b, state.primary[b]]
    return gains, shares, meets


@bare
def _best_successor(state, tables, prices, turn, best, joins, p):
    """Return (gain, expert) of the best expert to take slot p, whose expert has other copies, if better than `best`."""
    (gains, shares, meets), move_cost, weight = joins, prices.move_cost, state.total_weight
    S, E = state.slots.shape[1], state.primary.shape[0]
    x, other = p // S, -1
    a = state.slots[x, p % S]
    sent = a, _share(state, tables.served, p)
    z = _fallback_rank(state, a, x)  # a's pairs on x go there
    slope = prices.loads.slope
    leaves = tables.drop[p] / weight + move_cost[a, x] + prices.load_price * sent[1] * (slope[a, x] - slope[a, z])
    for b in range(E):
        if state.slot_of[b, x] >= 0:
            continue
        # b's new copy takes a share from its other copies: from z, if that is where its primary is
        met = state.primary[b] == z
        if leaves + gains[b, x] - tables.instead[p, b] / weight + (meets[b, x] if met else 0.0) <= best:
            continue
        rows = (tables.drop[p] + tables.add[b, x] - tables.instead[p, b]) / weight
        returned = b, shares[b, x], shares[b, x] if met else 0.0
        gain = rows + move_cost[a, x] - move_cost[b, x] + load_gain(prices, turn.top, x, z, sent, returned)
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
    sent = a, _portion(remote, state.expert_load[a])
    return tables.promote[p] / state.total_weight + load_gain(prices, top, z, x, sent, (a, 0.0, 0.0))


@inlined
def _share(state, served, p):
    """The share of its expert's pairs that the copy in slot p computes: all, of an only copy."""
    e = state.slots[p // state.slots.shape[1], p % state.slots.shape[1]]
    return 1.0 if state.copies[e] == 1 else _portion(served[p], state.expert_load[e])


@njit
def _portion(pairs, all_pairs):
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


def choose_fill(state):
    """The module that fills the tables in least time: SWAPS, ONE_NODE or REPLICAS."""
    if not state.uniform:
        return REPLICAS
    if state.slots.size == state.primary.size:
        return SWAPS
    return ONE_NODE if state.near.shape[1] == 1 else REPLICAS


@njit
def contribute(state, tables, sets, count, sign, fill):
    """Add the changes of `sets[:count]` to the tables, or with sign -1 take them out, before the layout changes.

    But for SWAPS, a set's changes are kept, where there is room, so that they need not be listed again to be taken out.
    """
    if fill == SWAPS:
        contribute_swaps(state, tables, sets, count, sign)
        return
    for c in range(count):
        u = sets[c]
        if sign < 0 and tables.kept[u] >= 0:
            take_out(tables, u)
        elif fill == ONE_NODE:
            keep(tables, u, list_on_one_node(state, tables, u, tables.at), sign)
        else:
            keep(tables, u, list_changes(state, tables, u, tables.at), sign)


def _settle(state, tables, price_steps, fill):
    """Settle prices and fill the tables again after slots and primaries were changed."""
    index(state)
    settle(state, price_steps)
    tables.sums[:] = 0.0
    every = np.arange(len(state.sets))
    contribute(state, tables, every, every.size, 1.0, fill)


@njit
def _spread(state, served, prices):
    """Fill the loads of ranks: each expert's load in each mix, spread over its copies as in the profile."""
    S, load, mixes = state.slots.shape[1], prices.loads.now, prices.mixes
    load[:] = 0.0
    for p in range(state.slots.size):
        rank = p // S
        e, share = state.slots[rank, p % S], _share(state, served, p)
        for j in range(mixes.shape[1]):
            load[rank, j] += share * mixes[e, j]


@njit
def sum_move_costs(slots, move_cost):
    """Return what the experts in the slots (G, P / G) cost where they are, of move_cost (E, G)."""
    total = 0.0
    for g in range(slots.shape[0]):
        for e in slots[g]:
            total += move_cost[e, g]
    return total


def search_moves(state, scratch, prices, effort, in_time=lambda: True):
    """Rounds of: settle prices, then at most `steps` best moves, until `patience` moves found nothing better.

    prices: `loads.Prices`. in_time: whether a further round may begin.
    Returns (cost per token without load and moves, mean highest load, moves made).
    """
    start(scratch, effort.seed)
    tables, fill = make_tables(state), choose_fill(state)
    moves = 0
    for round in range(effort.rounds):  # not compiled: each call of a compiled function from another costs seconds
        if round > 0 and not in_time():
            break
        _settle(state, tables, effort.price_steps, fill)
        moves = _make_moves(state, scratch, tables, prices, effort, moves, fill)
    if fill == SWAPS:
        state.slots.sort(axis=1)
    _settle(state, tables, 0, fill)
    _spread(state, tables.served, prices)
    return -tables.value[0] / state.total_weight, highest(prices), moves


@njit
def _make_moves(state, scratch, tables, prices, effort, moves, fill):
    """Make the moves of one round, leave the best layout found, and return `moves` plus the number made."""
    S, E = state.slots.shape[1], state.primary.shape[0]
    slots, primary = state.slots.copy(), state.primary.copy()
    free, best, last = np.zeros(E, np.int64), np.inf, -1
    for step in range(effort.steps + 1):
        # what the layout costs, of which the tables hold the rows
        _spread(state, tables.served, prices)
        top = highest(prices)
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
            contribute(state, tables, scratch.touched, count, sign, fill)
            if sign < 0:
                make_move(state, kind, p, other)
        free[a] = free_again(step, effort.tenure)
        free[b] = free_again(step, effort.tenure)
    copy_ints(slots, state.slots)
    copy_ints(primary, state.primary)
    return moves
