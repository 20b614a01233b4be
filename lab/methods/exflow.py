"""ExFlow's placement: experts that consecutive layers often choose together share a rank.

Source: Yao et al. 2024, "Exploiting Inter-Layer Expert Affinity for Accelerating Mixture-of-Experts Model Inference"
(arXiv 2401.08383), the integer program of its expert placement: every GPU has equally many experts of every layer, and
the fewest tokens change GPU between consecutive layers. Given its neighbouring layers, one layer is a linear assignment
of experts to slots, which is solved exactly; sweeps over the layers, back and forth, end when no single layer can
improve. The best of several starts, which differ in the first layer, is kept. This is a heuristic, since no solver
finishes the integer program.

In the paper a token stays where its last expert was, so that every kept pair saves a transfer. Engines return a token
to the rank of its attention after each layer, so that only the placement is taken from ExFlow.
"""

import numpy as np

from lab.methods.grouping import group_hierarchically, link_costs, paths_of
from semmoe.core import Placement
from semmoe.numeric.assignment import equal_groups
from semmoe.placement.methods import Method
from semmoe.placement.problem import Problem, Solution, placement_alone
from semmoe.topology import Topology

METHOD = Method(__name__, reads=("seed",))
SWEEPS = 20  # most sweeps over all layers; they end earlier when nothing improves
STARTS = 4  # placements of the first layer: grouped by successors, in order, and at random


def solve(problem: Problem) -> Solution:
    """Place experts by the paths of tokens in the profile."""
    counts, experts = paths_of(problem.trace), problem.trace.fingerprint.num_experts
    return placement_alone(place(counts, experts, problem.topology, problem.settings.seed), problem.topology)


def place(path_counts: np.ndarray, num_experts: int, topology: Topology, seed: int) -> Placement:
    """Placement (L, E) from path_counts (L - 1, E, E): the number of tokens that chose e at a layer and e' at the next.

    Raises ValueError where `ep_size` does not divide the experts.
    """
    G = topology.ep_size
    if num_experts % G != 0:
        raise ValueError(f"ep_size {G} does not divide {num_experts} experts")
    cost, counts = link_costs(topology), path_counts.astype(np.float64)
    best, least = None, np.inf
    for first in _starts(counts, num_experts, topology, seed):
        labels = improve(counts, first, cost)
        total = transfer_cost(counts, labels, cost)
        if total < least - 1e-9:
            best, least = labels, total
    assert best is not None
    return Placement.from_labels(best, G)


def _starts(counts: np.ndarray, num_experts: int, topology: Topology, seed: int) -> list[np.ndarray]:
    """Ranks (E,) of the first layer's experts: grouped by similar successors, in order, and at random."""
    rng, G = np.random.default_rng(seed), topology.ep_size
    even = np.arange(num_experts) // (num_experts // G)
    alike = counts[0] @ counts[0].T if len(counts) else np.ones((num_experts, num_experts))
    np.fill_diagonal(alike, 0.0)
    grouped = group_hierarchically(alike, topology.num_nodes, G, rng)
    return [grouped, even, *(rng.permutation(even) for _ in range(STARTS - 2))]


def improve(counts: np.ndarray, first: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """(L, E) ranks from those of the first layer (E,): one forward pass, then sweeps until no single layer improves."""
    labels = np.tile(first, (len(counts) + 1, 1))
    for layer in range(1, len(labels)):
        labels[layer] = best_layer(cost[labels[layer - 1]].T @ counts[layer - 1], labels[layer])
    total = transfer_cost(counts, labels, cost)
    for sweep in range(SWEEPS):
        order = range(len(labels)) if sweep % 2 else range(len(labels) - 1, -1, -1)
        for layer in order:
            labels[layer] = best_layer(_layer_cost(counts, labels, cost, layer), labels[layer])
        before, total = total, transfer_cost(counts, labels, cost)
        if total >= before * (1 - 1e-9):
            break
    return labels


def transfer_cost(counts: np.ndarray, labels: np.ndarray, cost: np.ndarray) -> float:
    """The objective of the program: total cost of transfers between consecutive layers. counts (L - 1, E, E)."""
    pairs = zip(counts, labels[:-1], labels[1:], strict=True)
    return float(sum((c * cost[before[:, None], after]).sum() for c, before, after in pairs))


def best_layer(cost: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """(E,) ranks of least total cost, with equally many experts each; cost (G, E). Ties keep the given `labels`."""
    found = equal_groups(-cost.T)
    every = np.arange(cost.shape[1])
    return found if cost[found, every].sum() < cost[labels, every].sum() - 1e-9 else labels


def _layer_cost(counts: np.ndarray, labels: np.ndarray, cost: np.ndarray, layer: int) -> np.ndarray:
    """(G, E): cost of each expert of one layer on each rank, given its neighbouring layers."""
    out = np.zeros((len(cost), labels.shape[1]))
    if layer > 0:
        out += cost[labels[layer - 1]].T @ counts[layer - 1]
    if layer + 1 < len(labels):
        out += cost[:, labels[layer + 1]] @ counts[layer].T
    return out
