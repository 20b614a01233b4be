"""MoETuner's placement: balance the load of every layer, then align layers so that the busiest link carries least.

Source: Go & Mahajan 2025, "MoETuner: Optimized Mixture of Expert Serving with Balanced Expert Placement and Token
Routing" (arXiv 2502.06643), its two integer programs:

    clusters  every layer's experts into G clusters, equally many each: least sum of |load of a cluster - mean|
    ranks     every layer's clusters to GPUs, one each: least sum over consecutive layers of the largest traffic
              between two GPUs, in time, i.e. over the bandwidth between them

The first is solved by HiGHS, layer by layer, under a time limit that all layers share; if the limit is reached, the
plan depends on the machine. The result is never worse than greedy packing, which a layer keeps when no time is left.
The second needs no integer program: given the previous layer, the traffic that a cluster adds on a rank is known, so
that a layer is a bottleneck assignment, which is solved exactly (ties: least total traffic). On one node all links are
equal and only the order of a layer relative to the previous one matters, so that going forward finds the optimum of
all layers together. On several nodes it may not, and the gap is unknown.
"""

import time
from dataclasses import dataclass

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linear_sum_assignment, milp
from scipy.sparse import bmat, eye, kron

from lab.methods.grouping import link_costs, paths_of
from semmoe.core import Placement
from semmoe.numeric.assignment import balanced_packing
from semmoe.placement.methods import Method
from semmoe.placement.problem import Problem, Solution, placement_alone
from semmoe.topology import Topology
from semmoe.traces.affinity import expert_load

METHOD = Method(__name__)
TIME_LIMIT = 10.0  # seconds for the programs of all layers together
TOLERANCE = 1e-3  # mean deviation, in mean loads, below which no better clustering is searched for
SHORTEST = 0.05  # seconds; in less time per layer HiGHS would only build its model


@dataclass(frozen=True, kw_only=True)
class Tuned:
    placement: Placement
    gap: dict[str, float | None]  # by program: largest possible gap to the optimum; None: unknown


def solve(problem: Problem) -> Solution:
    """Place experts by the load and the paths of the profile, within TIME_LIMIT."""
    tuned = place(expert_load(problem.trace), paths_of(problem.trace), problem.topology, TIME_LIMIT)
    return placement_alone(tuned.placement, problem.topology, tuned.gap)


def place(load: np.ndarray, path_counts: np.ndarray, topology: Topology, time_limit: float) -> Tuned:
    """Place by load (L, E) and path_counts (L - 1, E, E), the number of tokens that chose e at a layer and e' at the
    next.

    time_limit: seconds for the first program, all layers together. gap["clusters"] is the mean over layers of the
    relative gap of 1 + mean deviation, which is about the mean deviation, in mean loads of a rank, that could still be
    gained. Raises ValueError if `ep_size` does not divide the experts.
    """
    G, (L, E) = topology.ep_size, load.shape
    if E % G != 0:
        raise ValueError(f"ep_size {G} does not divide {E} experts")
    ends, clusters, gaps = time.monotonic() + time_limit, [], []
    for layer in range(L):
        seconds = (ends - time.monotonic()) / (L - layer)  # later layers share the time that a layer leaves
        labels, layer_gap = cluster_layer(load[layer], G, seconds)
        clusters.append(labels)
        gaps.append(layer_gap)
    ranks = line_up(path_counts, np.array(clusters), link_costs(topology))
    gap: dict[str, float | None] = {"clusters": float(np.mean(gaps)), "ranks": 0.0 if topology.num_nodes == 1 else None}
    return Tuned(placement=Placement.from_labels(ranks, G), gap=gap)


def cluster_layer(
    load: np.ndarray, num_clusters: int, seconds: float, tolerance: float = TOLERANCE
) -> tuple[np.ndarray, float]:
    """Clusters (E,) of one layer's experts by load (E,), and the relative gap of 1 + their mean deviation.

    The lower bound is 0 deviation unless HiGHS proves a better one.
    """
    scaled = load / max(load.mean() * len(load) / num_clusters, 1e-30)  # a cluster's mean load is 1
    greedy = balanced_packing(scaled[None], num_clusters)[0][0]
    best, bound = greedy, 0.0
    if deviation(scaled, greedy, num_clusters) > tolerance and seconds > SHORTEST:
        found, bound = _solve(scaled, num_clusters, seconds, tolerance)
        if found is not None and deviation(scaled, found, num_clusters) < deviation(scaled, greedy, num_clusters):
            best = found
    objective = 1 + deviation(scaled, best, num_clusters)
    return best, max(objective - 1 - bound, 0.0) / objective


def deviation(load: np.ndarray, labels: np.ndarray, num_clusters: int) -> float:
    """Mean over clusters of |load - mean load|, in mean loads."""
    sums = np.bincount(labels, load, num_clusters)
    return float(np.abs(sums - sums.mean()).mean() / max(sums.mean(), 1e-30))


def _solve(load: np.ndarray, num_clusters: int, seconds: float, tolerance: float) -> tuple[np.ndarray | None, float]:
    """HiGHS on one layer: clusters (E,), None if it found none in time, and a lower bound of the mean deviation.

    Variables: x[e, c], then the deviation u[c] of each cluster, then a constant 1 with cost 1, which makes HiGHS's
    relative tolerance one in mean loads: without it the gap of a layer that can be nearly even never closes.
    """
    E, C = len(load), num_clusters
    once, full = kron(eye(E), np.ones((1, C))), kron(np.ones((1, E)), eye(C))
    sums, identity = kron(load[None], eye(C)), eye(C)
    one = np.zeros((C, 1))  # the constant is in no constraint
    matrix = bmat(
        [[once, None, None], [full, None, None], [sums, -identity, None], [sums, identity, one]], format="csr"
    )
    inf = np.full(C, np.inf)
    low = np.concatenate([np.ones(E), np.full(C, E // C), -inf, np.ones(C)])
    high = np.concatenate([np.ones(E), np.full(C, E // C), np.ones(C), inf])
    lower, upper = np.zeros(E * C + C + 1), np.concatenate([_allowed(load, C), inf, [1]])
    lower[-1] = 1
    result = milp(
        np.concatenate([np.zeros(E * C), np.full(C, 1 / C), [1]]),
        bounds=Bounds(lower, upper),
        constraints=LinearConstraint(matrix, low, high),
        integrality=np.concatenate([np.ones(E * C), np.zeros(C + 1)]),
        options={"time_limit": seconds, "mip_rel_gap": tolerance},
    )
    bound = 0.0 if result.mip_dual_bound is None else max(float(result.mip_dual_bound) - 1, 0.0)
    if result.x is None:
        return None, bound if np.isfinite(bound) else 0.0
    return result.x[: E * C].reshape(E, C).argmax(axis=1), bound


def _allowed(load: np.ndarray, num_clusters: int) -> np.ndarray:
    """(E * C,) 1 or 0: clusters are alike, so the i-th heaviest expert need only be tried in the first i."""
    out = np.ones((len(load), num_clusters))
    heaviest = np.argsort(-load, kind="stable")[:num_clusters]
    out[heaviest] = np.tri(len(heaviest), num_clusters)
    return out.ravel()


def line_up(path_counts: np.ndarray, clusters: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """(L, E) ranks from clusters (L, E): align every layer with the previous one; cost (G, G) of links."""
    G = len(cost)
    ranks = clusters.copy()
    for layer in range(1, len(clusters)):
        before, now = np.eye(G)[ranks[layer - 1]], np.eye(G)[clusters[layer]]
        traffic = before.T @ path_counts[layer - 1] @ now  # (G, C): tokens from a rank to a cluster
        by_link = cost[:, None] * traffic[:, :, None]  # (G, C, G) from, cluster, to
        ranks[layer] = bottleneck_assignment(by_link.max(axis=0), by_link.sum(axis=0))[clusters[layer]]
    return ranks


def bottleneck_assignment(cost: np.ndarray, tie: np.ndarray) -> np.ndarray:
    """(C,) distinct columns, one per row, with the least largest entry of cost (C, C); ties: least sum of `tie` (C, C).

    Worked example, cost [[1, 5], [2, 9]]: straight on costs at most 9, crosswise 5, so row 0 takes column 1.
    """
    values = np.unique(cost)
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        dear = cost > values[middle]
        if dear[linear_sum_assignment(dear)].any():
            low = middle + 1
        else:
            high = middle
    forbidden = tie.sum() + 1.0
    return linear_sum_assignment(tie + forbidden * (cost > values[low]))[1]
