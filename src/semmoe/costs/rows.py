"""What an all-to-all charges a token, by its kind: the costs that the search for a placement weighs.

A dispatcher sends a token's row
    per-rank   once to every other rank that computes some of its experts (DeepEP inside a node, V2 direct)
    per-node   once to every other node, to the rank with the sender's place there, which forwards it inside the node
               (DeepEP normal and hybrid)
    per-pair   once for every (token, expert) pair of another rank (DeepEP V1 low latency)
and combine sends as many rows back. `RowCosts` writes each of them as a sum over the ranks, nodes and pairs that a
token reaches, so that one search serves all.

Worked example, 2 nodes of 2 ranks, links between nodes 5 times slower than inside, no gain from local pairs: a token on
rank 0 has pairs on ranks 1, 2 and 3. Per rank it costs 1 + 5 + 5; per node 1 + 5 for the row to rank 2, which has rank
0's place on the other node, + 1 for the row from there to rank 3; per pair 1 + 5 + 5, and 5 more if rank 3 has two.
"""

from dataclasses import dataclass

import numpy as np

from semmoe.core import DECODE
from semmoe.settings import LOCAL_PAIR
from semmoe.topology import Topology

KINDS = ("per-rank", "per-node", "per-pair")


@dataclass(frozen=True)
class RowCosts:
    """The cost of a token on rank h, in (token, expert) pairs that are computed on their own rank."""

    rank: np.ndarray  # (G, G) for every rank that computes some of its experts; zero on the diagonal
    node: np.ndarray  # (G, N) for every node that does; zero for h's own
    pair: np.ndarray  # (G, G) for every pair that a rank computes; zero on the diagonal


def plain_costs(topology: Topology, activation: float, per_rank: float, per_node: float) -> RowCosts:
    """Costs where no links are given: `per_rank` for each row, and `per_node` more for the first row to a node."""
    remote = 1.0 - np.eye(topology.ep_size)
    return RowCosts(per_rank * remote, per_node * _other_nodes(topology), activation * remote)


def kind_costs(
    kind: str, topology: Topology, relative: np.ndarray, activation: float = LOCAL_PAIR, per_row: float = 1.0
) -> RowCosts:
    """Costs of an all-to-all of one of KINDS.

    relative: (G, G) time of a row from rank i to rank j in units of a row on the fastest link. activation: gain from a
    pair on the token's own rank; per_row: cost of a row on the fastest link.
    """
    remote, same = 1.0 - np.eye(topology.ep_size), topology.node_of[:, None] == topology.node_of
    row, none = per_row * relative * remote, np.zeros((topology.ep_size, topology.num_nodes))
    if kind == "per-rank":
        return RowCosts(row, none, activation * remote)
    if kind == "per-pair":
        return RowCosts(np.zeros_like(row), none, activation * remote + row)
    if kind != "per-node":
        raise ValueError(f"the kind of an all-to-all must be {' or '.join(KINDS)}, not {kind!r}")
    landing = landing_ranks(topology)
    forwarded = row[landing[:, topology.node_of], np.arange(topology.ep_size)]  # from the landing rank on
    to_node = np.take_along_axis(row, landing, axis=1) * _other_nodes(topology)
    return RowCosts(np.where(same, row, forwarded), to_node, activation * remote)


def hops(kind: str, topology: Topology, rows: np.ndarray, node_rows: np.ndarray, pair_rows: np.ndarray) -> np.ndarray:
    """(G, G) rows that an all-to-all of one of KINDS sends from rank i to rank j; counts as in `metrics.Traffic`."""
    if kind == "per-rank":
        return rows
    if kind == "per-pair":
        return pair_rows
    G, node, landing = topology.ep_size, topology.node_of, landing_ranks(topology)
    same = node[:, None] == node
    out = np.where(same, rows, 0)
    first, every = landing[:, node], np.arange(G)  # (G, G): where a row from i to the node of j arrives
    forwarded = np.where(same | (first == every), 0, rows)
    np.add.at(out, (first, np.broadcast_to(every, (G, G))), forwarded)
    np.add.at(out, (every[:, None], landing), node_rows * (node[:, None] != np.arange(topology.num_nodes)))
    return out


def landing_ranks(topology: Topology) -> np.ndarray:
    """(G, N) int64: the rank of each node that receives a rank's rows per node: the one with the same place there."""
    per_node = topology.ep_size // topology.num_nodes
    return np.arange(topology.ep_size)[:, None] % per_node + np.arange(topology.num_nodes) * per_node


def _other_nodes(topology: Topology) -> np.ndarray:
    """(G, N): 1 for the nodes that a rank is not on."""
    return 1.0 - (topology.node_of[:, None] == np.arange(topology.num_nodes))


def mean_costs(costs: tuple[RowCosts, RowCosts], phase: np.ndarray) -> RowCosts:
    """The costs of prefill and decode tokens, by their share among tokens of the phases (T,)."""
    decode = float(np.mean(phase == DECODE)) if len(phase) else 0.0
    if costs[0] is costs[1]:
        return costs[0]
    names = "rank", "node", "pair"
    return RowCosts(*((1 - decode) * getattr(costs[0], n) + decode * getattr(costs[1], n) for n in names))


def near_and_far(costs: tuple[RowCosts, ...], topology: Topology) -> tuple[float, float]:
    """What a pair costs on another rank of the own node and on another node, on average; equal if ranks are nodes."""
    same, other = topology.node_of[:, None] == topology.node_of, _other_nodes(topology) > 0
    inside, away = same & ~np.eye(len(same), dtype=bool), ~same
    near, far = ([one.rank[on] + one.pair[on] for one in costs] for on in (inside, away))
    if not (inside.any() and away.any()):
        one = float(np.mean(near if inside.any() else far)) if len(same) > 1 else 0.0
        return one, one
    return float(np.mean(near)), float(np.mean(far) + np.mean([one.node[other] for one in costs]))


def pair_cost(costs: tuple[RowCosts, ...], topology: Topology) -> float:
    """The cost of a remote pair alone, which prices of load follow; else expensive rows would outweigh any load."""
    return max(near_and_far(costs, topology)) or 1.0  # one rank has no remote pairs
