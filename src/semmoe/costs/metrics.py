"""Local activation rate, remote ranks per token, rows per rank pair, load: pure functions of arrays.

Definitions, for a batch of B tokens whose token t sits on rank home(t) when the expert all-to-all runs:
    local activation rate (LAR)  share of the B * K (token, expert) pairs with a copy of the expert on home(t)
    remote ranks per token       distinct ranks other than home(t) that compute some of token t's pairs
    remote nodes per token       distinct nodes other than that of home(t) that do
    remote pairs per token       pairs that are not local, K * (1 - LAR)
    load                         (token, expert) pairs that each rank computes

The three counts of remote work are those that dispatchers send (`costs.rows`): a row per rank, per node or per pair.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numpy as np

from semmoe.numeric.jit import njit


@dataclass(frozen=True)
class Traffic:
    """What one layer sends and computes for one batch. Traffic can be added."""

    pairs: int  # (token, expert) pairs, B * K
    local_pairs: int
    tokens: int
    rows: np.ndarray  # (G, G) int64: tokens of rank i of which other rank j computes some pair
    load: np.ndarray  # (G,) int64
    node_rows: np.ndarray  # (G, N) int64: tokens of rank i of which other node m computes some pair
    pair_rows: np.ndarray  # (G, G) int64: pairs of tokens of rank i that other rank j computes

    @property
    def lar(self) -> float:
        return self.local_pairs / max(self.pairs, 1)

    @property
    def remote_ranks_per_token(self) -> float:
        return float(self.rows.sum()) / max(self.tokens, 1)

    @property
    def remote_nodes_per_token(self) -> float:
        return float(self.node_rows.sum()) / max(self.tokens, 1)

    def __add__(self, other: "Traffic") -> "Traffic":
        both = zip(vars(self).values(), vars(other).values(), strict=True)
        return Traffic(*(one + more for one, more in both))


def no_traffic(num_ranks: int) -> Traffic:
    return layer_traffic(np.zeros((0, 1), np.int64), np.zeros(0, np.int64), num_ranks)


def sum_traffic(parts: Sequence[Traffic]) -> Traffic:
    """The sum of one or more."""
    return sum(parts[1:], parts[0])


def layer_traffic(targets: np.ndarray, home: np.ndarray, num_ranks: int, num_nodes: int = 1) -> Traffic:
    """Traffic of one layer: targets (B, K), the ranks that compute the pairs, home (B,) of the tokens.

    Nodes have equally many ranks, and consecutive ones.
    """
    rows, node_rows, pair_rows, load = _count_traffic(targets, home, num_ranks, num_nodes)
    local = targets.size - int(pair_rows.sum())
    return Traffic(targets.size, local, len(home), rows, load, node_rows, pair_rows)


@njit()
def _count_traffic(targets, home, ranks, nodes):
    rows, pair_rows = np.zeros((ranks, ranks), np.int64), np.zeros((ranks, ranks), np.int64)
    node_rows, load = np.zeros((ranks, nodes), np.int64), np.zeros(ranks, np.int64)
    last_sent, last_node, per_node = np.full(ranks, -1, np.int64), np.full(nodes, -1, np.int64), ranks // nodes
    for t in range(targets.shape[0]):
        source = home[t]
        last_sent[source] = last_node[source // per_node] = t
        for k in range(targets.shape[1]):
            target = targets[t, k]
            load[target] += 1
            pair_rows[source, target] += target != source
            if last_sent[target] != t:
                last_sent[target] = t
                rows[source, target] += 1
            node = target // per_node
            if last_node[node] != t:
                last_node[node] = t
                node_rows[source, node] += 1
    return rows, node_rows, pair_rows, load


@njit()
def majority_rank(expert_ids, rank_of_expert, num_ranks):
    """The "device" of each token: the rank that hosts most of its experts; the highest routing weight breaks ties.

    expert_ids (T, K) by descending weight; rank_of_expert (E,) int, -1 for experts that do not count. Returns (T,)
    int16, -1 for tokens without an expert that counts.
    Worked example: experts 5, 2, 7, 3 on ranks 1, 0, 0, 1: two on each rank, and expert 5 weighs most, so rank 1.
    """
    out = np.full(expert_ids.shape[0], -1, np.int16)
    votes = np.zeros(num_ranks, np.int64)
    for t in range(expert_ids.shape[0]):
        votes[:] = 0
        for k in range(expert_ids.shape[1]):
            rank = rank_of_expert[expert_ids[t, k]]
            if rank >= 0:
                votes[rank] += 1
        best = 0
        for k in range(expert_ids.shape[1]):
            rank = rank_of_expert[expert_ids[t, k]]
            if rank >= 0 and votes[rank] > best:
                best = votes[rank]
                out[t] = rank
    return out


def max_over_mean(load: np.ndarray) -> float:
    """Load imbalance as engines define it (the inverse of their `balancedness`); 1.0 without load."""
    return float(load.max() / load.mean()) if load.sum() else 1.0


def max_over_median(load: np.ndarray) -> float:
    """Load imbalance as the paper defines it; a median of zero counts as one pair."""
    return float(load.max() / max(np.median(load), 1.0)) if load.sum() else 1.0


def uniform_remote_ranks(ep_size: int, num_experts: int, top_k: int) -> float:
    """Expected remote ranks per token if experts were drawn uniformly, with one copy of each."""
    per_rank = num_experts // ep_size
    return (ep_size - 1) * (1 - comb(num_experts - per_rank, top_k) / comb(num_experts, top_k))
