"""The paper's Algorithm 1: alternate between placing experts and scheduling data, so that both share a rank.

`docs/method.md` interprets its unspecified and misprinted parts. For attention-DP the data are requests, all
layers together, since a request has one rank. For attention-TP they are token types weighted by frequency, layer by
layer. Hybrid does the first over groups, then the second inside each. Letters beside core's: N data items, C clusters.
"""

import warnings
from dataclasses import dataclass

import numpy as np
from scipy.cluster.vq import kmeans2, vq

from semmoe.core import Placement, RoutingTrace
from semmoe.numeric.assignment import one_hot
from semmoe.numeric.jit import njit
from semmoe.placement.greedy import place_layer
from semmoe.settings import PaperSettings
from semmoe.topology import Topology, check_divides, nearest
from semmoe.traces.affinity import count, request_counts

KMEANS_ROWS = 2048  # number of largest items from which the initial centroids are computed


@dataclass(frozen=True, kw_only=True)
class CoClustering:
    """The placement of experts, and the ranks or groups where data should go."""

    placement: Placement
    token_ranks: np.ndarray | None = None  # (L, D, V) int16: rank inside group d for token v; -1: not profiled
    request_groups: np.ndarray | None = None  # (R,) int16: the group of each profiled request


def cluster(trace: RoutingTrace, topology: Topology, settings: PaperSettings, seed: int) -> CoClustering:
    """Assign experts (L, E) to ranks, requests to groups if there are several, token types to ranks of each group."""
    f = trace.fingerprint
    D, S = topology.dp_size, topology.attn_tp_size
    check_divides("ep_size", topology.ep_size, f.num_experts, f"{f.num_experts} experts")
    rng = np.random.default_rng(seed)
    gate_groups = np.arange(f.num_experts) // (f.num_experts // f.num_groups)
    blocks = np.zeros((f.num_layers, f.num_experts), np.int64)
    request_groups = None
    if D > 1:
        if trace.num_requests < D:
            raise ValueError(f"{trace.num_requests} requests cannot be clustered into {D} groups")
        activations = np.stack([m.toarray() for m in request_counts(trace)], axis=1).astype(np.float32) / f.top_k
        quota = np.ones(trace.num_requests)
        blocks, labels = _cluster_gated(activations, quota, D, gate_groups, settings, rng)
        request_groups = labels.astype(np.int16)
    if S == 1:
        return CoClustering(placement=Placement.from_labels(blocks, D), request_groups=request_groups)
    ranks, token_ranks = _cluster_tokens(trace, topology, blocks, request_groups, gate_groups, settings, rng)
    placement = Placement.from_labels(ranks, topology.ep_size)
    return CoClustering(placement=placement, token_ranks=token_ranks, request_groups=request_groups)


def _cluster_tokens(trace, topology, blocks, request_groups, gate_groups, settings, rng):
    """Assign, per layer and group, the group's experts (L, E) and token types (L, D, V) to its S ranks."""
    f = trace.fingerprint
    D, S = topology.dp_size, topology.attn_tp_size
    ranks = np.zeros_like(blocks)
    token_ranks = np.full((f.num_layers, D, f.vocab_size), -1, np.int16)
    group_of_token = np.zeros(trace.num_tokens) if request_groups is None else request_groups[trace.request_of_token()]
    for d in range(D):
        rows = group_of_token == d
        types, index = np.unique(trace.token_ids[rows], return_inverse=True)
        for l in range(f.num_layers):
            experts = np.flatnonzero(blocks[l] == d)
            counts = count(index, trace.expert_ids[rows, l], len(types), f.num_experts).toarray()[:, experts]
            activations = counts.astype(np.float32)[:, None] / f.top_k
            used = activations.sum((1, 2)) > 0
            frequency = activations.sum((1, 2))[used]
            labels, token_labels = _cluster_gated(activations[used], frequency, S, gate_groups[experts], settings, rng)
            ranks[l, experts] = d * S + labels[0]
            token_ranks[l, d, types[used]] = token_labels
    return ranks, token_ranks


def _cluster_gated(activations, quota, num_clusters, gate_groups, settings, rng):
    """Same as `cocluster`, under group-limited gating: experts stay in their gate group, and gate groups move whole.

    gate_groups: (E,) the gate group of each expert. Several groups fill one cluster, or one group fills several.
    """
    groups = len(np.unique(gate_groups))
    if groups == 1:
        return cocluster(activations, quota, num_clusters, settings, rng)
    N, L, E = activations.shape
    if groups % num_clusters != 0 and num_clusters % groups != 0:
        fit = nearest(num_clusters, [n for n in range(1, num_clusters + groups) if groups % n == 0 or n % groups == 0])
        raise ValueError(f"{groups} gate groups and {num_clusters} ranks: one must divide the other (nearest: {fit})")
    outer = min(groups, num_clusters)
    whole = activations.reshape(N, L, groups, E // groups).sum(axis=3)
    group_labels, labels = cocluster(whole, quota, outer, settings, rng)
    expert_labels = np.repeat(group_labels, E // groups, axis=1)
    if outer == num_clusters:
        return expert_labels, labels
    return _split_blocks(activations, quota, expert_labels, labels, num_clusters // outer, settings, rng)


def _split_blocks(activations, quota, expert_labels, labels, parts, settings, rng):
    """Split the experts and data of every cluster of a co-clustering into `parts`, by a co-clustering inside it."""
    inner_experts, inner = np.zeros_like(expert_labels), np.zeros_like(labels)
    layers = np.arange(len(expert_labels))[:, None]
    for block in range(expert_labels.max() + 1):
        experts = np.nonzero(expert_labels == block)[1].reshape(len(expert_labels), -1)  # (L, E / blocks)
        rows = np.flatnonzero(labels == block)
        inside = activations[rows[:, None, None], layers, experts]
        inner_experts[layers, experts], inner[rows] = cocluster(inside, quota[rows], parts, settings, rng)
    return expert_labels * parts + inner_experts, labels * parts + inner


def cocluster(activations: np.ndarray, quota: np.ndarray, num_clusters: int, settings: PaperSettings, rng):
    """Algorithm 1: alternate `expert_place` and `request_schedule`, keep the best sampled iteration.

    activations: (N, L, E) float32, tokens of item n that activate expert e; each row of a layer sums to the item's
    tokens. quota: (N,) weight of each item in a cluster's equal share (1 for requests, frequency for token types).
    Returns expert labels (L, E), each E / C times per layer, and item labels (N,).
    """
    N, L, E = activations.shape
    flat = np.ascontiguousarray(activations.reshape(N, L * E))
    size = flat.sum(axis=1) / L
    together = coactivation(activations, size)
    labels = _initial_labels(flat, size, num_clusters, rng)
    best: tuple[float, np.ndarray, np.ndarray] | None = None
    for _ in range(settings.steps):
        sums = (one_hot(labels, num_clusters).T @ flat).reshape(-1, L, E)
        experts = expert_place(together, sums, settings, rng)
        pull = flat @ one_hot(experts.reshape(-1), num_clusters)  # (N, C): activations that would be local
        labels = _request_schedule(
            flat,
            pull / (L * np.maximum(size, 1e-9))[:, None],
            quota,
            np.argsort(-size, kind="stable"),
            settings.request_affinity,
            settings.request_expert,
        )
        score = objective(pull / L, labels, size, settings.theta)
        if best is None or score < best[0]:
            best = (score, experts, labels)
    assert best is not None
    return best[1], best[2]


def objective(pull: np.ndarray, labels: np.ndarray, size: np.ndarray, theta: float) -> float:
    """Section 3.3: theta * (token imbalance over clusters) + (1 - theta) * (remote activations), per token.

    pull: (N, C) local activations of an item in each cluster, in tokens (pairs / K); labels: (N,); size: (N,) tokens.
    """
    clusters, total = pull.shape[1], size.sum()
    load = np.bincount(labels, weights=size, minlength=clusters)
    imbalance = np.abs(load - total / clusters).sum()
    remote = total - pull[np.arange(len(labels)), labels].sum()
    return float(theta * imbalance + (1 - theta) * remote) / max(total, 1e-9)


def coactivation(activations: np.ndarray, size: np.ndarray) -> np.ndarray:
    """(L, E, E): expert-expert affinity, the sum over items of a_j C_p[j, e] C_p[j, e']; row e sums to e's load."""
    scaled = activations / np.sqrt(np.maximum(size, 1e-9))[:, None, None]
    return np.stack([scaled[:, l].T @ scaled[:, l] for l in range(activations.shape[1])]).astype(np.float64)


def _initial_labels(flat: np.ndarray, size: np.ndarray, num_clusters: int, rng) -> np.ndarray:
    """Line 44: cluster items by their expert shares (k-means, with centroids from the largest items)."""
    if len(flat) <= num_clusters:
        return np.arange(len(flat)) % num_clusters
    shares = flat / np.maximum(size, 1e-9)[:, None]
    largest = np.argsort(-size, kind="stable")[:KMEANS_ROWS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an empty cluster is filled by the alternation
        centroids, _ = kmeans2(shares[largest], num_clusters, minit="++", seed=rng)
    return vq(shares, centroids.astype(shares.dtype))[0]


def expert_place(together: np.ndarray, by_cluster: np.ndarray, settings: PaperSettings, rng) -> np.ndarray:
    """Lines 3 to 26: (L, E) labels from expert-expert affinity (L, E, E) and each cluster's activations (C, L, E)."""
    L, E = together.shape[:2]
    out = np.empty((L, E), np.int64)
    for l in range(L):
        swaps = rng.integers(E, size=(settings.swaps_per_expert * E, 2))
        out[l] = place_layer(
            together[l],
            np.ascontiguousarray(by_cluster[:, l].T, np.float64),
            swaps,
            settings.expert_affinity,
            settings.expert_data,
            settings.expert_load,
        )
    return out


@njit()
def _request_schedule(flat, pull, quota, order, alpha, beta):
    """Lines 28 to 42: assign items, in `order`, to the cluster of highest affinity that has room; return labels (N,).

    flat: (N, M) activations; pull: (N, C) share of the item's activations whose experts are in each cluster; quota:
    (N,) room that an item takes. alpha, beta: weights of the similarity to a cluster's items, and of pull.
    """
    items, clusters = pull.shape
    room = quota.sum() / clusters * (1 - 1e-9)
    labels = np.zeros(items, np.int64)
    filled = np.zeros(clusters)
    sums, squares = np.zeros((clusters, flat.shape[1])), np.zeros(clusters)
    for n in order:
        norm = 0.0
        for m in range(flat.shape[1]):
            norm += flat[n, m] * flat[n, m]
        best, along_best = -np.inf, 0.0
        chosen = int(np.argmin(filled))
        for c in range(clusters):
            if filled[c] >= room:
                continue
            along = 0.0
            if alpha != 0.0 or best == -np.inf:
                for m in range(flat.shape[1]):
                    if flat[n, m] != 0:
                        along += flat[n, m] * sums[c, m]
            cosine = along / np.sqrt(max(norm * squares[c], 1e-30))
            score = alpha * cosine + beta * pull[n, c]
            if score > best:
                best, along_best = score, along
                chosen = c
        labels[n] = chosen
        filled[chosen] += quota[n]
        if alpha != 0.0:
            squares[chosen] += 2 * along_best + norm
            for m in range(flat.shape[1]):
                sums[chosen, m] += flat[n, m]
    return labels
