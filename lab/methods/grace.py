"""GRACE-MoE's placement: experts that tokens choose together share a rank, and those of overloaded ranks get copies.

Source: Han et al. 2025, "GRACE-MoE: Grouping and Replication with Locality-Aware Routing for Efficient Distributed MoE
Inference" (arXiv 2509.25041), sections 4.1 and 4.2, algorithms 1 and 2. Per layer: spectral clustering of the
co-activation matrix, first over nodes, then over the ranks of each node; the experts that cause most of the load of the
heaviest rank get copies on the lightest ranks.

Differences from the paper (docs/method.md): engines hold equally many physical experts on every rank, so
groups are equal (a non-uniformity ratio of 0, also between nodes). Replication continues until the redundant slots
given by the user are full, while the paper makes one round of its own size. Its routing prefers an own copy, then one
on the node, then any, as `metrics.copy_choice` does; among equally near copies the paper draws by predicted load,
while `metrics.copy_choice` assigns source ranks round-robin.
"""

import numpy as np

from lab.methods.grouping import group_hierarchically
from semmoe.core import Placement, RoutingTrace
from semmoe.placement.methods import Method
from semmoe.placement.problem import Problem, Solution, placement_alone
from semmoe.topology import Topology, physical_experts
from semmoe.traces.affinity import pair_count

METHOD = Method(__name__, copies=True, reads=("seed",))


def solve(problem: Problem) -> Solution:
    """Place experts by which of them the profiled tokens choose together."""
    redundant, seed = problem.settings.redundant_experts, problem.settings.seed
    return placement_alone(place(problem.trace, problem.topology, redundant, seed), problem.topology)


def place(trace: RoutingTrace, topology: Topology, redundant_experts: int, seed: int) -> Placement:
    """Placement (L, E + R). Raises ValueError unless `ep_size` divides the experts and the redundant ones evenly."""
    f, G = trace.fingerprint, topology.ep_size
    if f.num_experts % G != 0:
        raise ValueError(f"ep_size {G} does not divide {f.num_experts} experts")
    physical = physical_experts(f.num_experts, redundant_experts, G)
    rng = np.random.default_rng(seed)
    layers = [
        _layer(trace.expert_ids[:, l], f.num_experts, topology, redundant_experts, rng) for l in range(f.num_layers)
    ]
    return Placement(
        physical_to_logical_map=np.array(layers, np.int32).reshape(f.num_layers, physical),
        num_experts=f.num_experts,
        ep_size=G,
    )


def _layer(expert_ids: np.ndarray, num_experts: int, topology: Topology, redundant: int, rng) -> np.ndarray:
    """(G, (E + R) / G) experts in the slots of each rank, from expert_ids (T, K)."""
    together = pair_count(expert_ids, expert_ids, num_experts).astype(np.float64)
    load = together.diagonal().copy()
    np.fill_diagonal(together, 0.0)
    labels = group_hierarchically(together, topology.num_nodes, topology.ep_size, rng)
    own = np.argsort(labels, kind="stable").reshape(topology.ep_size, -1)
    copies = replicate(load, own, redundant // topology.ep_size)
    return np.concatenate([own, copies], axis=1)


def replicate(load: np.ndarray, own: np.ndarray, spare: int) -> np.ndarray:
    """(G, spare): additional copies for ranks that hold the experts `own` (G, n), by expert load (E,).

    Section 4.2, round by round: the hot experts of the heaviest rank, whose load is `skew` times the mean, get copies
    on the min(floor(skew), G - 1) lightest ranks. The hot experts are the heaviest ones that together make up
    n / (n + 1) of its load for n copies. Copies share an expert's load evenly. If no hot expert of the heaviest rank
    fits anywhere, the next heaviest rank is tried.
    """
    ranks = len(own)
    hosts = np.zeros((ranks, len(load)), bool)
    hosts[np.arange(ranks)[:, None], own] = True
    copies: list[list[int]] = [[] for _ in range(ranks)]
    while any(len(held) < spare for held in copies):
        share = load / hosts.sum(axis=0)
        by_rank = hosts @ share
        pairs = _round(share, by_rank, own, hosts, [spare - len(held) for held in copies])
        for expert, rank in pairs or [_any_copy(share, by_rank, hosts, [len(held) < spare for held in copies])]:
            copies[rank].append(expert)
            hosts[rank, expert] = True
    return np.array(copies, np.int64).reshape(ranks, spare)


def _round(share, by_rank, own, hosts, room) -> list[tuple[int, int]]:
    """(expert, rank) copies of one round, for the heaviest rank whose hot experts fit; empty if none fit."""
    free = list(room)
    for heavy in np.argsort(-by_rank, kind="stable"):
        skew = by_rank[heavy] / max(by_rank.mean(), 1e-30)
        count = min(max(1, int(skew)), len(own) - 1)
        lightest = [int(r) for r in np.argsort(by_rank, kind="stable") if free[r] > 0 and r != heavy][:count]
        pairs = []
        for expert in hot_experts(share, own[heavy], count):
            for rank in lightest:
                if free[rank] > 0 and not hosts[rank, expert]:
                    pairs.append((int(expert), rank))
                    free[rank] -= 1
        if pairs:
            return pairs
    return []


def hot_experts(share: np.ndarray, held: np.ndarray, count: int) -> np.ndarray:
    """The fewest heaviest experts `held` by one rank that make up count / (count + 1) of its load.

    Worked example, loads 50, 30, 15, 5 and one copy: the first expert alone makes up half of 100.
    """
    order = held[np.argsort(-share[held], kind="stable")]
    running = np.cumsum(share[order])
    return order[: int(np.searchsorted(running, running[-1] * count / (count + 1) - 1e-9)) + 1]


def _any_copy(share, by_rank, hosts, has_room) -> tuple[int, int]:
    """The expert of highest load per copy that the lightest rank with room lacks; if it lacks none, another copy."""
    rank = int(np.where(has_room, by_rank, np.inf).argmin())
    value = np.where(hosts[rank], -1.0, share)
    return int(value.argmax()), rank
