"""Local search over layouts of one layer's experts: the numba kernels behind `placement.cocluster`.

A layout is `slots` (G, S), the expert in every slot of every rank, and `primary` (E,), the rank whose copy serves ranks
without an own one (or, over several nodes, ranks whose node has none). Tokens come as sets: the distinct rows of routed
experts (U, K) with their weights (U,), since real routing repeats itself (39,000 tokens of a gpt-oss layer are under
5,000 sets).

Every set takes the home that is best for it among the ranks of its request's attention group, under prices that keep
homes equally full (the equal slices of attention-TP, as dual variables). So a layout costs, in units of an activation,

    mean over tokens of  min over h of  (rank * remote ranks + node * remote nodes - activation * local ones + price h)

plus `load_price` times what the ranks' loads (1 = the mean) exceed the cap by. Moves: swap the contents of two slots;
put another expert into a slot whose expert has a further copy; make another copy the primary one. A move is judged
exactly, on the sets that hold an expert that it moves; one that a sample shows to be far from a gain is dropped.
"""

from collections import namedtuple
from typing import Any

import numba
import numpy as np
from numba import types
from numba.extending import intrinsic

njit = numba.njit(cache=True, nogil=True)
SWAP, REPLACE, PROMOTE = 0, 1, 2
ZERO, ONE = np.uint64(0), np.uint64(1)
PROBE = 24  # sets; a move that touches many more is first judged on that many, then on thrice as many, and so on
PRICE_UNITS = 2**20  # prices are whole numbers of 1 / this: sums with them are exact, and ties are ties

# What a search works on. It changes slots, primary, masks, price, value, home and load.
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
        "slots",  # (G, S) experts
        "primary",  # (E,) ranks
        "masks",  # (E, W) uint64: bit g says that rank g hosts the expert
        "node_of",  # (G,)
        "node_masks",  # (nodes, W) uint64
        "weights",  # (activation, rank, node)
        "price",  # (G,) of a home
        "value",  # (U,) of each set at its home
        "home",  # (U,)
        "load",  # (G,)
        "expert_load",  # (E,)
    ],
)
Scratch = namedtuple("Scratch", "stamp touched new_value new_home new_load cost")


def make_state(sets, weight, group, slots, primary, topology, weights):
    """A search's state: sets (U, K) in random order, weight (U,), attention group (U,), slots (G, S), primary (E,)."""
    (U, _), (G, _), E = sets.shape, slots.shape, len(primary)
    offsets, rows = _rows_by_expert(sets, E)
    node_of = topology.node_of
    members = [[1 << (g % 64) if g // topology.attn_tp_size == d and g // 64 == w else 0 for g in range(G)]
               for d in range(topology.dp_size) for w in range(-(-G // 64))]  # fmt: skip
    allowed = np.array([sum(bits) for bits in members], np.uint64).reshape(topology.dp_size, -1)[group]
    masks, node_masks = np.zeros((E, -(-G // 64)), np.uint64), np.zeros((node_of.max() + 1, -(-G // 64)), np.uint64)
    for g in range(G):
        bit = np.uint64(1 << (g % 64))
        masks[slots[g], g // 64] |= bit
        node_masks[node_of[g], g // 64] |= bit
    expert_load = np.zeros(E)
    np.add.at(expert_load, sets.ravel(), np.repeat(weight, sets.shape[1]))
    state = State(
        sets=sets, weight=weight, total_weight=weight.sum(), allowed=allowed, group_size=topology.attn_tp_size,
        offsets=offsets, rows=rows, slots=slots, primary=primary, masks=masks, node_of=node_of, node_masks=node_masks,
        weights=weights, price=np.zeros(G), value=np.zeros(U), home=np.zeros(U, np.int64), load=np.zeros(G),
        expert_load=expert_load,
    )  # fmt: skip
    scratch = Scratch(
        np.full(U, -1, np.int64), np.zeros(U, np.int64), np.zeros(U), np.zeros(U, np.int64), np.zeros(G),
        np.zeros(U),
    )  # fmt: skip
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
    """Set bits of a uint64, one instruction."""

    def generate(context, builder, signature, arguments):
        return builder.ctpop(arguments[0])

    return types.uint64(types.uint64), generate


popcount: Any = intrinsic(_popcount)


@njit
def _lowest(word):
    """Index of the lowest set bit."""
    return np.int64(popcount((word & (~word + ONE)) - ONE))


@njit
def _hosted(masks, expert, rank):
    return (masks[expert, rank >> 6] >> np.uint64(rank & 63)) & ONE


@njit
def server(state, expert, home):
    """The rank that serves `expert` to tokens at `home`: own copy, then one on the own node, then the primary."""
    if _hosted(state.masks, expert, home):
        return home
    first = state.primary[expert]
    if state.node_of[first] != state.node_of[home]:
        for word in range(state.masks.shape[1]):
            near = state.masks[expert, word] & state.node_masks[state.node_of[home], word]
            if near:
                return (word << 6) + _lowest(near)
    return first


@njit
def _best_homes(state, which, first, last, value, home):
    """Fill value and home [first:last] for the sets `which[first:last]`; candidates are the ranks that host an expert.

    The lowest of equally good homes is taken.
    """
    if state.slots.size == state.primary.shape[0]:
        _best_homes_single(state, which, first, last, value, home)
    else:
        _best_homes_copies(state, which, first, last, value, home)


@njit
def _best_homes_single(state, which, first, last, value, home):
    """With one copy each, ranks and nodes that a set reaches follow from its experts: a home decides what is local."""
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
    """In the order of the candidates' numbers; bits of the ranks that a candidate's other experts are served by."""
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
            elif chosen < 0:  # no allowed rank hosts any of its experts: all cost the same but for their price
                hosts[:] = ZERO
                left = state.allowed[u, word]
            else:
                break
            while left:
                candidate = (word << 6) + _lowest(left)
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


@njit
def _add_load(state, which, first, last, home, by_set, sign, load, slope, cost):
    """Add sign times the pairs of the sets `which[first:last]` to the ranks' load; homes by set or by place there.

    cost[first:last] gains what these pairs cost where `slope` (G,) is the price of a pair on each rank.
    """
    for c in range(first, last):
        u = which[c]
        at = home[u] if by_set else home[c]
        for i in range(state.sets.shape[1]):
            rank = server(state, state.sets[u, i], at)
            load[rank] += sign * state.weight[u]
            cost[c] += sign * state.weight[u] * slope[rank]


@njit
def _excess(load, cap):
    """Sum over ranks of the load beyond the cap, in units of the mean load."""
    mean, total = load.sum() / load.shape[0], 0.0
    for rank in range(load.shape[0]):
        total += max(load[rank] / mean - cap, 0.0)
    return total


@njit
def settle(state, steps):
    """Prices by `steps` of subgradient ascent towards equally many tokens a home, then values, homes and loads."""
    G, U = state.slots.shape[0], state.sets.shape[0]
    every = np.arange(U)
    for step in range(steps + 1):
        _best_homes(state, every, 0, U, state.value, state.home)
        if step == steps:
            break
        full = np.zeros(G)
        for u in range(U):
            full[state.home[u]] += state.weight[u]
        for d in range(G // state.group_size):  # inside each attention group
            ranks = slice(d * state.group_size, (d + 1) * state.group_size)
            mean = max(full[ranks].mean(), 1e-9)
            state.price[ranks] += 0.3 / (1 + step) * np.minimum(full[ranks] / mean - 1, 1.0)
            state.price[ranks] -= state.price[ranks].mean()
        state.price[:] = np.rint(state.price * PRICE_UNITS) / PRICE_UNITS
    state.load[:] = 0
    _add_load(state, every, 0, U, state.home, True, 1.0, state.load, np.zeros(G), np.zeros(U))


@njit
def _collect(state, scratch, a, b, mark):
    """The sets that hold expert a or b, each once, taken from both in turn; returns how many."""
    count = 0
    offsets = state.offsets
    for r in range(max(offsets[a + 1] - offsets[a], offsets[b + 1] - offsets[b])):
        for e in (a, b):
            if offsets[e] + r < offsets[e + 1]:
                u = state.rows[offsets[e] + r]
                if scratch.stamp[u] != mark:
                    scratch.stamp[u] = mark
                    scratch.touched[count] = u
                    count += 1
    return count


@njit
def _toggle(state, kind, a, b, x, y):
    """Apply or undo a move's copies: SWAP a on x with b on y, REPLACE a on x by b, PROMOTE moves none."""
    if kind != PROMOTE:
        state.masks[a, x >> 6] ^= ONE << np.uint64(x & 63)
        state.masks[b, x >> 6] ^= ONE << np.uint64(x & 63)
    if kind == SWAP:
        state.masks[a, y >> 6] ^= ONE << np.uint64(y & 63)
        state.masks[b, y >> 6] ^= ONE << np.uint64(y & 63)


@njit
def _new_primaries(state, kind, a, b, x, y):
    """Primaries of a and b after a move whose copies are in place: they follow their copy; PROMOTE takes a's on y."""
    first, second = state.primary[a], state.primary[b]
    if kind == PROMOTE:
        return y, y
    if first == x and kind == SWAP:
        first = y
    elif first == x:
        for word in range(state.masks.shape[1]):
            if state.masks[a, word]:
                first = (word << 6) + _lowest(state.masks[a, word])
    if kind == SWAP and second == y:
        second = x
    return first, second


@njit
def _judge(state, scratch, kind, a, b, x, y, mark, load_price, cap, penalty):
    """Change of the cost by a move, which stays applied if it pays; leaves new values, homes and load in scratch.

    The penalty is convex in the loads, so its tangent bounds it from below and adds up set by set: a sample of the sets
    bounds the change. Returns (change, new penalty, sets touched).
    """
    count, total = _collect(state, scratch, a, b, mark), state.total_weight
    if count == 0:  # no token uses either expert
        return np.inf, penalty, 0
    touched, new_load = scratch.touched, scratch.new_load
    single = state.slots.size == state.primary.shape[0]
    new_load[:] = state.load
    if single:  # with one copy each, loads follow from the labels alone
        shift = state.expert_load[a] - state.expert_load[b]
        new_load[x] -= shift
        new_load[y] += shift
    old_a, old_b = state.primary[a], state.primary[b]
    mean_load = state.load.sum() / state.load.shape[0]
    slope = np.where(state.load > cap * mean_load, load_price * total / mean_load, 0.0)
    scratch.cost[:count] = 0
    change, bound, squares, first, last = 0.0, 0.0, 0.0, 0, PROBE
    while first < count:
        last = count if last * 2 > count else last
        if not single:
            _add_load(state, touched, first, last, state.home, True, -1.0, new_load, slope, scratch.cost)
        _toggle(state, kind, a, b, x, y)
        state.primary[a], state.primary[b] = _new_primaries(state, kind, a, b, x, y)
        _best_homes(state, touched, first, last, scratch.new_value, scratch.new_home)
        if not single:
            _add_load(state, touched, first, last, scratch.new_home, False, 1.0, new_load, slope, scratch.cost)
        for c in range(first, last):
            loss = state.weight[touched[c]] * (state.value[touched[c]] - scratch.new_value[c])
            change += loss
            bound += loss + scratch.cost[c]
            squares += (loss + scratch.cost[c]) ** 2
        if last == count:
            break
        _toggle(state, kind, a, b, x, y)
        state.primary[a], state.primary[b] = old_a, old_b
        mean = bound / last
        least = (mean - 3 * np.sqrt(max(squares / last - mean * mean, 0.0) / last)) * count / total
        if least + (load_price * _excess(new_load, cap) - penalty if single else 0.0) > 0:
            return np.inf, penalty, count
        first, last = last, last * 3
    new_penalty = load_price * _excess(new_load, cap)
    change = change / total + new_penalty - penalty
    if change >= -1e-7:
        _toggle(state, kind, a, b, x, y)
        state.primary[a], state.primary[b] = old_a, old_b
    return change, new_penalty, count


@njit
def _accept(state, scratch, kind, i, j, a, b, count):
    """Book a move that stays: values, homes, load and slots."""
    S = state.slots.shape[1]
    for c in range(count):
        u = scratch.touched[c]
        state.value[u], state.home[u] = scratch.new_value[c], scratch.new_home[c]
    state.load[:] = scratch.new_load
    if kind != PROMOTE:
        state.slots[i // S, i % S] = b
    if kind == SWAP:
        state.slots[j // S, j % S] = a


@njit
def _decode(state, number):
    """Move `number` as (kind, slot i, slot j, a, b, x, y); kind -1 if it is none.

    Numbers run over every pair of slots, then every (slot, expert), then every (expert, rank).
    """
    (G, S), E, P = state.slots.shape, state.primary.shape[0], state.slots.size
    none = (-1, 0, 0, 0, 0, 0, 0)
    if number < P * P:
        i, j = number // P, number % P
        x, y = i // S, j // S
        if i >= j or x == y:
            return none
        a, b = state.slots[x, i % S], state.slots[y, j % S]
        return none if _hosted(state.masks, a, y) or _hosted(state.masks, b, x) else (SWAP, i, j, a, b, x, y)
    number -= P * P
    if number < P * E:
        i, b = number // E, number % E
        x = i // S
        a = state.slots[x, i % S]
        copies = ZERO
        for word in range(state.masks.shape[1]):
            copies += popcount(state.masks[a, word])
        return none if copies < 2 or _hosted(state.masks, b, x) else (REPLACE, i, 0, a, b, x, x)
    number -= P * E
    a, y = number // G, number % G
    x = state.primary[a]
    return none if x == y or not _hosted(state.masks, a, y) else (PROMOTE, 0, 0, a, a, x, y)


@njit
def improve(state, scratch, load_price, cap, price_steps, max_sweeps, seed, max_moves=1 << 60):
    """Sweep over all moves in random order and keep each that lowers the cost, until none does.

    Ranks on which nothing moved are not tried against each other again, and after `max_moves` it ends at once. Returns
    (cost, moves judged).
    """
    np.random.seed(seed)
    G, E, P = state.slots.shape[0], state.primary.shape[0], state.slots.size
    num_moves = P * P + (0 if P == E else P * E + E * G)
    dirty, judged, penalty = np.ones(G, np.bool_), 0, 0.0
    scratch.stamp[:] = -1
    for _ in range(max_sweeps):
        settle(state, price_steps)
        penalty = load_price * _excess(state.load, cap)
        moved = np.zeros(G, np.bool_)
        for number in np.random.permutation(num_moves):
            kind, i, j, a, b, x, y = _decode(state, number)
            if kind < 0 or not (dirty[x] or dirty[y]):
                continue
            judged += 1
            if judged > max_moves:
                break
            change, new_penalty, count = _judge(state, scratch, kind, a, b, x, y, judged, load_price, cap, penalty)
            if change < -1e-7:
                _accept(state, scratch, kind, i, j, a, b, count)
                penalty = new_penalty
                dirty[x] = dirty[y] = moved[x] = moved[y] = True
        dirty = moved
        if not moved.any() or judged > max_moves:
            break
    return -(state.value * state.weight).sum() / state.weight.sum() + penalty, judged
