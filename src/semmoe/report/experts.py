"""What experts are used for and which tokens belong to which rank: pure functions of a trace and a placement."""

from dataclasses import dataclass

import numpy as np

from semmoe.affinity import confidence, count
from semmoe.core import Placement, RoutingTrace

EVEN = 1.2  # times its average from which a kind of text counts as what an expert is for


@dataclass(frozen=True)
class Uses:
    """kind (L, E): index of the kind of text that uses an expert most, -1: none much; lift (L, E): over its average."""

    kind: np.ndarray
    lift: np.ndarray


def uses(expert_ids: np.ndarray, kind_of_token: np.ndarray, num_kinds: int, num_experts: int) -> Uses:
    """From routing (T, L, K) and the kind (T,) of each token's text, -1 for tokens that do not count.

    Each kind's activations are counted per token of it, so that a kind with much text weighs no more; an expert's
    average is that over kinds. Worked example, 2 kinds of 4 tokens each, an expert used 3 times by the first and once
    by the second: rates 3/4 and 1/4, average 1/2: the first kind, at 1.5 times its average.
    """
    rates = np.zeros((num_kinds, expert_ids.shape[1], num_experts))
    for kind in range(num_kinds):
        rows = expert_ids[kind_of_token == kind]
        for l in range(expert_ids.shape[1]):
            rates[kind, l] = np.bincount(rows[:, l].ravel(), minlength=num_experts) / max(len(rows), 1)
    average = rates.mean(axis=0)
    lift = rates.max(axis=0) / np.maximum(average, 1e-12)
    return Uses(np.where(lift >= EVEN, rates.argmax(axis=0), -1), np.where(average > 0, lift, 0.0))


def load_over_mean(expert_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """(L, E): activations of each expert over the mean of its layer, from routing (T, L, K)."""
    layers = range(expert_ids.shape[1])
    load = np.stack([np.bincount(expert_ids[:, l].ravel(), minlength=num_experts) for l in layers])
    return load / load.mean(axis=1, keepdims=True)


@dataclass(frozen=True)
class TokenMap:
    """One layer's affinity, tokens and experts ordered by rank."""

    tokens: np.ndarray  # (U,) token ids
    occurrences: np.ndarray  # (U,)
    ranks: np.ndarray  # (U,) where most of a token's choices are hosted
    at_home: np.ndarray  # (U,) share of its choices that this rank hosts
    experts: np.ndarray  # (E,) in the order of ranks
    rank_of_expert: np.ndarray  # (E,) in that order
    shares: np.ndarray  # (U, E) share of a token's choices, in these orders


def token_map(trace: RoutingTrace, placement: Placement, layer: int, most: int) -> TokenMap:
    """The `most` frequent tokens of a trace against the experts of one layer; copies of an expert count on each rank,
    and it stands at its first."""
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
