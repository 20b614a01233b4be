"""The copy choice: which copy of an expert computes a token's pair, if several ranks have one.

A rank uses its own copy, else one on its node, else any: the nearest ones. Among these a plan chooses by one of two
rules, pure functions of a token's experts and its rank:

    static  one copy per source rank and expert, the preferred one, as SGLang's static dispatch does
    cover   few ranks per token: ranks that it reaches anyway, for experts with one nearest copy, compute all that they
            hold copies of; then, until every expert has a rank, the rank with most of the experts that have none.
            Preferred copies decide ties, then the distance from the source rank, upwards and around
"""

from dataclasses import dataclass

import numpy as np

from semmoe.core import Placement
from semmoe.numeric.jit import njit
from semmoe.topology import Topology


@dataclass(frozen=True)
class CopyChoice:
    """The copy choice of one layer."""

    preferred: np.ndarray  # (G, E) int16: the rank whose copy each source rank uses first
    copies: np.ndarray | None = None  # (E, X) int16: the ranks with copies, padded with -1; None: the rule is static
    node_of: np.ndarray | None = None  # (G,) the node of each rank, for the rule `cover`

    def ranks(self, expert_ids: np.ndarray, home: np.ndarray) -> np.ndarray:
        """(B, K) int16: the rank that computes each pair of tokens with experts (B, K) on ranks home (B,)."""
        if self.copies is None or self.node_of is None:
            return self.preferred[home[:, None], expert_ids]
        out = np.empty(expert_ids.shape, np.int16)
        for source in np.unique(home):
            rows = home == source
            near = np.where(nearest_copies(self.copies, source, self.node_of), self.copies, np.int16(-1))
            copies = near, near.astype(np.int32), self.preferred[source]  # here a copy's id is its rank
            out[rows] = cover(expert_ids[rows].astype(np.int64), copies, int(source), len(self.preferred))
        return out


def copy_choice(placement: Placement, topology: Topology) -> list[CopyChoice]:
    """The copy choice of every layer."""
    preferred = preferred_copies(placement, topology)
    if placement.copy_choice == "static":
        return [CopyChoice(table) for table in preferred]
    ranks = placement.ranks_with_copies.astype(np.int16)
    return [CopyChoice(*layer, topology.node_of) for layer in zip(preferred, ranks, strict=True)]


def preferred_copies(placement: Placement, topology: Topology) -> np.ndarray:
    """(L, G, E) int16: the rank whose copy of each expert each source rank uses first.

    This is the placement's own table, if it has one. Else source ranks that have several equally near copies use them
    round-robin, so that copies share the load. Worked example, copies on ranks 1 and 3 of 4: source 0 sends to 1,
    source 2 to 3, sources 1 and 3 to themselves.
    """
    if placement.static_dispatch is not None:
        return placement.static_dispatch
    ranks = placement.ranks_with_copies  # (L, E, X)
    node_size = topology.ep_size // topology.num_nodes
    nodes = np.where(ranks >= 0, ranks // node_size, -1)
    out = np.empty((len(ranks), topology.ep_size, placement.num_experts), np.int16)
    turns: dict[int, np.ndarray | int] = {}  # sources so far that had a choice, by node; key -1: on other nodes
    for g in range(topology.ep_size):
        node = g // node_size
        own, same_node = (ranks == g), (nodes == node)
        beyond = ~same_node.any(axis=2)  # (L, E): no copy on the own node
        near = np.where(beyond[..., None], ranks >= 0, same_node)
        near = np.where(own.any(axis=2, keepdims=True), own, near)
        turn = np.where(beyond, turns.get(-1, 0), turns.get(node, 0)) % near.sum(axis=2)
        chosen = np.argmax(near & (np.cumsum(near, axis=2) - 1 == turn[..., None]), axis=2)
        out[:, g] = np.take_along_axis(ranks, chosen[..., None], axis=2)[..., 0]
        choosing = ~own.any(axis=2)
        turns[-1] = turns.get(-1, 0) + (choosing & beyond)
        turns[node] = turns.get(node, 0) + (choosing & ~beyond)
    return out


def nearest_copies(ranks: np.ndarray, source: int, node_of: np.ndarray) -> np.ndarray:
    """(..., X) bool: of the ranks with copies (..., X), ascending and padded with -1, those nearest to the source."""
    real = ranks >= 0
    real[..., 1:] &= ranks[..., 1:] != ranks[..., :-1]
    own, same_node = real & (ranks == source), real & (node_of[ranks] == node_of[source])
    near = np.where(same_node.any(axis=-1, keepdims=True), same_node, real)
    return np.where(own.any(axis=-1, keepdims=True), own, near)


@njit(nogil=True)
def cover(expert_ids, copies, source, num_ranks):
    """Choose by the rule `cover` for tokens of one rank: (B, K) int64 physical ids for experts (B, K), -1 for -1.

    copies: ranks (E, X) and physical ids (E, X) of the nearest ones, padded with -1; the preferred rank (E,).
    """
    ranks, physical, preferred = copies
    (B, K), X = expert_ids.shape, ranks.shape[1]
    out, reached = np.empty((B, K), np.int16), np.full(num_ranks, -1, np.int64)
    near, number, first = np.empty((K, X), np.int16), np.empty(K, np.int64), np.empty(K, np.int16)
    ids = np.full((B, K), -1, np.int64)
    for t in range(B):
        for i in range(K):
            e, number[i] = expert_ids[t, i], 0
            for x in range(X):
                if e >= 0 and ranks[e, x] >= 0:
                    near[i, number[i]] = ranks[e, x]
                    number[i] += 1
            first[i] = preferred[e] if e >= 0 else -1
        _cover_token(near, number, first, source, num_ranks, reached, t, out)
        for i in range(K):
            for x in range(X):
                if number[i] > 0 and ranks[expert_ids[t, i], x] == out[t, i]:
                    ids[t, i] = physical[expert_ids[t, i], x]
    return ids


@njit(nogil=True)
def _cover_token(near, number, preferred, source, num_ranks, reached, t, out):
    """Fill out[t] with the ranks of a token's experts: number (K,) nearest copies in near (K, X), preferred (K,).

    reached (G,): t for ranks that the token reaches anyway.
    """
    K, left = number.shape[0], 0
    for i in range(K):
        out[t, i] = near[i, 0] if number[i] == 1 else -1
        if number[i] == 1:
            reached[near[i, 0]] = t
    for i in range(K):
        if number[i] > 1:
            out[t, i] = _first_reached(near, number, i, preferred[i], source, num_ranks, reached, t)
            left += out[t, i] < 0
    while left > 0:
        r = _next_rank(near, number, preferred, source, num_ranks, out, t)
        for i in range(K):
            if out[t, i] < 0 and _holds(near, number, i, r):
                out[t, i] = r
                left -= 1


@njit(nogil=True)
def _first_reached(near, number, i, preferred, source, num_ranks, reached, mark):
    """The copy of expert i on a rank that is reached: the preferred one, else the first above the source; else -1."""
    best, least = np.int16(-1), num_ranks
    for x in range(number[i]):
        r = near[i, x]
        away = -1 if r == preferred else (r - source) % num_ranks
        if reached[r] == mark and away < least:
            best, least = r, away
    return best


@njit(nogil=True)
def _next_rank(near, number, preferred, source, num_ranks, out, t):
    """The rank with most of the token's experts that have none; see the rule for ties."""
    best, most, K = np.int16(-1), -1, number.shape[0]
    for j in range(K):
        for x in range(number[j] if out[t, j] < 0 else 0):
            r, score = near[j, x], 0
            for i in range(K):
                if out[t, i] < 0 and _holds(near, number, i, r):
                    score += K + 1 + (preferred[i] == r)
            score = (score + 1) * num_ranks - (r - source) % num_ranks
            if score > most:
                best, most = r, score
    return best


@njit(nogil=True)
def _holds(near, number, i, rank):
    """Whether the rank has one of the nearest copies of expert i."""
    held = False
    for x in range(number[i]):
        held |= near[i, x] == rank
    return held
