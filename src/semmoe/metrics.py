"""Local activation rate, remote ranks per token, rows per rank pair, load: pure functions of arrays.

Definitions, for a batch of B tokens whose token t sits on rank home(t) when the expert all-to-all runs:
    local activation rate (LAR)  share of the B * K (token, expert) pairs with a copy of the expert on home(t)
    remote ranks per token       distinct ranks other than home(t) that token t is sent to: one row is sent to each
    load                         (token, expert) pairs that each rank computes
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb

import numba
import numpy as np


@dataclass(frozen=True)
class Traffic:
    """What one layer sends and computes for one batch. Traffic can be added."""

    pairs: int  # (token, expert) pairs, B * K
    local_pairs: int
    tokens: int
    rows: np.ndarray  # (G, G) int64: rows that rank i sends to rank j in dispatch; combine sends as many back
    load: np.ndarray  # (G,) int64

    @property
    def lar(self) -> float:
        return self.local_pairs / max(self.pairs, 1)

    @property
    def remote_ranks_per_token(self) -> float:
        return float(self.rows.sum()) / max(self.tokens, 1)

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.pairs + other.pairs,
            self.local_pairs + other.local_pairs,
            self.tokens + other.tokens,
            self.rows + other.rows,
            self.load + other.load,
        )


def no_traffic(num_ranks: int) -> Traffic:
    return Traffic(0, 0, 0, np.zeros((num_ranks, num_ranks), np.int64), np.zeros(num_ranks, np.int64))


def sum_traffic(parts: Sequence[Traffic]) -> Traffic:
    """The sum of one or more."""
    return sum(parts[1:], parts[0])


def layer_traffic(targets: np.ndarray, home: np.ndarray, num_ranks: int) -> Traffic:
    """Traffic of one layer: targets (B, K), the ranks that compute the pairs, home (B,) of the tokens."""
    rows, load, local = _count_traffic(targets, home, num_ranks)
    return Traffic(targets.size, int(local), len(home), rows, load)


@numba.njit(cache=True)
def _count_traffic(targets, home, ranks):
    rows, load, local = np.zeros((ranks, ranks), np.int64), np.zeros(ranks, np.int64), 0
    last_sent = np.full(ranks, -1, np.int64)
    for t in range(targets.shape[0]):
        source = home[t]
        for k in range(targets.shape[1]):
            target = targets[t, k]
            load[target] += 1
            if target == source:
                local += 1
            elif last_sent[target] != t:
                last_sent[target] = t
                rows[source, target] += 1
    return rows, load, local


@numba.njit(cache=True)
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
