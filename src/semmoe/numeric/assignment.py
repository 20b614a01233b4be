"""Assign items to groups of bounded size: exactly, greedily, or by improving an assignment with moves and swaps."""

import numpy as np

from semmoe.numeric.jit import njit

PARTNERS = 32  # swap partners tried per pair of groups: the items that would gain most
TOLERANCE = 1e-9
UNITS = 1 << 40  # of the largest value, as an integer
FAR = 1 << 60  # the loss of a group without items


def equal_groups(value: np.ndarray) -> np.ndarray:
    """(N,) the group of each item, with the largest sum of value (N, G) and at most ceil(N / G) items per group.

    Each item begins in its best group. Overfull groups send items on, one at a time along the path of groups that loses
    least (successive shortest paths; Ahuja, Magnanti and Orlin, 1993), to a group with room. So the time is that of the
    surplus alone. Values count to 12 digits.
    """
    scale = np.abs(value).max(initial=0.0) or 1.0
    whole = np.rint(np.asarray(value, np.float64) / scale * UNITS).astype(np.int64)  # sums of paths are exact
    return _relieve(whole, whole.argmax(axis=1), -(-len(value) // value.shape[1]))


@njit()
def _relieve(value, groups, size):
    """Send items from groups of more than `size` to groups of fewer; groups (N,) is changed and returned."""
    G = value.shape[1]
    counts = np.bincount(groups, minlength=G)
    loss, item = np.empty((G, G), np.int64), np.empty((G, G), np.int64)
    for a in range(G):
        _find_least(value, groups, a, loss, item)
    for full in range(G):
        while counts[full] > size:
            last, before = _nearest_room(loss, counts, full, size)
            counts[full] -= 1
            counts[last] += 1
            while last != full:  # from the end of the path: each group gets an item of the one before it
                groups[item[before[last], last]] = last
                _find_least(value, groups, last, loss, item)
                last = before[last]
            _find_least(value, groups, full, loss, item)
    return groups


@njit()
def _find_least(value, groups, a, loss, item):
    """Fill item[a] with the item of group a that loses least in each group, and loss[a] with its loss."""
    loss[a] = FAR
    for i in range(value.shape[0]):
        if groups[i] == a:
            for b in range(value.shape[1]):
                if value[i, a] - value[i, b] < loss[a, b]:
                    loss[a, b], item[a, b] = value[i, a] - value[i, b], i


@njit()
def _nearest_room(loss, counts, full, size):
    """(group, before (G,)): the group with room at the end of the path from `full` that loses least, and the paths."""
    G = len(counts)
    total, before = loss[full].copy(), np.full(G, full)
    better = True
    while better:
        better = False
        for a in range(G):
            for b in range(G):
                if b != full and total[a] + loss[a, b] < total[b]:
                    total[b], before[b] = total[a] + loss[a, b], a
                    better = True
    nearest = -1
    for g in range(G):
        if counts[g] < size and (nearest < 0 or total[g] < total[nearest]):
            nearest = g
    return nearest, before


def one_hot(labels: np.ndarray, num_clusters: int) -> np.ndarray:
    """(N, num_clusters) float32 from labels (N,)."""
    return (labels[:, None] == np.arange(num_clusters)).astype(np.float32)


def balanced_packing(weight: np.ndarray, num_packs: int) -> tuple[np.ndarray, np.ndarray]:
    """Pack the n items of each row into packs of equal size: the heaviest first, into the lightest pack with room.

    weight: (rows, n), n divisible by num_packs. Returns pack (rows, n) and position in the pack (rows, n).
    """
    rows, items = weight.shape
    assert items % num_packs == 0
    size = items // num_packs
    pack, position = np.zeros((rows, items), np.int64), np.zeros((rows, items), np.int64)
    order = np.argsort(-weight, axis=1, kind="stable")
    total, filled = np.zeros((rows, num_packs)), np.zeros((rows, num_packs), np.int64)
    every = np.arange(rows)
    for i in range(items):
        item = order[:, i]
        chosen = np.where(filled < size, total, np.inf).argmin(axis=1)
        pack[every, item], position[every, item] = chosen, filled[every, chosen]
        filled[every, chosen] += 1
        total[every, chosen] += weight[every, item]
    return pack, position


def replicate_experts(weight: np.ndarray, num_physical: int) -> tuple[np.ndarray, np.ndarray]:
    """Give each additional copy to the expert with the highest load per copy.

    weight: (rows, n). Returns the logical expert of each physical one (rows, num_physical), and copies (rows, n).
    """
    rows, experts = weight.shape
    logical = np.tile(np.arange(num_physical), (rows, 1))
    copies = np.ones((rows, experts), np.int64)
    every = np.arange(rows)
    for p in range(experts, num_physical):
        hottest = (weight / copies).argmax(axis=1)
        logical[:, p] = hottest
        copies[every, hottest] += 1
    return logical, copies


@njit()
def improve_assignment(value, work, capacity, groups, sweeps):
    """Increase the sum of value[r, groups[r]] by moves and swaps, with at most capacity (D,) work per group.

    value, work (R, D): gain and work of request r in group d; groups (R,) is changed in place. Work beyond capacity is
    reduced first, so a feasible start stays feasible. A sweep, linear in R, swaps with the PARTNERS best of a group.
    """
    R, D = value.shape
    load = np.zeros(D)
    for r in range(R):
        load[groups[r]] += work[r, groups[r]]
    partners = np.empty((D, D, PARTNERS), np.int64)
    for _ in range(sweeps):
        changed = False
        _find_partners(value, groups, partners)
        for r in range(R):
            b, q = _best_step(r, value, work, capacity, groups, load, partners)
            if b < 0:
                continue
            a, changed = groups[r], True
            load[a] -= work[r, a]
            load[b] += work[r, b]
            if q >= 0:
                load[b] -= work[q, b]
                load[a] += work[q, a]
                groups[q] = a
            groups[r] = b
        if not changed:
            break
    return groups


@njit()
def _find_partners(value, groups, partners):
    """Fill partners[b, a] with the requests of group b that would gain most in group a, best first, then -1."""
    R, D = value.shape
    partners[:] = -1
    for q in range(R):
        b = groups[q]
        for a in range(D):
            if a == b:
                continue
            listed, gain = partners[b, a], value[q, a] - value[q, b]
            i = PARTNERS
            while i > 0 and (listed[i - 1] < 0 or value[listed[i - 1], a] - value[listed[i - 1], b] < gain):
                i -= 1
            if i < PARTNERS:
                for j in range(PARTNERS - 1, i, -1):
                    listed[j] = listed[j - 1]
                listed[i] = q


@njit()
def _best_step(r, value, work, capacity, groups, load, partners):
    """(group, partner or -1) of the best move or swap of request r; group -1 if none is an improvement."""
    D = value.shape[1]
    a = groups[r]
    best_group, best_partner, best_relief, best_gain = -1, -1, 0.0, TOLERANCE
    for b in range(D):
        if b == a:
            continue
        before = max(0.0, load[a] - capacity[a]) + max(0.0, load[b] - capacity[b])
        for i in range(-1, PARTNERS):
            q = -1 if i < 0 else partners[b, a, i]
            if i >= 0 and q < 0:
                break
            if q >= 0 and groups[q] != b:
                continue  # it has moved since the list was made
            gain = value[r, b] - value[r, a]
            new_a, new_b = load[a] - work[r, a], load[b] + work[r, b]
            if q >= 0:
                gain += value[q, a] - value[q, b]
                new_a += work[q, a]
                new_b -= work[q, b]
            relief = before - max(0.0, new_a - capacity[a]) - max(0.0, new_b - capacity[b])
            more_relief = relief > best_relief + TOLERANCE
            if more_relief or (relief > best_relief - TOLERANCE and relief > -TOLERANCE and gain > best_gain):
                best_group, best_partner = b, q
                best_relief, best_gain = relief, gain
    return best_group, best_partner
