"""Starts over several nodes: which node has a copy of each expert first, then which rank of the node.

Rows between nodes cost most, and which node an expert is on decides them. So nodes are planned as if they were ranks,
with N times fewer places and costs that only tell one's own node from others; `layers` searches on from there with all
ranks. Copies are decided here too: a copy on another node than an expert's own saves rows between nodes.
"""

import numpy as np

from semmoe.costs.rows import RowCosts, plain_costs
from semmoe.numeric.assignment import balanced_packing, replicate_experts
from semmoe.placement.greedy import place_layer
from semmoe.topology import Topology

EASY_SWAPS = 200  # random swaps per expert of a start from affinities alone
EVEN = 4.0  # weight of load where copies go to nodes by affinity


def node_topology(topology: Topology) -> Topology | None:
    """Nodes as ranks, with attention groups of whole nodes, or those within a node as one; None for a rank per node."""
    groups, nodes = topology.dp_size, topology.num_nodes
    if nodes in (1, topology.ep_size):
        return None
    fits = groups % nodes == 0 or nodes % groups == 0
    return Topology(ep_size=nodes, dp_size=min(groups, nodes) if fits else 1, num_nodes=nodes)


def node_costs(costs: tuple[RowCosts, ...], topology: Topology, nodes: Topology) -> RowCosts:
    """What a token is charged for another node and a pair there beyond what it would be inside its own, on average."""
    same = topology.node_of[:, None] == topology.node_of
    inside, away = same & ~np.eye(len(same), dtype=bool), topology.node_of[:, None] != np.arange(topology.num_nodes)
    row = np.mean([one.node[away].mean() + one.rank[~same].mean() - one.rank[inside].mean() for one in costs])
    pair = np.mean([one.pair[~same].mean() - one.pair[inside].mean() for one in costs])
    return plain_costs(nodes, max(float(pair), 0.0), max(float(row), 0.0), 0.0)


def pack_groups(together: np.ndarray, at_node: np.ndarray, num_groups: int, rng) -> np.ndarray:
    """Return a node for each expert (E,), one for all of a gate group, by affinity and the nodes of their tokens.

    together (E, E): affinity of experts; at_node (E, N): pairs of each expert by the node of their token.
    """
    E = len(together)
    by_group = together.reshape(num_groups, E // num_groups, num_groups, -1).sum(axis=(1, 3))
    at_node = at_node.reshape(num_groups, -1, at_node.shape[1]).sum(axis=1)
    return np.repeat(spread(by_group, at_node, rng), E // num_groups)


def count_blocks(num_experts: int, num_groups: int, nodes: int, places: int) -> int | None:
    """The fewest blocks of groups, as many nodes for each, whose nodes have room for the whole block.

    None if no node has room for more than its own share of groups, or all have for every expert and further copies.
    Worked example: 256 experts in 8 groups, 8 nodes of 64 places: 4 blocks of 2 groups, each on 2 nodes.
    """
    for blocks in range(2, nodes):
        if num_groups % blocks == 0 and nodes % blocks == 0 and num_experts // blocks <= places <= num_experts:
            return blocks
    return None


def copy_groups(
    block: np.ndarray, together: np.ndarray, at_rank: np.ndarray, nodes: int, places: int, rng
) -> tuple[np.ndarray, np.ndarray]:
    """Slots (G, places * N / G) and primaries (G, E) of ranks whose nodes hold whole blocks of gate groups.

    block (E,): the block of each expert's group. together (E, E): affinity of experts; at_rank (E, G): pairs of each
    expert by the rank of their token. As many neighbouring nodes hold each block, in the same places. A token finds
    several of its groups on one node, since a source rank uses one node of a block for all of its experts; nodes take
    turns at it. Places that are left take the experts that are used together with the block's most. rng: ranks are
    packed by affinity; None: by load alone.
    """
    E, G = at_rank.shape
    alike, size = nodes // (int(block.max()) + 1), G // nodes  # nodes of a block, ranks of a node
    slots, place = np.empty((nodes, size, places // size), np.int64), np.empty(E, np.int64)
    for b, pairs in enumerate(np.split(at_rank, nodes // alike, axis=1)):
        own = np.flatnonzero(block == b)
        held = fill(own, together, places)
        if rng is None:
            rank = balanced_packing(together[held].sum(axis=1)[None], size)[0][0]
        else:
            at_place = pairs[held].reshape(places, alike, size).sum(axis=1)
            rank = spread(together[np.ix_(held, held)], at_place, rng)
        slots[b * alike : (b + 1) * alike] = held[np.argsort(rank, kind="stable")].reshape(size, -1)
        place[own] = rank[: len(own)]
    turn = np.repeat(np.arange(nodes) % alike, size)[:, None]  # by source rank
    return slots.reshape(G, -1), (block * alike + turn) * size + place


def copy_hot(together: np.ndarray, at_rank: np.ndarray, nodes: int, places: int, rng, node: np.ndarray | None):
    """Return slots (G, places * N / G): copies for the experts with most load, put on nodes by affinity.

    together (E, E): affinity of experts; at_rank (E, G): pairs of each expert by the rank of their token; places: slots
    of a node; node (E,): the only node of each expert and its copies, or None. Ranks of a node are packed by load; a
    rank that would have an expert twice takes the expert that is used most with its own.
    """
    load, size, at_node = together.sum(axis=1), at_rank.shape[1] // nodes, at_rank.reshape(len(together), nodes, -1)
    if node is None:
        (experts,), (copies,) = replicate_experts(load[None], nodes * places)
        share = 1 / copies[experts]
        pairs = together[np.ix_(experts, experts)] * share[:, None] * share
        labels = spread(pairs, at_node.sum(axis=2)[experts] * share[:, None], rng, EVEN)
        held = [np.sort(experts[labels == n]) for n in range(nodes)]
    else:
        homes = [np.flatnonzero(node == n) for n in range(nodes)]
        held = [np.sort(own[replicate_experts(load[own][None], places)[0][0]]) for own in homes]
    share = load / np.bincount(np.concatenate(held))
    out = []
    for own in held:
        (rank,), _ = balanced_packing(share[own][None], size)
        out += [fill(np.unique(own[rank == r]), together, places // size) for r in range(size)]
    return np.stack(out)


def fill(own: np.ndarray, together: np.ndarray, places: int) -> np.ndarray:
    """(places,) a node's or a rank's own experts, and those used together with them most, by affinities (E, E)."""
    pull = together[own].sum(axis=0)
    pull[own] = -1
    return np.concatenate([own, np.argsort(-pull, kind="stable")[: places - len(own)]])


def divide_nodes(
    slots: np.ndarray, primary: np.ndarray, together: np.ndarray, at_rank: np.ndarray, rng
) -> tuple[np.ndarray, np.ndarray]:
    """Slots (G, P / G) and primaries (E,) from slots of nodes (N, P / N) and the nodes of primaries (E,).

    together (E, E): affinity of experts; at_rank (E, G): pairs of each expert by the rank of their token.
    """
    G, (N, size) = at_rank.shape[1], slots.shape
    out, first = np.empty((G, size * N // G), np.int64), np.empty(len(primary), np.int64)
    for m, experts in enumerate(slots):
        ranks = np.arange(m * (G // N), (m + 1) * (G // N))
        labels = spread(together[np.ix_(experts, experts)], at_rank[np.ix_(experts, ranks)], rng)
        out[ranks] = experts[np.argsort(labels, kind="stable")].reshape(len(ranks), -1)
        led = primary[experts] == m
        first[experts[led]] = ranks[labels[led]]
    return out, first


def spread(together: np.ndarray, data: np.ndarray, rng, even: float = 0.5) -> np.ndarray:
    """(n,) clusters of equal size, by affinities (n, n), pairs at each cluster (n, C), and load, `even` times."""
    swaps = rng.integers(len(together), size=(EASY_SWAPS * len(together), 2))
    alone = together - np.diag(np.diag(together))
    loads = alone + np.diag(alone.sum(axis=1))
    return place_layer(loads.astype(np.float64), data.astype(np.float64), swaps, 1.0, 1.0, even)
