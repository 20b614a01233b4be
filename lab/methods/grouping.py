"""Parts that several methods share: equal groups of experts that tokens choose together, and costs of transfers."""

import warnings
from itertools import pairwise

import numpy as np
from scipy.cluster.vq import kmeans2

from semmoe.core import RoutingTrace
from semmoe.topology import Topology
from semmoe.traces.affinity import pair_count

STARTS = 8  # starts of k-means, of which the best is kept
# cost of a transfer between nodes relative to one inside a node: NVLink's bandwidth over a network card's
NODE_COST = 8.0


def link_costs(topology: Topology) -> np.ndarray:
    """(G, G): cost of a transfer, which is 0 on one rank, 1 inside a node and NODE_COST between nodes."""
    node = topology.node_of
    cost = np.where(node[:, None] == node, 1.0, NODE_COST)
    np.fill_diagonal(cost, 0.0)
    return cost


def paths_of(trace: RoutingTrace) -> np.ndarray:
    """(L - 1, E, E) int64: the number of tokens that chose e at a layer and e' at the next."""
    layers, experts = trace.expert_ids.transpose(1, 0, 2), trace.fingerprint.num_experts
    paths = [pair_count(before, after, experts) for before, after in pairwise(layers)]
    return np.array(paths, np.int64).reshape(-1, experts, experts)


def group_hierarchically(together: np.ndarray, num_nodes: int, num_ranks: int, rng) -> np.ndarray:
    """(E,) ranks: group experts by co-activation `together` (E, E) onto nodes, then each node's onto its ranks."""
    nodes, per_node = group(together, num_nodes, rng), num_ranks // num_nodes
    ranks = np.empty_like(nodes)
    for node in range(num_nodes):
        experts = np.flatnonzero(nodes == node)
        inside = together[np.ix_(experts, experts)]
        ranks[experts] = node * per_node + group(inside, per_node, rng)
    return ranks


def group(together: np.ndarray, num_groups: int, rng) -> np.ndarray:
    """(E,) groups of equal size: spectral clusters whose surplus experts move to the groups of highest affinity.

    Algorithm 2 with a non-uniformity ratio of 0: a cluster above its share keeps the experts of highest affinity to it;
    the others move, highest affinity first, to groups that have room.
    """
    if num_groups == 1:
        return np.zeros(len(together), np.int64)
    clusters = spectral_clusters(together, num_groups, rng)
    size, groups = len(together) // num_groups, np.full(len(together), -1)
    for g in range(num_groups):
        members = np.flatnonzero(clusters == g)
        inside = together[np.ix_(members, members)].sum(axis=1)
        groups[members[np.argsort(-inside, kind="stable")[:size]]] = g
    return _fill(together, groups, num_groups)


def _fill(together: np.ndarray, groups: np.ndarray, num_groups: int) -> np.ndarray:
    """Groups (E,) after experts without one (-1) were added to groups with room, highest affinity first."""
    room = len(groups) // num_groups - np.bincount(groups[groups >= 0], minlength=num_groups)
    common = together @ (groups[:, None] == np.arange(num_groups))  # (E, groups)
    left = list(np.flatnonzero(groups < 0))
    while left:
        value = np.where(room > 0, common[left], -1.0)
        row, g = np.unravel_index(value.argmax(), value.shape)
        expert = left.pop(int(row))
        groups[expert] = g
        room[g] -= 1
        common[:, g] += together[:, expert]
    return groups


def spectral_clusters(together: np.ndarray, num_clusters: int, rng) -> np.ndarray:
    """(E,) clusters of any size: k-means on the leading eigenvectors of the normalised matrix, rows to unit length."""
    scale = 1 / np.sqrt(np.maximum(together.sum(axis=1), 1e-30))
    _, vectors = np.linalg.eigh(together * scale[:, None] * scale)
    rows = vectors[:, -num_clusters:]
    rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
    best, found = np.inf, np.zeros(len(rows), np.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a cluster may stay empty: groups are filled afterwards
        for _ in range(STARTS):
            centroids, labels = kmeans2(rows, num_clusters, minit="++", seed=rng)
            spread = float(((rows - centroids[labels]) ** 2).sum())
            if spread < best - 1e-12:
                best, found = spread, labels
    return found.astype(np.int64)
