"""Affinity: token-to-expert, request-to-expert and layer-to-layer counts; which row of a table a token id uses."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from scipy.sparse import csr_matrix

from semmoe.core import NEIGHBOUR, PRIOR, PROFILED, RoutingTrace
from semmoe.topology import Fingerprint


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """How often each token and each request activates each expert: the paper's T^(L), from which C_p is derived."""

    token_counts: list[csr_matrix]  # L matrices (V, E) int32: activations of an expert by a token id
    request_counts: list[csr_matrix]  # L matrices (R, E) int32
    path_counts: np.ndarray  # (L - 1, E, E) int64: tokens that chose e at layer l and e' at layer l + 1
    token_frequency: np.ndarray  # (V,) int64
    request_lengths: np.ndarray  # (R,) int64: routed tokens of each request
    fingerprint: Fingerprint

    @property
    def expert_load(self) -> np.ndarray:
        """(L, E) int64: activations per expert."""
        return np.stack([np.asarray(counts.sum(axis=0)).ravel() for counts in self.token_counts]).astype(np.int64)


def build_affinity(trace: RoutingTrace) -> Affinity:
    """Count activations (paper, section 3.2) in sparse matrices, whose memory grows with the pairs that occur."""
    f = trace.fingerprint
    layers = [trace.expert_ids[:, l] for l in range(f.num_layers)]  # (T, K) each
    requests = trace.request_of_token()
    paths = [pair_count(before, after, f.num_experts) for before, after in pairwise(layers)]
    return Affinity(
        token_counts=[count(trace.token_ids, ids, f.vocab_size, f.num_experts) for ids in layers],
        request_counts=[count(requests, ids, trace.num_requests, f.num_experts) for ids in layers],
        path_counts=np.array(paths, np.int64).reshape(-1, f.num_experts, f.num_experts),
        token_frequency=np.bincount(trace.token_ids, minlength=f.vocab_size),
        request_lengths=np.diff(trace.request_offsets),
        fingerprint=f,
    )


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


def confidence(counts: csr_matrix) -> csr_matrix:
    """The paper's C_p: each row of T^(L) divided by its sum; rows of unseen tokens stay empty."""
    totals = np.asarray(counts.sum(axis=1)).ravel()
    out = counts.astype(np.float32)
    out.data /= np.repeat(totals, np.diff(counts.indptr)).astype(np.float32)
    return out


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
