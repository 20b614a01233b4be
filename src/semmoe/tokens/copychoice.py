"""The copy choice: which copy of an expert computes a token's pair, if several ranks have one.

A rank uses its own copy, else one on its node, else any: the nearest ones. Among these a plan chooses by one of two
rules, pure functions of a token's experts and its rank:

    static  one copy per source rank and expert, the preferred one, as SGLang's static dispatch does
    cover   few ranks per token: ranks that it reaches anyway, for experts with one nearest copy, compute all that they
            hold copies of; then, until every expert has a rank, the rank with most of the experts that have none.
            Preferred copies decide ties, then the distance from the source rank, upwards and around. A plan may fix
            an expert's copy for a source rank, where other copies are on a rank with too much load
"""

from dataclasses import dataclass, replace

import numpy as np

from semmoe.core import Placement
from semmoe.numeric.jit import njit
from semmoe.topology import Topology


@dataclass(frozen=True)
class CopyChoice:
    """The copy choice of a layer."""

    preferred: np.ndarray  # (G, E) int16: the rank whose copy each source rank uses first
    copies: np.ndarray | None = None  # (E, X) int16: the ranks with copies, padded with -1; None: the rule is static
    node_of: np.ndarray | None = None  # (G,) the node of each rank, for the rule `cover`
    fixed: np.ndarray | None = None  # (G, E) bool: experts of which a source rank uses the preferred copy alone

    def ranks(self, expert_ids: np.ndarray, home: np.ndarray) -> np.ndarray:
        """(B, K) int16: the rank that computes each pair of tokens with experts (B, K) on ranks home (B,)."""
        if self.copies is None or self.node_of is None:
            return self.preferred[home[:, None], expert_ids]
        out = np.empty(expert_ids.shape, np.int16)
        for source in np.unique(home):
            rows = home == source
            preferred = self.preferred[source]
            only = None if self.fixed is None else np.where(self.fixed[source], preferred, -1)
            near = np.where(nearest_copies(self.copies, source, self.node_of, only), self.copies, np.int16(-1))
            copies = near, near.astype(np.int32), preferred  # here a copy's id is its rank
            out[rows] = cover(expert_ids[rows].astype(np.int64), copies, int(source), len(self.preferred))
        return out


def copy_choice(placement: Placement, topology: Topology) -> list[CopyChoice]:
    """The copy choice of every layer."""
    preferred = preferred_copies(placement, topology)
    if placement.copy_choice == "static":
        return [CopyChoice(table) for table in preferred]
    ranks = placement.ranks_with_copies.astype(np.int16)
    rules = [CopyChoice(*layer, topology.node_of) for layer in zip(preferred, ranks, strict=True)]
    if placement.fixed_copies is None:
        return rules
    return [replace(rule, fixed=fixed) for rule, fixed in zip(rules, placement.fixed_copies, strict=True)]


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


def nearest_copies(ranks: np.ndarray, source: int, node_of: np.ndarray, only: np.ndarray | None = None) -> np.ndarray:
    """(..., X) bool: of the ranks with copies (..., X), ascending and padded with -1, those nearest to the source.

    only (...): the one rank whose copy of an expert is used, -1 for any of the nearest.
    """
    real = ranks >= 0
    real[..., 1:] &= ranks[..., 1:] != ranks[..., :-1]
    own, same_node = real & (ranks == source), real & (node_of[ranks] == node_of[source])
    near = np.where(same_node.any(axis=-1, keepdims=True), same_node, real)
    near = np.where(own.any(axis=-1, keepdims=True), own, near)
    return near if only is None else np.where(only[..., None] >= 0, real & (ranks == only[..., None]), near)


@njit(nogil=True)
def cover(expert_ids, copies, source, num_ranks):
    """Choose physical ids (B, K) int64 for the experts (B, K) of a rank's tokens by the rule `cover`; -1 stays -1.

    copies: ranks (E, X) and physical ids (E, X) of the nearest ones, padded with -1; the preferred rank (E,).
    """
    B, K = expert_ids.shape
    ids = np.empty((B, K), np.int64)
    held, reached = np.empty((K, num_ranks), np.int64), np.empty(num_ranks, np.bool_)
    for t in range(B):
        cover_token(expert_ids[t], copies, source, held, reached, ids[t])
    return ids


@njit(nogil=True)
def cover_token(experts, copies, source, held, reached, ids):
    """Choose physical ids (K,) for a token's experts (K,): see `cover`.

    Room to work in: held (K, G), the physical id of each rank's copy of each expert, or -1; reached (G,) bool.
    """
    ranks, physical, preferred = copies
    K, num_ranks = held.shape
    ids[:] = -1
    held[:] = -1
    reached[:] = False
    # an expert with one nearest copy is computed there, so that the token reaches this rank anyway
    for i in range(K):
        e, number = experts[i], 0
        rank = -1
        for x in range(ranks.shape[1] if e >= 0 else 0):
            if ranks[e, x] >= 0:
                rank = ranks[e, x]
                held[i, rank] = physical[e, x]
                number += 1
        if number == 1:
            ids[i] = held[i, rank]
            reached[rank] = True
    # other experts on ranks that are reached: on the preferred one, else on the first from the source upwards
    votes = 0
    for i in range(K):
        for away in range(num_ranks if ids[i] < 0 else 0):
            r = (source + away) % num_ranks
            if reached[r] and held[i, r] >= 0 and (ids[i] < 0 or preferred[experts[i]] == r):
                ids[i] = held[i, r]
        votes += ids[i] < 0
    # then the rank with most experts that have none, until all have; of equals that with most preferred copies
    while votes > 0:
        votes, best = 0, 0
        for away in range(num_ranks):
            r, own = (source + away) % num_ranks, 0
            for i in range(K):
                if ids[i] < 0 and held[i, r] >= 0:
                    own += K + 1 + (preferred[experts[i]] == r)
            if own > votes:
                votes, best = own, r
        for i in range(K):
            if ids[i] < 0:
                ids[i] = held[i, best]
