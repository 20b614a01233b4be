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

from collections import namedtuple

import numpy as np

from semmoe.placement.homes import index, inlined, njit
from semmoe.placement.loads import highest, highest_after
from semmoe.placement.search import collect, settle

Gains = namedtuple(
    "Gains",
    [
        "move",  # (E, G)
        "both",  # (E, E)
        "worths",  # (D, G) of each home of a group with one expert there; -inf outside the group
        "counts",  # (2, G): experts of the set at hand on each rank and on each node; zero between sets
        "spare",  # (2, G): worths of the set's homes with one expert more; cost of reaching each rank
    ],
)


def make_gains(state) -> Gains:
    E, G, D = len(state.primary), len(state.slots), len(state.slots) // state.group_size
    spare = np.zeros((2, G))
    return Gains(np.zeros((E, G)), np.zeros((E, E)), np.full((D, G), -np.inf), np.zeros((2, G), np.int64), spare)


@njit
def contribute(state, gains, sets, count, sign):
    """Add sign times the contributions of `sets[:count]` to the tables."""
    costs, (activation, per_rank, per_node) = state.weights, state.weights
    all_sets, weights, rank_of, node_of, price = state.sets, state.weight, state.primary, state.node_of, state.price
    move, both, worths = gains.move, gains.both, gains.worths
    n, by_node, more, reach = gains.counts[0], gains.counts[1], gains.spare[0], gains.spare[1]
    S, K, G, nodes = state.group_size, all_sets.shape[1], state.slots.shape[0], state.near.shape[1]
    ranks = np.zeros(K, np.int64)
    for c in range(count):
        u = sets[c]
        experts, d = all_sets[u], state.group[u]
        low, high = d * S, d * S + S
        reached, reached_nodes = _count(experts, rank_of, node_of, ranks, n, by_node)
        for y in range(G):
            more[y] = worths[d, y] + activation * n[y]
            reach[y] = per_rank if n[y] == 0 else 0.0
        if nodes > 1:
            for y in range(G):
                reach[y] += per_node if by_node[node_of[y]] == 0 else 0.0
        best, second, home = _two_best(ranks, more)
        value = best - activation - per_rank * (reached - 1) - per_node * (reached_nodes - 1)
        if home < 0:
            value = _away(price, low, high, by_node, node_of, reached, reached_nodes, -1, -1, costs)
        for i in range(K):
            x = ranks[i]
            alone, lonely = n[x] == 1, by_node[node_of[x]] == 1
            base = (second if home == x else best) - activation
            if not alone and more[x] - 2 * activation > base:
                base = more[x] - 2 * activation
            gone, gone_nodes = reached - alone, reached_nodes - lonely  # reached by the others
            if lonely and nodes > 1:
                _charge(reach, node_of, x, per_node)
            if base > -np.inf:
                kept = value + per_rank * (gone - 1) + per_node * (gone_nodes - 1)
                _moves(experts, ranks, i, more, reach, base, kept, sign * weights[u], move[experts[i]], both)
            else:
                here = n, by_node, node_of, gone, gone_nodes, lonely
                _moves_away(
                    experts, ranks, i, more, here, price, low, high, value, sign * weights[u], costs, move, both
                )
            if lonely and nodes > 1:
                _charge(reach, node_of, x, -per_node)
        for i in range(K):
            n[ranks[i]] = by_node[node_of[ranks[i]]] = 0


@njit
def _count(experts, rank_of, node_of, ranks, n, by_node):
    """Fill the experts' ranks (K,) and count them by rank and by node; returns the ranks and nodes reached."""
    reached, reached_nodes = 0, 0
    for i in range(experts.shape[0]):
        x = ranks[i] = rank_of[experts[i]]
        reached += n[x] == 0
        reached_nodes += by_node[node_of[x]] == 0
        n[x] += 1
        by_node[node_of[x]] += 1
    return reached, reached_nodes


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
def _moves(experts, ranks, i, more, reach, base, kept, weight, row, both):
    """Add the changes by moves of expert i to every rank; base: worth of the best other home, kept: the value now."""
    for y in range(row.shape[0]):
        worth = more[y] if more[y] > base else base
        row[y] += weight * (worth - reach[y] - kept)
    for j in range(ranks.shape[0]):
        y = ranks[j]
        if y != ranks[i]:
            worth = more[y] if more[y] > base else base
            both[experts[i], experts[j]] += weight * (worth - reach[y] - kept)


@njit
def _moves_away(experts, ranks, i, more, here, price, low, high, value, weight, costs, move, both):
    """`_moves` if no home among low to high hosts another expert; gone, gone_nodes: reached by the others."""
    (n, by_node, node_of, gone, gone_nodes, lonely), (_, per_rank, per_node), x = here, costs, ranks[i]
    for y in range(n.shape[0]):
        m = node_of[y]
        reached = gone + (n[y] == 0)
        nodes = gone_nodes + (by_node[m] == (lonely and m == node_of[x]))
        if low <= y < high:
            after = more[y] - per_rank * (reached - 1) - per_node * (nodes - 1)
        else:
            after = _away(price, low, high, by_node, node_of, reached, nodes, node_of[x], m, costs)
        move[experts[i], y] += weight * (after - value)
        for j in range(ranks.shape[0]):
            if ranks[j] == y and y != x:
                both[experts[i], experts[j]] += weight * (after - value)


@njit
def _charge(reach, node_of, x, cost):
    """Add cost to reaching the ranks on the node of x."""
    for y in range(reach.shape[0]):
        reach[y] += cost if node_of[y] == node_of[x] else 0.0


@njit
def _away(price, low, high, by_node, node_of, reached, reached_nodes, left, joined, costs):
    """Worth of the best home among low to high if none hosts an expert; nodes: one expert left, one joined."""
    (_, per_rank, per_node), best = costs, -np.inf
    for h in range(low, high):
        m = node_of[h]
        here = by_node[m] - (m == left) + (m == joined) > 0
        best = max(best, -price[h] - per_rank * reached - per_node * (reached_nodes - here))
    return best


@njit
def best_swap(state, gains, prices, top, free, now, needed):
    """(gain, a, b) of the best swap of two experts that are free at step `now`, or that gains more than `needed`.

    top: the highest load now (`loads.highest`). The gain is per token.
    """
    dues, mixes, loads, load_price = prices
    rank_of, node_of = state.primary, state.node_of
    bound, total = state.bound, state.total_weight
    E, move, both, load, rest, least = rank_of.shape[0], gains.move, gains.both, loads.now, loads.others, loads.least
    best, first, other = -np.inf, -1, -1
    for a in range(E):
        x = rank_of[a]
        for b in range(a + 1, E):
            y = rank_of[b]
            if y == x:
                continue
            gain = (move[a, y] + move[b, x] - both[a, b] - both[b, a]) / total
            gain += dues[a, x] - dues[a, y] + dues[b, y] - dues[b, x]
            low, high = min(x, y), max(x, y)
            if gain + load_price * (top - least[low, high]) <= best:
                continue
            if node_of[x] != node_of[y] and (bound[a] >= 0 or bound[b] >= 0):
                continue
            if load_price > 0:
                after = highest_after(mixes[a], 1.0, mixes[b], 1.0, load[x], load[y], rest[low, high])
                gain += load_price * (top - after)
            if gain > best and ((free[a] <= now and free[b] <= now) or gain > needed):
                best, first, other = gain, a, b
    return best, first, other


def _settle(state, gains, price_steps, every):
    """Settle prices and make the tables anew."""
    settle(state, price_steps)
    ranks = np.arange(len(state.slots))
    gains.worths[ranks // state.group_size, ranks] = state.weights[0] - state.price
    gains.move[:], gains.both[:] = 0.0, 0.0
    contribute(state, gains, every, every.size, 1.0)


def _sum_loads(rank_of, mixes, load):
    """Fill load (G, J) from the mixes (E, J) of each rank's experts."""
    load[:] = 0.0
    np.add.at(load, rank_of, mixes)


def _set_ranks(state, ranks):
    """Put every expert on its rank (E,)."""
    state.primary[:] = ranks
    state.slots[:] = np.argsort(ranks, kind="stable").reshape(state.slots.shape)
    index(state)


@njit
def start(scratch, seed):
    """Begin a search: its random numbers, and no set marked as touched."""
    np.random.seed(seed)
    scratch.stamp[:] = -1


@inlined
def copy_ints(source, target):
    """Copy an array into another; a loop, since an assignment to a slice takes a second to compile."""
    for i in range(source.size):
        target.flat[i] = source.flat[i]


@njit
def free_again(step, tenure):
    """The step at which an expert that was moved at `step` may move again."""
    return step + 1 + tenure + np.random.randint(tenure)


def search_swaps(state, scratch, gains, prices, effort):
    """Rounds of: settle prices, then at most `steps` best swaps, until `patience` of them found nothing better.

    prices: `loads.Prices`, effort: `search.Effort`.
    Returns (cost per token without load and dues, mean highest load, swaps made).
    """
    start(scratch, effort.seed)
    every, swaps = np.arange(state.sets.shape[0]), 0
    for _ in range(effort.rounds):  # not compiled: each call of a compiled function from another costs seconds
        _settle(state, gains, effort.price_steps, every)
        _sum_loads(state.primary, prices.mixes, prices.loads.now)
        kept, swaps = _make_swaps(state, scratch, gains, prices, effort, swaps)
        _set_ranks(state, kept)
    settle(state, 0)
    _sum_loads(state.primary, prices.mixes, prices.loads.now)
    return -(state.value * state.weight).sum() / state.total_weight, highest(prices.loads), swaps


@njit
def _make_swaps(state, scratch, gains, prices, effort, swaps):
    """One round; returns the best ranks found (E,), and `swaps` and how many were made."""
    rank_of = state.primary
    mixes, load = prices.mixes, prices.loads.now
    free, now, best, last, kept = np.zeros(mixes.shape[0], np.int64), 0.0, 0.0, -1, rank_of.copy()
    for step in range(effort.steps):
        top = highest(prices.loads)
        needed = best - now + 1e-9
        gain, a, b = best_swap(state, gains, prices, top, free, step, needed)
        if a < 0 or step - last > effort.patience:
            break
        swaps += 1
        count = collect(state, scratch, a, b, swaps)
        contribute(state, gains, scratch.touched, count, -1.0)
        x, y = rank_of[a], rank_of[b]
        rank_of[a], rank_of[b] = y, x
        contribute(state, gains, scratch.touched, count, 1.0)
        for j in range(mixes.shape[1]):
            load[x, j] += mixes[b, j] - mixes[a, j]
            load[y, j] += mixes[a, j] - mixes[b, j]
        now += gain
        free[a], free[b] = free_again(step, effort.tenure), free_again(step, effort.tenure)
        if now > best + 1e-9:
            best, last = now, step
            copy_ints(rank_of, kept)
    return kept, swaps
