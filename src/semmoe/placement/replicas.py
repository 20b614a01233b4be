"""Tables of what every move of a layout would change, with or without copies, on any ranks and for any costs.

A set's value is that of its best home, and a move changes which ranks compute some of its experts there. How the cost
of a home changes when one expert goes to another rank follows from how many of the set's experts each rank and each
node compute. Changes are summed over sets for the copy in slot p, of expert a on rank x:

    move[p, y]   the copy goes to rank y, and the primary with it if it is the primary copy
    drop[p]      the copy goes away; the lowest other copy becomes primary
    promote[p]   the copy becomes primary
    add[b, y]    expert b gets one more copy, on rank y

A swap or a replacement is two of these. Sets that hold both experts would be counted twice; `twice` and `instead` are
the parts of the sums that come from them, and such a set's value is taken to stay as it is. This is exact for experts
without further copies and an estimate else; what a move that was made has changed is always computed, not estimated.

Of a set's homes, a move is evaluated at the MAX_CANDIDATE_HOMES cheapest ones and at the rank that a copy comes to.
"""

from collections import namedtuple

import numpy as np

from semmoe.placement.homes import bare, charge, clear, find_lowest, inlined, next_near, next_primary, serving

MAX_CANDIDATE_HOMES = 4  # of a set
WIDTH, MOST_KEPT = 512, 1 << 23  # changes kept of a set, and of all sets


# What `make_tables` makes: sums over sets, views of `sums`; and what each set adds.
Tables = namedtuple("Tables", "move add drop promote twice instead served at_home value sums begin where what kept at")
# What `_make_homes` makes.
Homes = namedtuple(
    "Homes",
    "servers cost candidate_homes own counts node_counts reach after joined ranks slots starts entries amounts "
    "first has reached owner",
)


def make_tables(state) -> Tables:
    """Return empty tables for slots (P,), experts (E,), ranks (G,) and sets (U,)."""
    E, G, P, U = len(state.primary), len(state.slots), state.slots.size, len(state.sets)
    shapes = {
        "move": (P, G),
        "add": (E, G),
        "drop": (P,),
        "promote": (P,),
        "twice": (P, P),  # p < q: of move[p, rank of q] + move[q, rank of p], from sets that hold both experts
        "instead": (P, E),  # of drop[p] + add[b, rank of p], from sets that hold b too
        "served": (P,),  # pairs that each copy computes
        "at_home": (E, G),  # pairs of each expert whose token's home is the rank
        "value": (1,),  # sum of values
    }
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    sums = np.zeros(ends[-1])
    parts = zip(shapes.items(), np.split(sums, ends[:-1]), strict=True)
    W = min(WIDTH, max(MOST_KEPT // max(U, 1), 1))
    return Tables(
        **{name: part.reshape(shape) for (name, shape), part in parts},
        sums=sums,
        begin=(0, *ends[:-1].tolist()),  # where each table begins in `sums`
        where=np.zeros((U, W), np.int32),  # the entries of `sums` to which each set adds
        what=np.zeros((U, W)),  # the amounts
        kept=np.zeros(U, np.int64),  # the number of entries; -1: too many to keep
        at=_make_homes(state),
    )


def _make_homes(state) -> Homes:
    """Return room for one set at a time: its homes (B candidates of S), its experts' copies, and what moves change."""
    S, K, G, N = state.group_size, state.sets.shape[1], len(state.slots), state.near.shape[1]
    B, copies = min(MAX_CANDIDATE_HOMES, S), min(K * G, state.slots.size)
    changes = copies * (G + copies + 2 * K + 2) + K * (G + 2) + 2  # the most to which one set can add
    return Homes(
        servers=np.zeros((S, K), np.int64),  # the rank that computes each expert for each home
        cost=np.zeros(S),
        candidate_homes=np.zeros(B, np.int64),  # the cheapest homes, by their place in the group, ascending
        own=np.zeros((K, S)),  # what each home costs if it computes the expert itself
        counts=np.zeros((S, G), np.int64),  # experts that each rank computes for each home; zero between sets
        node_counts=np.zeros((S, N), np.int64),  # the same for each node
        reach=np.zeros((B, G)),  # what one more pair on the rank costs the home
        after=np.zeros(G),  # the set's cost after a change
        joined=np.zeros((K, G)),  # of the cost, by a further copy of each expert on each rank
        ranks=np.zeros(K * G + 1, np.int64),  # of the copies of the experts
        slots=np.zeros(K * G + 1, np.int64),
        starts=np.zeros(K + 1, np.int64),  # where each expert's copies begin in `ranks` and `slots`
        entries=np.zeros(changes, np.int64),  # the entries of `sums` to which the set adds
        amounts=np.zeros(changes),
        # these are of `one_node`
        first=np.zeros(K, np.int64),  # primary rank of each expert
        has=np.zeros((K, S)),  # whether each home has a copy of the expert
        reached=np.zeros((G, S)),  # experts without a copy on the home, by primary rank; zero between sets
        owner=np.zeros(K * G + 1, np.int64),  # the expert of each copy
    )


@inlined
def take_out(tables, u):
    """Take the changes that are kept of set u out of the tables."""
    for i in range(tables.kept[u]):
        tables.sums[tables.where[u, i]] -= tables.what[u, i]


@inlined
def keep(tables, u, n, sign):
    """Add the n changes that were listed to the tables, times sign, and keep them for set u."""
    at = tables.at
    for i in range(n):
        tables.sums[at.entries[i]] += sign * at.amounts[i]
    tables.kept[u] = -1
    if n <= tables.where.shape[1]:
        for i in range(n):
            tables.where[u, i], tables.what[u, i] = at.entries[i], at.amounts[i]
        tables.kept[u] = n


@inlined
def note(at, n, entry, amount):
    """Write down the n-th change, unless it is zero, and return how many there are."""
    at.entries[n], at.amounts[n] = entry, amount
    return n + (amount != 0.0)


@bare
def list_changes(state, tables, u, at):
    """List the entries of `sums` to which set u adds, and the amounts; return their number."""
    (E, G), P, K, weight = tables.add.shape, tables.drop.shape[0], state.sets.shape[1], state.weight[u]
    charge(state, u, at.servers, at.cost, at.counts, at.node_counts)
    _read(state, u, at)
    _, add, _, _, _, instead, served, at_home, value = tables.begin
    best, home = at.cost[at.candidate_homes[0]], state.group[u] * state.group_size + at.candidate_homes[0]
    single = P == E  # no expert has a further copy, so only swaps are looked up
    n = note(at, 0, value, -weight * best)
    for i in range(K):
        e = state.sets[u, i]
        n = note(at, n, served + state.slot_of[e, at.servers[at.candidate_homes[0], i]], weight)
        n = note(at, n, at_home + e * G + home, weight)
        if not single:
            _join(state, u, i, at)
            for y in range(G):
                n = note(at, n, add + e * G + y, weight * at.joined[i, y])
        for k in range(at.starts[i], at.starts[i + 1]):
            n = _list_copy(state, tables, u, i, k, at, n)
    # `instead`: a further copy of an expert in the place of a copy of another, of the same set
    for k in range(0 if single else at.starts[K]):
        x, own = at.ranks[k], 0
        while at.starts[own + 1] <= k:
            own += 1
        for j in range(K if state.copies[state.sets[u, own]] > 1 else 0):
            b = state.sets[u, j]
            if state.slot_of[b, x] < 0:
                n = note(at, n, instead + at.slots[k] * E + b, weight * at.joined[j, x])
    clear(state, at.servers, at.counts, at.node_counts)
    return n


@inlined
def _list_copy(state, tables, u, i, k, at, n):
    """List what moves of the set's copy k, of its expert i, change."""
    (E, G), P, K, weight = tables.add.shape, tables.drop.shape[0], state.sets.shape[1], state.weight[u]
    move, _, drop, promote, twice, instead, _, _, _ = tables.begin
    e, x, p, best = state.sets[u, i], at.ranks[k], at.slots[k], at.cost[at.candidate_homes[0]]
    if state.copies[e] > 1:
        first = state.primary[e]
        if first == x:
            first = next_primary(state, e, x)
        dropped = best - _without(state, u, i, x, first, at)
        n = note(at, n, drop + p, weight * dropped)
        if state.primary[e] != x:
            n = note(at, n, promote + p, weight * (best - _without(state, u, i, -1, x, at)))
        for j in range(K if dropped != 0.0 else 0):
            n = note(at, n, instead + p * E + state.sets[u, j], weight * dropped)
    _move(state, u, i, x, at)
    for y in range(G):
        if state.slot_of[e, y] < 0:
            n = note(at, n, move + p * G + y, weight * (best - at.after[y]))
    # `twice`: a swap with another expert of the set
    for other in range(at.starts[K]):
        y = at.ranks[other]
        if state.slot_of[e, y] < 0:
            q = at.slots[other]
            n = note(at, n, twice + min(p, q) * P + max(p, q), weight * (best - at.after[y]))
    return n


@inlined
def _read(state, u, at):
    """Fill the set's copies, its best homes and what these cost without one of its experts."""
    (rank, node, pair), f, (S, K), low = state.costs, state.kind[u], at.servers.shape, state.group[u] * state.group_size
    count = 0
    for i in range(K):
        e = state.sets[u, i]
        at.starts[i] = count
        left = state.copies[e]
        y = state.primary[e] if left == 1 else 0
        while left > 0:
            if state.slot_of[e, y] >= 0:
                at.ranks[count], at.slots[count] = y, state.slot_of[e, y]
                count, left = count + 1, left - 1
            y += 1
    at.starts[K] = count
    find_lowest(at.cost, at.candidate_homes)
    for b in range(at.candidate_homes.shape[0]):
        s = at.candidate_homes[b]
        h = low + s
        for y in range(at.reach.shape[1]):
            m = state.node_of[y]
            more = rank[f, h, y] if at.counts[s, y] == 0 else 0.0
            at.reach[b, y] = pair[f, h, y] + more + (node[f, h, m] if at.node_counts[s, m] == 0 else 0.0)
    for s in range(S):
        h = low + s
        for i in range(K):
            y = at.servers[s, i]
            saved = pair[f, h, y]
            if at.counts[s, y] == 1:
                saved += rank[f, h, y]
            if at.node_counts[s, state.node_of[y]] == 1:
                saved += node[f, h, state.node_of[y]]
            at.own[i, s] = at.cost[s] - saved


@inlined
def _cost_with(state, u, i, b, y, at):
    """What candidate home b of the set costs if rank y computes the set's expert i."""
    s = at.candidate_homes[b]
    x, h, f = at.servers[s, i], state.group[u] * state.group_size + s, state.kind[u]
    if x == y:
        return at.cost[s]
    m, cost = state.node_of[y], at.own[i, s] + at.reach[b, y]
    if m == state.node_of[x] and at.node_counts[s, m] == 1:  # the expert alone reaches the node
        cost += state.costs.node[f, h, m]
    return cost


@inlined
def _serves(node_of, h, has, first, near, y):
    """The rank that computes an expert for home h if rank y gets a copy; other arguments as `serving` takes them."""
    if node_of[y] == node_of[h] and (near < 0 or y < near):
        near = y
    return serving(node_of, h, has or y == h, first, near)


@inlined
def _without(state, u, i, x, first, at):
    """What the set costs if its expert i's copy on rank x is gone (x = -1: none is) and rank `first` is its primary."""
    best, low, node_of, e = np.inf, state.group[u] * state.group_size, state.node_of, state.sets[u, i]
    for b in range(at.candidate_homes.shape[0]):
        h = low + at.candidate_homes[b]
        has, near = state.slot_of[e, h] >= 0 and h != x, next_near(state, e, node_of[h], x)
        best = min(best, _cost_with(state, u, i, b, serving(node_of, h, has, first, near), at))
    return best


@inlined
def _move(state, u, i, x, at):
    """Fill `after` for moves of the copy on rank x of expert i."""
    low, e, node_of, (B, G) = state.group[u] * state.group_size, state.sets[u, i], state.node_of, at.reach.shape
    first, several = state.primary[e], state.near.shape[1] > 1
    leads, lowest = first == x, np.inf
    at.after[:] = np.inf
    for b in range(B):
        s = at.candidate_homes[b]
        h = low + s
        if state.slot_of[e, h] >= 0 and h != x:
            lowest = min(lowest, _cost_with(state, u, i, b, h, at))
        elif several:
            near = next_near(state, e, node_of[h], x)
            for y in range(G):
                z = _serves(node_of, h, False, y if leads else first, near, y)
                at.after[y] = min(at.after[y], _cost_with(state, u, i, b, z, at))
        elif leads:  # the primary serves all homes on its node without a copy
            for y in range(G):
                at.after[y] = min(at.after[y], at.own[i, s] + at.reach[b, y])
        else:
            lowest = min(lowest, _cost_with(state, u, i, b, first, at))
    for y in range(G):
        at.after[y] = min(at.after[y], lowest)
    for s in range(at.own.shape[1]):
        at.after[low + s] = min(at.after[low + s], at.own[i, s])


@inlined
def _join(state, u, i, at):
    """Fill `joined` for a further copy of expert i."""
    low, e = state.group[u] * state.group_size, state.sets[u, i]
    node_of, best = state.node_of, at.cost[at.candidate_homes[0]]
    S, node_size = at.own.shape[1], state.price.shape[0] // state.near.shape[1]
    begin, end = node_of[low] * node_size, (node_of[low + S - 1] + 1) * node_size
    at.joined[i, :] = 0.0
    for y in range(begin, end):
        after = at.own[i, y - low] if low <= y < low + S else np.inf
        if state.near.shape[1] == 1:  # the copy serves its own rank alone
            at.joined[i, y] = max(best - after, 0.0)
            continue
        for b in range(at.candidate_homes.shape[0]):
            h = low + at.candidate_homes[b]
            near, has = state.near[e, node_of[h]], state.slot_of[e, h] >= 0
            z = _serves(node_of, h, has, state.primary[e], near, y)
            after = min(after, _cost_with(state, u, i, b, z, at))
        at.joined[i, y] = best - after
