"""Local search over layouts of one layer's experts: the numba kernels behind `placement.cocluster`.

A layout is `slots` (G, P / G), the expert in every slot of every rank, and `primary` (E,), the rank whose copy is
used by ranks without an own one (or, over several nodes, by ranks whose node has none). Tokens come as sets: the
distinct rows of routed experts (U, K) with their weights (U,), since real routing repeats itself (39,000 tokens of a
gpt-oss layer are under 5,000 sets).

Every set takes its best home among the ranks of its request's attention group, under prices that keep homes equally
full (the dual variables of attention-TP's equal slices). The cost of a layout, in units of one (token, expert) pair, is

    mean over tokens of  min over h of  (rank * remote ranks + node * remote nodes - activation * local ones + price h)

plus `load_price` times the excess of the ranks' loads (1 = the mean) over the cap. Moves are: swap the contents of two
slots; replace an expert that has another copy; make another copy the primary one. A move is judged exactly, on the sets
that contain a moved expert, unless a sample of these sets already shows that it is far from a gain.
"""

import numpy as np

from semmoe.placement.homes import ONE, ZERO, best_homes, hosted, lowest_bit, njit, popcount, server

SWAP, REPLACE, PROMOTE = 0, 1, 2
PROBE = 24  # sets; a move that affects many more is first judged on this many, then on three times as many, and so on
PRICE_UNITS = 2**20  # prices are multiples of 1 / PRICE_UNITS, so that sums are exact and ties are recognised


@njit
def _add_load(state, which, first, last, home, by_set, sign, load, slope, cost):
    """Add sign times the pairs of the sets `which[first:last]` to the ranks' load.

    by_set: whether `home` is indexed by set or by position in `which`. cost[first:last] increases by the cost of these
    pairs, where `slope` (G,) is the price of a pair on each rank.
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
    """Sum over ranks of the load above the cap, in units of the mean load."""
    mean, total = load.sum() / load.shape[0], 0.0
    for rank in range(load.shape[0]):
        total += max(load[rank] / mean - cap, 0.0)
    return total


@njit
def settle(state, steps):
    """Update prices by `steps` of subgradient ascent to equal numbers of tokens per home, then values and load."""
    G, U = state.slots.shape[0], state.sets.shape[0]
    every = np.arange(U)
    for step in range(steps + 1):
        best_homes(state, every, 0, U, state.value, state.home)
        if step == steps:
            break
        full = np.zeros(G)
        for u in range(U):
            full[state.home[u]] += state.weight[u]
        for d in range(G // state.group_size):  # inside each attention group
            low, high = d * state.group_size, (d + 1) * state.group_size
            total = middle = 0.0
            for g in range(low, high):
                total += full[g]
            mean = max(total / (high - low), 1e-9)
            for g in range(low, high):
                state.price[g] += 0.3 / (1 + step) * min(full[g] / mean - 1, 1.0)
                middle += state.price[g] / (high - low)
            for g in range(low, high):
                state.price[g] = np.rint((state.price[g] - middle) * PRICE_UNITS) / PRICE_UNITS
    state.load[:] = 0
    _add_load(state, every, 0, U, state.home, True, 1.0, state.load, np.zeros(G), np.zeros(U))


@njit
def collect(state, scratch, a, b, mark):
    """Collect the sets that contain expert a or b, each once, alternating between the two; returns their number."""
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
    """Apply or undo the copies of a move: SWAP a on x with b on y; REPLACE a on x by b; PROMOTE moves no copy."""
    if kind != PROMOTE:
        state.masks[a, x >> 6] ^= ONE << np.uint64(x & 63)
        state.masks[b, x >> 6] ^= ONE << np.uint64(x & 63)
    if kind == SWAP:
        state.masks[a, y >> 6] ^= ONE << np.uint64(y & 63)
        state.masks[b, y >> 6] ^= ONE << np.uint64(y & 63)


@njit
def _new_primaries(state, kind, a, b, x, y):
    """Primaries of a and b after a move: they follow a moved copy; PROMOTE makes a's copy on y the primary."""
    first, second = state.primary[a], state.primary[b]
    if kind == PROMOTE:
        return y, y
    if first == x and kind == SWAP:
        first = y
    elif first == x:
        for word in range(state.masks.shape[1]):
            if state.masks[a, word]:
                first = (word << 6) + lowest_bit(state.masks[a, word])
    if kind == SWAP and second == y:
        second = x
    return first, second


@njit
def _judge(state, scratch, kind, a, b, x, y, mark, load_price, cap, penalty):
    """Compute the change of the cost by a move, and keep the move applied if the cost falls.

    Leaves new values, homes and load in scratch. The penalty is convex in the loads: its tangent is a lower bound that
    is additive over sets, so a sample bounds the change. Returns (change, new penalty, sets affected).
    """
    count, total = collect(state, scratch, a, b, mark), state.total_weight
    if count == 0:  # no token uses either expert
        return np.inf, penalty, 0
    touched, new_load = scratch.touched, scratch.new_load
    single = state.slots.size == state.primary.shape[0]
    new_load[:] = state.load
    if single:  # without copies, loads follow from the ranks of the experts alone
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
        best_homes(state, touched, first, last, scratch.new_value, scratch.new_home)
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
    """Store the new values, homes, load and slots of an accepted move."""
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
    """Decode move `number` to (kind, slot i, slot j, a, b, x, y); kind -1 if the move is not valid.

    Numbers enumerate all pairs of slots, then all (slot, expert), then all (expert, rank).
    """
    (G, slots), E, P = state.slots.shape, state.primary.shape[0], state.slots.size
    none = (-1, 0, 0, 0, 0, 0, 0)
    if number < P * P:
        i, j = number // P, number % P
        x, y = i // slots, j // slots
        if i >= j or x == y:
            return none
        a, b = state.slots[x, i % slots], state.slots[y, j % slots]
        return none if hosted(state.masks, a, y) or hosted(state.masks, b, x) else (SWAP, i, j, a, b, x, y)
    number -= P * P
    if number < P * E:
        i, b = number // E, number % E
        x = i // slots
        a = state.slots[x, i % slots]
        copies = ZERO
        for word in range(state.masks.shape[1]):
            copies += popcount(state.masks[a, word])
        return none if copies < 2 or hosted(state.masks, b, x) else (REPLACE, i, 0, a, b, x, x)
    number -= P * E
    a, y = number // G, number % G
    x = state.primary[a]
    return none if x == y or not hosted(state.masks, a, y) else (PROMOTE, 0, 0, a, a, x, y)


@njit
def improve(state, scratch, load_price, cap, price_steps, max_sweeps, seed, max_moves=1 << 60):
    """Sweep over all moves in random order and keep each one that lowers the cost, until none does.

    Pairs of ranks on which nothing moved are not tried again; the sweep ends after `max_moves` moves. Returns (cost,
    moves judged).
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
