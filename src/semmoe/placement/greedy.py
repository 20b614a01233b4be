"""Assign the experts of one layer to clusters of equal size, greedily and then by improving random swaps.

This is the step `expert_place` of the paper's Algorithm 1; semmoe's own search starts from it.
"""

import numpy as np

from semmoe.numeric.jit import njit


def place_layer(together, data, swaps, alpha, beta, gamma):
    """(E,) clusters of at most E / C experts, rounded up: greedy by falling load, then improving random swaps.

    together (E, E): affinity of experts; data (E, C): activations of each expert by the data of each cluster; swaps
    (n, 2): pairs of experts to try. alpha, beta, gamma: weights of together, of data, and of a level load.
    """
    load = together.sum(axis=1)
    price = gamma * data.shape[1] / max(load.sum(), 1e-9)
    return _place(together, data, load, np.argsort(-load, kind="stable"), swaps, alpha, beta, price)


@njit()
def _place(together, data, load, order, swaps, alpha, beta, price):
    experts, clusters = data.shape
    capacity = -(-experts // clusters)
    labels = np.full(experts, -1, np.int64)
    count, cluster_load = np.zeros(clusters, np.int64), np.zeros(clusters)
    near = np.zeros((experts, clusters))  # near[e, c]: affinity of e to the other experts of c
    for e in order:
        best, chosen = -np.inf, -1
        for c in range(clusters):
            if count[c] < capacity:
                score = (alpha * near[e, c] + beta * data[e, c]) / max(load[e], 1e-9) - price * cluster_load[c]
                if score > best:
                    best, chosen = score, c
        labels[e] = chosen
        count[chosen] += 1
        cluster_load[chosen] += load[e]
        for other in range(experts):
            if other != e:
                near[other, chosen] += together[e, other]
    for s in range(swaps.shape[0]):
        a, b = swaps[s, 0], swaps[s, 1]
        x, y = labels[a], labels[b]
        if x == y:
            continue
        pull = near[a, y] + near[b, x] - near[a, x] - near[b, y] - 2 * together[a, b]
        data_gain = data[a, y] + data[b, x] - data[a, x] - data[b, y]
        shift = load[a] - load[b]  # load that moves from x to y
        load_cost = shift * (cluster_load[y] - cluster_load[x] + shift)
        if alpha * pull + beta * data_gain - price * load_cost > 1e-12:
            labels[a], labels[b] = y, x
            cluster_load[x] -= shift
            cluster_load[y] += shift
            for e in range(experts):
                moved_a = 0.0 if e == a else together[a, e]
                moved_b = 0.0 if e == b else together[b, e]
                near[e, x] += moved_b - moved_a
                near[e, y] += moved_a - moved_b
    return labels
