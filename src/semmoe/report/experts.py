"""What experts are used for, and which tokens belong to which rank: pure functions of a trace and a placement."""

from dataclasses import dataclass

import numpy as np

from semmoe.affinity import confidence, count
from semmoe.core import Placement, RoutingTrace

EVEN = 1.2  # an expert belongs to a kind of text that uses it at least this many times as much as the average kind


@dataclass(frozen=True)
class Uses:
    """How kinds of text use experts."""

    kind: np.ndarray  # (L, E) the kind that uses an expert most; -1 if its lift is below EVEN
    lift: np.ndarray  # (L, E) that kind's rate over the average of kinds


def uses(expert_ids: np.ndarray, kind_of_token: np.ndarray, num_kinds: int, num_experts: int) -> Uses:
    """How kinds of text use experts, from routing (T, L, K) and the kind (T,) of each token's text; -1 does not count.

    A kind's rate is its activations per token, so that a kind with much text weighs no more than the others. Worked
    example: two kinds of 4 tokens each, the first uses an expert 3 times and the second once. The rates are 3/4 and
    1/4, their average 1/2, so the expert belongs to the first kind with a lift of 1.5.
    """
    rows = [expert_ids[kind_of_token == kind] for kind in range(num_kinds)]
    rates = np.stack([_activations(of_kind, num_experts) / max(len(of_kind), 1) for of_kind in rows])
    average = rates.mean(axis=0)
    lift = rates.max(axis=0) / np.maximum(average, 1e-12)
    return Uses(np.where(lift >= EVEN, rates.argmax(axis=0), -1), np.where(average > 0, lift, 0.0))


def load_over_mean(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """(L, E): activations of each expert over the mean of its layer, from routing (T, L, K)."""
    load = _activations(expert_ids, num_experts)
    return load / load.mean(axis=1, keepdims=True)


def _activations(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """(L, E): how often each expert is activated, from routing (T, L, K)."""
    layers = range(expert_ids.shape[1])
    return np.stack([np.bincount(expert_ids[:, l].ravel(), minlength=num_experts) for l in layers])


@dataclass(frozen=True)
class TokenMap:
    """Affinity of one layer, with U tokens and E experts in order of rank."""

    tokens: np.ndarray  # (U,) token ids
    occurrences: np.ndarray  # (U,)
    ranks: np.ndarray  # (U,) the rank that hosts most of a token's choices
    at_home: np.ndarray  # (U,) share of its choices that this rank hosts
    experts: np.ndarray  # (E,) expert ids in order of rank
    rank_of_expert: np.ndarray  # (E,) in the same order
    shares: np.ndarray  # (U, E) share of a token's choices that go to an expert


def token_map(trace: RoutingTrace, placement: Placement, layer: int, most: int) -> TokenMap:
    """The `most` frequent tokens of a trace against the experts of one layer.

    An expert with copies counts on every rank that holds one, and is listed at its first copy.
    """
    ids, occurrences = np.unique(trace.token_ids, return_counts=True)
    frequent = np.sort(np.argsort(-occurrences, kind="stable")[:most])
    ids, occurrences = ids[frequent], occurrences[frequent]
    f = trace.fingerprint
    counts = count(trace.token_ids, trace.expert_ids[:, layer], f.vocab_size, f.num_experts)
    shares = confidence(counts)[ids].toarray()
    hosted = shares @ placement.hosts[layer].T  # (U, G)
    ranks, at_home = hosted.argmax(axis=1), hosted.max(axis=1)
    order = np.lexsort((-at_home, ranks))
    slots = placement.physical_to_logical_map[layer]
    first = np.sort(np.unique(slots, return_index=True)[1])  # slot of each expert's first copy, in order of slots
    experts = slots[first]
    return TokenMap(
        ids[order],
        occurrences[order],
        ranks[order],
        at_home[order],
        experts,
        first // placement.experts_per_rank,
        shares[order][:, experts],
    )
