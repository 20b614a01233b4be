"""Find the best home ranks of one layer's tokens, given a layout: the innermost kernels of `placement.search`.

`placement.search` states the objective. The state of a search is defined here too.
"""

from collections import namedtuple
from typing import NamedTuple

import numba
import numpy as np

from semmoe.costs.rows import RowCosts
from semmoe.numeric.jit import njit as compiled

njit = compiled(nogil=True)
inlined = numba.njit(inline="always")  # for calls that pass a dozen arrays, which cost more than what they do
# For functions that make no arrays: no counting of references, most of their time. numba does not document the option.
bare = compiled(nogil=True, _nrt=False)
# Of RowCosts, one of each kind of tokens: (F, G, G), (F, G, N), (F, G, G).
Costs = namedtuple("Costs", "rank node pair")
# What `make_state` makes. A search changes slots, slot_of, near, copies, primary, price, value and home.
State = namedtuple(
    "State",
    "sets weight total_weight group kind group_size offsets rows slots slot_of near copies primary node_of costs "
    "uniform weights price value home expert_load",
)
Scratch = namedtuple("Scratch", "stamp touched")


class Sets(NamedTuple):
    """The distinct sets of experts that the tokens of a layer are routed to, in random order."""

    experts: np.ndarray  # (U, K)
    weight: np.ndarray  # (U,) how many tokens have the set
    group: np.ndarray  # (U,) attention group
    kind: np.ndarray  # (U,) which of the costs the set is charged


def make_state(sets: Sets, slots, primary, topology, costs):
    """Make the state of a search; slots (G, P / G), primary (E,), costs: RowCosts of each kind."""
    experts, weight, group, kind = sets
    U, G, E = len(experts), len(slots), len(primary)
    node_of = topology.node_of
    order = np.argsort(experts, axis=None, kind="stable")
    offsets = np.searchsorted(experts.ravel()[order], np.arange(E + 1))
    weights = uniform_weights(costs, node_of)
    expert_load = np.zeros(E)
    np.add.at(expert_load, experts.ravel(), np.repeat(weight, experts.shape[1]))
    state = State(
        sets=experts,  # (U, K)
        weight=weight,  # (U,)
        total_weight=weight.sum(),
        group=group.astype(np.int64),  # (U,) of attention group d, ranks d * S to d * S + S - 1 may be the set's home
        kind=kind.astype(np.int64),  # (U,) which of the costs the set is charged
        group_size=topology.attn_tp_size,  # S
        offsets=offsets,  # (E + 1,)
        rows=order // experts.shape[1],  # (U * K,): the sets that hold expert e are rows[offsets[e] : offsets[e + 1]]
        slots=slots,  # (G, P / G) experts
        slot_of=np.zeros((E, G), np.int64),  # the slot of each expert's copy on each rank, -1 if there is none
        near=np.zeros((E, topology.num_nodes), np.int64),  # each node's lowest rank with a copy, -1 without
        copies=np.zeros(E, np.int64),  # how many there are
        primary=primary,  # (E,) ranks
        node_of=node_of,  # (G,)
        costs=Costs._make(
            np.stack([np.ascontiguousarray(getattr(one, name), np.float64) for one in costs]) for name in Costs._fields
        ),
        uniform=weights is not None,  # whether the costs are the same for all ranks
        weights=weights or (np.nan,) * 3,  # if so, the costs of a pair, a rank and a node
        price=np.zeros(G),  # of each rank as a home
        value=np.zeros(U),  # of each set at its home: its cost, less than zero
        home=np.zeros(U, np.int64),  # of each set
        expert_load=expert_load,  # (E,)
    )
    index(state)
    return state, Scratch(np.full(U, -1, np.int64), np.zeros(U, np.int64))


def uniform_weights(costs: tuple[RowCosts, ...], node_of: np.ndarray) -> tuple[float, float, float] | None:
    """(activation, per rank, per node) if every rank charges the same for a pair, a rank and a node, else None."""
    remote, away, found = ~np.eye(len(node_of), dtype=bool), node_of[:, None] != np.arange(node_of.max() + 1), set()
    for one in costs:
        parts = one.pair[remote], one.rank[remote], one.node[away]
        if any(part.size and np.ptp(part) > 0 for part in parts):
            return None
        activation, per_rank, per_node = (float(part.flat[0]) if part.size else 0.0 for part in parts)
        found.add((activation, per_rank, per_node))
    return found.pop() if len(found) == 1 else None


def index(state):
    """Fill slot_of, near and copies from the slots."""
    experts, ranks = state.slots.ravel(), np.repeat(np.arange(len(state.slots)), state.slots.shape[1])
    state.slot_of[:], state.near[:] = -1, -1
    state.slot_of[experts, ranks] = np.arange(len(experts))
    state.near[experts[::-1], state.node_of[ranks[::-1]]] = ranks[::-1]  # the last, which is the lowest, stays
    state.copies[:] = np.bincount(experts, minlength=len(state.copies))


@inlined
def next_near(state, expert, node, rank):
    """The lowest rank of a node, other than `rank`, with a copy of the expert; -1 if there is none."""
    near = state.near[expert, node]
    if near == rank and near >= 0:
        size = state.node_of.shape[0] // state.near.shape[1]
        near = -1
        for other in range(rank + 1, (node + 1) * size):
            if state.slot_of[expert, other] >= 0:
                near = other
                break
    return near


@inlined
def next_primary(state, expert, rank):
    """The lowest rank but `rank` with a copy of the expert."""
    first = 0
    while first == rank or state.slot_of[expert, first] < 0:
        first += 1
    return first


@inlined
def serving(node_of, home, has, first, near):
    """The rank that computes an expert for tokens at `home`: home itself, else one on its node, else the primary.

    has: whether home has a copy; first: the primary's rank, which comes before others of the node; near: the lowest
    rank of the node with a copy, -1 if there is none.
    """
    if has:
        return home
    return first if node_of[first] == node_of[home] or near < 0 else near


@inlined
def server(state, expert, home):
    """The rank that computes `expert` for tokens at `home`: its own copy, else one on its node, else the primary."""
    near, has = state.near[expert, state.node_of[home]], state.slot_of[expert, home] >= 0
    return serving(state.node_of, home, has, state.primary[expert], near)


@njit
def best_homes(state):
    """Fill value and home: the ranks of the sets' groups that cost least, the lowest of equally good ones.

    Without copies and with uniform costs, candidates are the ranks that host one of the set's experts, if any does.
    """
    if state.uniform and state.slots.size == state.primary.shape[0]:
        _best_homes_single(state)
        return
    if state.uniform and state.near.shape[1] == 1:
        _best_homes_on_node(state)
        return
    S, K = state.group_size, state.sets.shape[1]
    G, N = state.price.shape[0], state.near.shape[1]
    servers, cost = np.zeros((S, K), np.int64), np.zeros(S)
    counts, node_counts = np.zeros((S, G), np.int64), np.zeros((S, N), np.int64)
    for u in range(state.sets.shape[0]):
        charge(state, u, servers, cost, counts, node_counts)
        clear(state, servers, counts, node_counts)
        best = 0
        for s in range(1, S):  # a loop, since argmin takes half a second to compile
            best = s if cost[s] < cost[best] else best
        state.value[u], state.home[u] = -cost[best], state.group[u] * S + best


@njit
def _best_homes_on_node(state):
    """`best_homes` for one node of uniform costs."""
    S, K, G = state.group_size, state.sets.shape[1], state.price.shape[0]
    first, has, cost, reached = np.zeros(K, np.int64), np.zeros((K, S)), np.zeros(S), np.zeros((G, S))
    for u in range(state.sets.shape[0]):
        low, best = state.group[u] * S, 0
        charge_on_node(state, u, first, has, cost, reached)
        for s in range(1, S):
            best = s if cost[s] < cost[best] else best
        for y in first:
            for s in range(S):
                reached[y, s] = 0.0
        state.value[u], state.home[u] = -cost[best], low + best


@inlined
def charge_on_node(state, u, first, has, cost, reached):
    """Fill, for one node of uniform costs: first (K,), the primary ranks of set u's experts; has (K, S), 1 where a home
    of its group has a copy, else 0; and cost (S,). Adds to reached (G, S), which was zero, the experts without a copy
    on the home whose primary is on each rank.

    Zeros and ones are multiplied: branches that depend on routing cost more than the arithmetic.
    """
    (activation, per_rank, _), low = state.weights, state.group[u] * state.group_size
    for s in range(cost.shape[0]):
        cost[s] = state.price[low + s]
    for i in range(first.shape[0]):
        e = state.sets[u, i]
        first[i] = state.primary[e]
        for s in range(cost.shape[0]):
            has[i, s] = 1.0 if state.slot_of[e, low + s] >= 0 else 0.0
            away = 1.0 - has[i, s]
            cost[s] += away * (activation + (per_rank if reached[first[i], s] == 0 else 0.0))
            reached[first[i], s] += away


@inlined
def charge(state, u, servers, cost, counts, node_counts):
    """Fill servers (S, K), the ranks that compute the experts of set u for each home of its group, and cost (S,).

    Adds the set's experts to counts (S, G) and node_counts (S, N), which were zero: see `clear`.
    """
    (rank, node, pair), f, low = state.costs, state.kind[u], state.group[u] * state.group_size
    for s in range(cost.shape[0]):
        h = low + s
        total = state.price[h]
        for i in range(servers.shape[1]):
            y = servers[s, i] = server(state, state.sets[u, i], h)
            m = state.node_of[y]
            total += pair[f, h, y]
            if counts[s, y] == 0:
                total += rank[f, h, y]
            if node_counts[s, m] == 0:
                total += node[f, h, m]
            counts[s, y] += 1
            node_counts[s, m] += 1
        cost[s] = total


@inlined
def clear(state, servers, counts, node_counts):
    """Set to zero what `charge` counted."""
    for s in range(servers.shape[0]):
        for y in servers[s]:
            counts[s, y] = node_counts[s, state.node_of[y]] = 0


@inlined
def find_lowest(cost, places):
    """Fill places (B,) with the places of the lowest costs, ascending."""
    for s in range(cost.shape[0]):
        b = min(s, places.shape[0])
        while b > 0 and cost[places[b - 1]] > cost[s]:
            if b < places.shape[0]:
                places[b] = places[b - 1]
            b -= 1
        if b < places.shape[0]:
            places[b] = s


@njit
def count_ranks(state, u, ranks, counts, node_counts):
    """Fill ranks (K,) of set u's experts, count them by rank (G,) and node (N,), and return how many are reached."""
    reached, reached_nodes = 0, 0
    for i in range(ranks.shape[0]):
        x = ranks[i] = state.primary[state.sets[u, i]]
        reached += counts[x] == 0
        reached_nodes += node_counts[state.node_of[x]] == 0
        counts[x] += 1
        node_counts[state.node_of[x]] += 1
    return reached, reached_nodes


@njit
def _best_homes_single(state):
    """`best_homes` without copies: the experts determine the ranks and nodes reached, the home only what is local."""
    activation, per_rank, per_node = state.weights
    G, K = state.slots.shape[0], state.sets.shape[1]
    local, by_node, ranks = np.zeros(G, np.int64), np.zeros(state.near.shape[1], np.int64), np.empty(K, np.int64)
    for u in range(state.sets.shape[0]):
        reached, nodes = count_ranks(state, u, ranks, local, by_node)
        low = state.group[u] * state.group_size
        high = low + state.group_size
        best, chosen = -np.inf, -1
        # the best rank of the group that hosts one of the experts
        for rank in ranks:
            if low <= rank < high:
                gain = activation * (local[rank] - K) - state.price[rank]
                if gain > best or (gain == best and rank < chosen):
                    best, chosen = gain, rank
        if chosen >= 0:
            best -= per_rank * (reached - 1) + per_node * (nodes - 1)
        else:  # no rank of the group does
            for rank in range(low, high):
                away = nodes - (by_node[state.node_of[rank]] > 0)
                gain = -activation * K - state.price[rank] - per_rank * reached - per_node * away
                if gain > best:
                    best, chosen = gain, rank
        state.value[u], state.home[u] = best, chosen
        for rank in ranks:
            local[rank] = by_node[state.node_of[rank]] = 0
