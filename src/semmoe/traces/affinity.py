"""Affinity: how often tokens and requests activate experts, and experts each other; a token id's row of a table."""

import numpy as np
from scipy.sparse import csr_matrix

from semmoe.core import NEIGHBOUR, PRIOR, PROFILED, RoutingTrace


def request_counts(trace: RoutingTrace) -> list[csr_matrix]:
    """L matrices (R, E) int32: how often a request activates an expert."""
    f, requests = trace.fingerprint, trace.request_of_token()
    return [count(requests, trace.expert_ids[:, l], trace.num_requests, f.num_experts) for l in range(f.num_layers)]


def expert_load(trace: RoutingTrace) -> np.ndarray:
    """(L, E) int64: activations per expert."""
    layers = trace.expert_ids.swapaxes(0, 1)
    return np.stack([np.bincount(ids.ravel(), minlength=trace.fingerprint.num_experts) for ids in layers])


def count(keys: np.ndarray, expert_ids: np.ndarray, num_keys: int, num_experts: int) -> csr_matrix:
    """(num_keys, E) int32: how often each key (T,) occurs with each expert in `expert_ids` (T, K)."""
    rows = np.repeat(keys, expert_ids.shape[1])
    ones = np.ones(rows.size, np.int32)
    return csr_matrix((ones, (rows, expert_ids.ravel().astype(np.int32))), shape=(num_keys, num_experts))


def pair_count(before: np.ndarray, after: np.ndarray, num_experts: int, weight: np.ndarray | None = None) -> np.ndarray:
    """(E, E): tokens that chose e in `before` (T, K) and e' in `after` (T, K), which may be the same layer.

    int64, or float64 if tokens are weighted by `weight` (T,).
    """
    out = np.zeros(num_experts * num_experts, np.int64 if weight is None else np.float64)
    repeated = None if weight is None else np.repeat(weight, after.shape[1])
    for i in range(before.shape[1]):
        pairs = before[:, i, None].astype(np.int64) * num_experts + after
        out += np.bincount(pairs.ravel(), repeated, minlength=out.size)
    return out.reshape(num_experts, num_experts)


def nearest_profiled(embeddings: np.ndarray, profiled: np.ndarray, block: int = 4096) -> np.ndarray:
    """For each of V tokens the nearest profiled token by cosine similarity (itself if it was profiled).

    embeddings: (V, H) float; profiled: (V,) bool with at least one True. Returns (V,) int64.
    Source: paper, section 3.2, "nearest-neighbor matching in the embedding space".
    """
    unit = embeddings / np.maximum(np.linalg.norm(embeddings, axis=1, keepdims=True), 1e-12)
    known = np.flatnonzero(profiled)
    nearest = np.arange(len(embeddings))
    unknown = np.flatnonzero(~profiled)
    for start in range(0, len(unknown), block):
        rows = unknown[start : start + block]
        nearest[rows] = known[np.argmax(unit[rows] @ unit[known].T, axis=1)]
    return nearest


def resolve_tokens(
    profiled_ids: np.ndarray, vocabulary: int, embeddings: np.ndarray | None
) -> tuple[np.ndarray, np.ndarray]:
    """For each of the V + 1 rows of a table: the kind of its source, and the row to use (its own, or a neighbour's)."""
    seen = np.bincount(profiled_ids, minlength=vocabulary) > 0
    source = np.append(np.where(seen, PROFILED, PRIOR), PRIOR).astype(np.uint8)
    serving_row = np.arange(vocabulary + 1)
    if embeddings is not None and seen.any():
        if len(embeddings) != vocabulary:
            raise ValueError(f"{len(embeddings)} embeddings for a vocabulary of {vocabulary}")
        serving_row[:-1] = nearest_profiled(embeddings, seen)
        source[:-1] = np.where(seen, PROFILED, NEIGHBOUR)
    return source, serving_row


def known_rows(token_ids: np.ndarray, num_rows: int) -> np.ndarray:
    """The row of each token id in a table of V + 1 rows; ids outside the vocabulary share the last row."""
    return np.where((token_ids >= 0) & (token_ids < num_rows - 1), token_ids, num_rows - 1)
