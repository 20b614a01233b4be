"""The tables of `moves` for layouts without copies and uniform costs, in less time than those of `replicas`.

Moving expert a alone to rank y changes the values of the sets that hold a. `move[p, y]` is their sum for a in slot p.
A swap of a (on x) with b (on y, in slot q) changes the value of a set that holds one expert as that expert's move alone
does, and leaves the value of a set that holds both. So with `twice[p, q]`, p < q, the part of move[p, y] + move[q, x]
from sets which hold both,

    gain of the swap = move[p, y] + move[q, x] - twice[p, q]

exactly: a swap is judged by three look-ups, as Fiduccia and Mattheyses (1982) keep gains for graphs.
"""

import numpy as np

from semmoe.placement.homes import count_ranks, inlined, njit


@njit
def contribute(state, tables, sets, count, sign):
    """Add sign times what `sets[:count]` contribute to `move`, `twice` and `value` of the tables."""
    (activation, per_rank, per_node), node_of = state.weights, state.node_of
    K, G = state.sets.shape[1], state.slots.shape[0]
    ranks, counts = np.zeros(K, np.int64), np.zeros(G, np.int64)  # counts of the set's experts are zero between sets
    node_counts = np.zeros(state.near.shape[1], np.int64)
    places = np.zeros(K, np.int64)  # slots of the set's experts
    more = np.zeros(G)  # value of each of the set's homes with one expert more
    reach = np.zeros(G)  # cost of reaching each rank
    change = np.zeros(G)  # of the set's value, if an expert moves to each rank
    for c in range(count):
        u = sets[c]
        d, weight = state.group[u], sign * state.weight[u]
        # count the set's experts by rank and node
        reached, reached_nodes = count_ranks(state, u, ranks, counts, node_counts)
        for i in range(K):
            places[i] = state.slot_of[state.sets[u, i], ranks[i]]
        for y in range(G):
            inside = y // state.group_size == d  # whether y may be the set's home
            more[y] = activation - state.price[y] + activation * counts[y] if inside else -np.inf
            reach[y] = per_rank * (counts[y] == 0) + per_node * (node_counts[node_of[y]] == 0)
        # the set's value now: at the best home with an expert, else at any home of its group
        best, second, home = _two_best(ranks, more)
        value = best - activation - per_rank * (reached - 1) - per_node * (reached_nodes - 1)
        if home < 0:
            value = _value_away(state, d, node_counts, reached, reached_nodes, -1, -1)
        tables.value[0] += weight * (value - activation * K)
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
            _add_changes(tables.move, tables.twice, (ranks, places), i, weight, change)
        for x in ranks:
            counts[x] = node_counts[node_of[x]] = 0


@inlined
def _add_changes(move, twice, where, i, weight, change):
    """Add to the tables the change (G,) of the set's value by the rank that its expert i moves to, times `weight`.

    where: ranks and slots (K,) of the set's experts.
    """
    ranks, places = where
    row = move[places[i]]
    for y in range(change.shape[0]):
        row[y] += weight * change[y]
    # a swap with another expert of the set leaves the set's value: `twice` takes the change out again
    for j in range(ranks.shape[0]):
        if ranks[j] != ranks[i]:
            p, q = places[i], places[j]
            twice[min(p, q), max(p, q)] += weight * change[ranks[j]]


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
