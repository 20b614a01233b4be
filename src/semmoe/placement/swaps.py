"""Local search over layouts without copies, for uniform costs, by a table of what every swap of two experts changes.

`placement.search` states the objective. Moving expert a alone to rank y changes the values of the sets that hold a:
`move[a, y]` is the sum of these changes. A swap of a (on x) with b (on y) changes the value of a set that holds one of
them as that move alone does, and leaves a set that holds both as it is. So with `both[a, b]`, the part of
move[a, rank of b] that comes from sets which hold b too,

    gain of the swap = move[a, y] + move[b, x] - both[a, b] - both[b, a]

exactly: a swap is judged by four look-ups, and the best of all swaps is made. Then only the sets that hold a or b have
their contributions taken out and put in again (Fiduccia and Mattheyses, 1982, keep such gains for graphs). The search
goes on from where no swap gains (tabu search, Glover 1989): it makes the swap that costs least, does not move these
experts again for a while, and keeps the best layout that it saw.
"""

from typing import NamedTuple

import numpy as np

from semmoe.placement.homes import count_ranks, index, inlined, njit
from semmoe.placement.loads import highest, load_gain
from semmoe.placement.search import Turn, collect, copy_ints, free_again, may_move, settle, start


class Gains(NamedTuple):
    """The tables of a search."""

    move: np.ndarray  # (E, G)
    both: np.ndarray  # (E, E)


def make_gains(state) -> Gains:
    """Return empty tables."""
    E, G = state.slot_of.shape
    return Gains(np.zeros((E, G)), np.zeros((E, E)))


@njit
def contribute(state, gains, sets, count, sign):
    """Add sign times the contributions of `sets[:count]` to the tables."""
    (activation, per_rank, per_node), node_of = state.weights, state.node_of
    K, G = state.sets.shape[1], state.slots.shape[0]
    ranks, counts = np.zeros(K, np.int64), np.zeros(G, np.int64)  # counts of the set's experts are zero between sets
    node_counts = np.zeros(state.near.shape[1], np.int64)
    more = np.zeros(G)  # value of each of the set's homes with one expert more
    reach = np.zeros(G)  # cost of reaching each rank
    change = np.zeros(G)  # of the set's value, if an expert moves to each rank
    for c in range(count):
        u = sets[c]
        experts, d, weight = state.sets[u], state.group[u], sign * state.weight[u]
        # count the set's experts by rank and node
        reached, reached_nodes = count_ranks(state, u, ranks, counts, node_counts)
        for y in range(G):
            inside = y // state.group_size == d  # whether y may be the set's home
            more[y] = activation - state.price[y] + activation * counts[y] if inside else -np.inf
            reach[y] = per_rank * (counts[y] == 0) + per_node * (node_counts[node_of[y]] == 0)
        # the set's value now: at the best home with an expert, else at any home of its group
        best, second, home = _two_best(ranks, more)
        value = best - activation - per_rank * (reached - 1) - per_node * (reached_nodes - 1)
        if home < 0:
            value = _value_away(state, d, node_counts, reached, reached_nodes, -1, -1)
        for i in range(K):
            x = ranks[i]
            alone, lonely = counts[x] == 1, node_counts[node_of[x]] == 1
            # the best home other than the rank that expert i comes to: rank x has one expert less
            base = (second if home == x else best) - activation
            if not alone and more[x] - 2 * activation > base:
                base = more[x] - 2 * activation
            gone, gone_nodes = reached - alone, reached_nodes - lonely  # reached by the others
            if base > -np.inf:
                kept = value + per_rank * (gone - 1) + per_node * (gone_nodes - 1)
                emptied = node_of[x] if lonely else -1  # a node that must be reached again
                for y in range(G):
                    again = per_node if node_of[y] == emptied else 0.0
                    change[y] = (more[y] if more[y] > base else base) - (reach[y] + again) - kept
            else:
                _change_away(state, (counts, node_counts, more), d, x, gone, gone_nodes, change)
                for y in range(G):
                    change[y] -= value
            row = gains.move[experts[i]]
            for y in range(G):
                row[y] += weight * change[y]
            # a swap with another expert of the set leaves the set as it is: `both` takes the change out again
            for j in range(K):
                if ranks[j] != x:
                    gains.both[experts[i], experts[j]] += weight * change[ranks[j]]
        for x in ranks:
            counts[x] = node_counts[node_of[x]] = 0


@inlined
def _two_best(ranks, more):
    """(best, second best of another rank, rank of the best) of `more` (G,) at `ranks`; -inf and -1 if there is none."""
    best, second, home = -np.inf, -np.inf, -1
    for x in ranks:
        if x != home:
            if more[x] > best:
                best, second, home = more[x], best, x
            elif more[x] > second:
                second = more[x]
    return best, second, home


@njit
def _change_away(state, homes, d, x, gone, gone_nodes, change):
    """Fill `change` with the set's value by the rank that its expert on rank x moves to.

    No home of the set's group d hosts another of its experts; those reach `gone` ranks and `gone_nodes` nodes. homes:
    the set's experts by rank (G,) and by node (N,), and values (G,) with one expert more.
    """
    (_, per_rank, per_node), node_of = state.weights, state.node_of
    counts, node_counts, more = homes
    lonely = node_counts[node_of[x]] == 1
    for y in range(counts.shape[0]):
        m = node_of[y]
        reached = gone + (counts[y] == 0)
        nodes = gone_nodes + (node_counts[m] == (lonely and m == node_of[x]))
        if y // state.group_size == d:
            change[y] = more[y] - per_rank * (reached - 1) - per_node * (nodes - 1)
        else:
            change[y] = _value_away(state, d, node_counts, reached, nodes, node_of[x], m)


@njit
def _value_away(state, d, node_counts, reached, reached_nodes, left, joined):
    """Return the value of the best home of group d if none hosts an expert; nodes: one expert left, one joined."""
    (_, per_rank, per_node), best = state.weights, -np.inf
    for h in range(d * state.group_size, (d + 1) * state.group_size):
        m = state.node_of[h]
        here = node_counts[m] - (m == left) + (m == joined) > 0
        best = max(best, -state.price[h] - per_rank * reached - per_node * (reached_nodes - here))
    return best


@njit
def best_swap(state, gains, prices, turn):
    """Return (gain per token, a, b) of the best swap of two experts that may move."""
    move, both = gains
    rank_of = state.primary
    best, first, other = -np.inf, -1, -1
    for a in range(rank_of.shape[0]):
        x = rank_of[a]
        for b in range(a + 1, rank_of.shape[0]):
            y = rank_of[b]
            if y == x:
                continue
            gain = (move[a, y] + move[b, x] - both[a, b] - both[b, a]) / state.total_weight
            gain += prices.move_cost[a, x] - prices.move_cost[a, y] + prices.move_cost[b, y] - prices.move_cost[b, x]
            # no swap saves more load than all that x and y have above the others
            if gain + prices.load_price * (turn.top - prices.loads.least[min(x, y), max(x, y)]) <= best:
                continue
            gain += load_gain(prices, turn.top, x, y, (a, 1.0), (b, 1.0, 1.0))
            if gain > best and may_move(turn, gain, a, b):
                best, first, other = gain, a, b
    return best, first, other


def _settle(state, gains, price_steps):
    """Settle prices and make the tables anew."""
    settle(state, price_steps)
    gains.move[:] = 0.0
    gains.both[:] = 0.0
    every = np.arange(len(state.sets))
    contribute(state, gains, every, every.size, 1.0)


def _sum_loads(rank_of, prices):
    """Fill the loads of ranks from the mixes of their experts."""
    prices.loads.now[:] = 0.0
    np.add.at(prices.loads.now, rank_of, prices.mixes)


def search_swaps(state, scratch, prices, effort):
    """Rounds of: settle prices, then at most `steps` best swaps, until `patience` of them found nothing better.

    prices: `loads.Prices`. Returns (cost per token without load and moves, mean highest load, swaps made).
    """
    start(scratch, effort.seed)
    gains, swaps = make_gains(state), 0
    for _ in range(effort.rounds):  # not compiled: each call of a compiled function from another costs seconds
        _settle(state, gains, effort.price_steps)
        _sum_loads(state.primary, prices)
        kept, swaps = _make_swaps(state, scratch, gains, prices, effort, swaps)
        state.primary[:] = kept
        state.slots[:] = np.argsort(kept, kind="stable").reshape(state.slots.shape)
        index(state)
    settle(state, 0)
    _sum_loads(state.primary, prices)
    return -(state.value * state.weight).sum() / state.total_weight, highest(prices.loads), swaps


@njit
def _make_swaps(state, scratch, gains, prices, effort, swaps):
    """Make the swaps of one round; return the best ranks found (E,), and `swaps` plus the number made."""
    rank_of, mixes, load = state.primary, prices.mixes, prices.loads.now
    kept = rank_of.copy()
    free, now, best, last = np.zeros(mixes.shape[0], np.int64), 0.0, 0.0, -1
    for step in range(effort.steps):
        turn = Turn(highest(prices.loads), free, step, best - now + 1e-9)
        gain, a, b = best_swap(state, gains, prices, turn)
        if a < 0 or step - last > effort.patience:
            break
        swaps += 1
        # what sets with a or b contribute is taken out before the swap and put in again after it
        count = collect(state, scratch, a, b, swaps)
        contribute(state, gains, scratch.touched, count, -1.0)
        x, y = rank_of[a], rank_of[b]
        rank_of[a], rank_of[b] = y, x
        contribute(state, gains, scratch.touched, count, 1.0)
        for j in range(mixes.shape[1]):
            load[x, j] += mixes[b, j] - mixes[a, j]
            load[y, j] += mixes[a, j] - mixes[b, j]
        now += gain
        free[a] = free_again(step, effort.tenure)
        free[b] = free_again(step, effort.tenure)
        if now > best + 1e-9:
            best, last = now, step
            copy_ints(rank_of, kept)
    return kept, swaps
