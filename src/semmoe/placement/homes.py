"""Find the best home ranks of one layer's tokens, given a layout: the innermost kernels of `placement.search`.

`placement.search` states the objective. The state of a search is defined here too.
"""

from collections import namedtuple
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

njit = numba.njit(cache=True, nogil=True)
inlined = numba.njit(inline="always")  # for calls that pass a dozen arrays, which cost more than what they do
ZERO, ONE = np.uint64(0), np.uint64(1)

# The state of a search, which changes slots, primary, masks, price, value, home and load.
State = namedtuple(
    "State",
    [
        "sets",  # (U, K) experts
        "weight",  # (U,)
        "total_weight",
        "allowed",  # (U, W) uint64: bit g says that rank g may be the set's home
        "group_size",  # ranks of an attention group
        "offsets",  # (E + 1,)
        "rows",  # (U * K,): the sets that hold expert e are rows[offsets[e] : offsets[e + 1]]
        "slots",  # (G, P / G) experts
        "primary",  # (E,) ranks
        "masks",  # (E, W) uint64: bit g says that rank g hosts the expert
        "node_of",  # (G,)
        "node_masks",  # (nodes, W) uint64
        "weights",  # (activation, rank, node)
        "price",  # (G,) of each rank as a home
        "value",  # (U,) of each set at its home
        "home",  # (U,)
        "load",  # (G,)
        "expert_load",  # (E,)
        "group",  # (U,) attention groups
    ],
)
Scratch = namedtuple("Scratch", "stamp touched new_value new_home new_load cost")


def make_state(sets, weight, group, slots, primary, topology, weights):
    """Make the state of a search.

    sets (U, K) in random order, weight (U,), group (U,), slots (G, P / G), primary (E,).
    """
    (U, _), (G, _), E = sets.shape, slots.shape, len(primary)
    offsets, rows = _rows_by_expert(sets, E)
    node_of = topology.node_of
    members = [
        [1 << (g % 64) if g // topology.attn_tp_size == d and g // 64 == w else 0 for g in range(G)]
        for d in range(topology.dp_size)
        for w in range(-(-G // 64))
    ]
    allowed = np.array([sum(bits) for bits in members], np.uint64).reshape(topology.dp_size, -1)[group]
    masks, node_masks = np.zeros((E, -(-G // 64)), np.uint64), np.zeros((node_of.max() + 1, -(-G // 64)), np.uint64)
    for g in range(G):
        bit = np.uint64(1 << (g % 64))
        masks[slots[g], g // 64] |= bit
        node_masks[node_of[g], g // 64] |= bit
    expert_load = np.zeros(E)
    np.add.at(expert_load, sets.ravel(), np.repeat(weight, sets.shape[1]))
    state = State(
        sets=sets,
        weight=weight,
        total_weight=weight.sum(),
        allowed=allowed,
        group_size=topology.attn_tp_size,
        offsets=offsets,
        rows=rows,
        slots=slots,
        primary=primary,
        masks=masks,
        node_of=node_of,
        node_masks=node_masks,
        weights=weights,
        price=np.zeros(G),
        value=np.zeros(U),
        home=np.zeros(U, np.int64),
        load=np.zeros(G),
        expert_load=expert_load,
        group=group.astype(np.int64),
    )
    scratch = Scratch(
        np.full(U, -1, np.int64), np.zeros(U, np.int64), np.zeros(U), np.zeros(U, np.int64), np.zeros(G), np.zeros(U)
    )
    return state, scratch


@njit
def _rows_by_expert(sets, num_experts):
    """Inverted index: the sets that hold each expert, as offsets (E + 1,) and rows (U * K,)."""
    offsets = np.zeros(num_experts + 1, np.int64)
    for u in range(sets.shape[0]):
        for k in range(sets.shape[1]):
            offsets[sets[u, k] + 1] += 1
    offsets = np.cumsum(offsets)
    rows, filled = np.empty(offsets[-1], np.int64), offsets[:-1].copy()
    for u in range(sets.shape[0]):
        for k in range(sets.shape[1]):
            rows[filled[sets[u, k]]] = u
            filled[sets[u, k]] += 1
    return offsets, rows


def _popcount(typing_context, word):
    """Number of set bits of a uint64, in one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


popcount: Any = intrinsic(_popcount)


@njit
def lowest_bit(word):
    """Index of the lowest set bit."""
    return np.int64(popcount((word & (~word + ONE)) - ONE))


@njit
def hosted(masks, expert, rank):
    return (masks[expert, rank >> 6] >> np.uint64(rank & 63)) & ONE


@njit
def server(state, expert, home):
    """The rank that computes `expert` for tokens at `home`: its own copy, else one on its node, else the primary."""
    if hosted(state.masks, expert, home):
        return home
    first = state.primary[expert]
    if state.node_of[first] != state.node_of[home]:
        for word in range(state.masks.shape[1]):
            near = state.masks[expert, word] & state.node_masks[state.node_of[home], word]
            if near:
                return (word << 6) + lowest_bit(near)
    return first


@njit
def best_homes(state, which, first, last, value, home):
    """Fill value and home [first:last] for the sets `which[first:last]`.

    Candidates are the ranks that host one of the set's experts; the lowest of equally good homes is chosen.
    """
    if state.slots.size == state.primary.shape[0]:
        _best_homes_single(state, which, first, last, value, home)
    else:
        _best_homes_copies(state, which, first, last, value, home)


@njit
def _best_homes_single(state, which, first, last, value, home):
    """`best_homes` without copies: the experts determine the ranks and nodes reached, the home only what is local."""
    activation, per_rank, per_node = state.weights
    G, K = state.slots.shape[0], state.sets.shape[1]
    local, by_node, ranks = np.zeros(G, np.int64), np.zeros(state.node_masks.shape[0], np.int64), np.empty(K, np.int64)
    for c in range(first, last):
        u = which[c]
        reached, nodes = 0, 0
        for i in range(K):
            rank = ranks[i] = state.primary[state.sets[u, i]]
            reached += local[rank] == 0
            nodes += by_node[state.node_of[rank]] == 0
            local[rank] += 1
            by_node[state.node_of[rank]] += 1
        best, chosen = -np.inf, -1
        for rank in ranks:
            if (state.allowed[u, rank >> 6] >> np.uint64(rank & 63)) & ONE:
                worth = activation * local[rank] - state.price[rank]
                if worth > best or (worth == best and rank < chosen):
                    best, chosen = worth, rank
        if chosen >= 0:
            best -= per_rank * (reached - 1) + per_node * (nodes - 1)
        else:  # no allowed rank hosts any of its experts
            for rank in range(G):
                if (state.allowed[u, rank >> 6] >> np.uint64(rank & 63)) & ONE:
                    away = nodes - (by_node[state.node_of[rank]] > 0)
                    worth = -state.price[rank] - per_rank * reached - per_node * away
                    if worth > best:
                        best, chosen = worth, rank
        value[c], home[c] = best, chosen
        for rank in ranks:
            local[rank] = by_node[state.node_of[rank]] = 0


@njit
def _best_homes_copies(state, which, first, last, value, home):
    """`best_homes` with copies: tries candidates in rank order, with a bit mask of the ranks that each one reaches."""
    sets, masks, primary = state.sets, state.masks, state.primary
    words, K, nodes = masks.shape[1], sets.shape[1], state.node_masks.shape[0]
    activation, per_rank, per_node = state.weights
    remote, hosts, first_copy = np.zeros(words, np.uint64), np.zeros(K, np.uint64), np.zeros(K, np.int64)
    for c in range(first, last):
        u = which[c]
        best, chosen = -np.inf, -1
        for i in range(K):
            first_copy[i] = primary[sets[u, i]]
        for scan in range(2 * words):
            word = scan if scan < words else scan - words
            left = ZERO
            if scan < words:
                for i in range(K):
                    hosts[i] = masks[sets[u, i], word]
                    left |= hosts[i]
                left &= state.allowed[u, word]
            elif chosen < 0:  # no allowed rank hosts any of its experts: costs differ by price only
                hosts[:] = ZERO
                left = state.allowed[u, word]
            else:
                break
            while left:
                candidate = (word << 6) + lowest_bit(left)
                left &= left - ONE
                bit = np.uint64(candidate & 63)
                for w in range(words):
                    remote[w] = ZERO
                local = ZERO
                for i in range(K):
                    here = (hosts[i] >> bit) & ONE
                    local += here
                    rank = first_copy[i] if nodes == 1 else server(state, sets[u, i], candidate)
                    remote[rank >> 6] |= (ONE << np.uint64(rank & 63)) & (here - ONE)
                worth = activation * np.float64(local) - state.price[candidate]
                for w in range(words):
                    worth -= per_rank * np.float64(popcount(remote[w]))
                if nodes > 1:
                    worth -= per_node * _remote_nodes(state, candidate, remote)
                if worth > best:
                    best, chosen = worth, candidate
        value[c], home[c] = best, chosen


@njit
def _remote_nodes(state, home, remote):
    """Nodes other than home's among the ranks set in `remote` (W,)."""
    total = 0
    for node in range(state.node_masks.shape[0]):
        if node != state.node_of[home]:
            for w in range(remote.shape[0]):
                if remote[w] & state.node_masks[node, w]:
                    total += 1
                    break
    return total
