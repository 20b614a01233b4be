"""Predict held-out routing: by each token's most frequent experts, and by the layers before (appendix A.2)."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from lab.concentration import token_counts
from semmoe.core import RoutingTrace
from semmoe.traces.split import split


def prediction(trace: RoutingTrace, profile_share: float = 0.25, seed: int = 0) -> dict[str, Any]:
    """Precision and F1 per layer of the static top-k of a share of the requests on the rest (A.2: 25 / 75).

    Precision is over tokens that the profile has seen; F1 also counts tokens that it has not seen, as misses.
    """
    profile, rest = split(trace, profile_share, seed)
    K = trace.fingerprint.top_k
    known = np.isin(rest.token_ids, profile.token_ids)
    types, index = np.unique(rest.token_ids[known], return_inverse=True)
    layers = []
    for layer, matrix in enumerate(token_counts(profile)):
        top = np.argsort(-matrix[types].toarray(), axis=1, kind="stable")[:, :K]
        hits = (rest.expert_ids[known, layer][:, :, None] == top[index][:, None, :]).any(axis=2).sum()
        precision, recall = hits / max(known.sum() * K, 1), hits / max(rest.num_tokens * K, 1)
        f1 = 2 * precision * recall / max(precision + recall, 1e-12)
        layers.append({"layer": layer, "precision": float(precision), "f1": float(f1)})
    return {"profile_share": profile_share, "known_token_share": float(known.mean()), "layers": layers}


def next_layer_hit_rate(trace: RoutingTrace, max_lookback: int = 5, profile_share: float = 0.25, seed: int = 0):
    """Share of a layer's top-k that is predicted from the experts of the n layers before it, for n = 1, 2, ...

    Scores are linear in the experts that were chosen before, fitted by least squares on a share of the requests. (A.2
    also looks back, and does not say how it predicts.) Averaged over the layers that have n layers before them.
    """
    profile, rest = split(trace, profile_share, seed)
    L, K = trace.fingerprint.num_layers, trace.fingerprint.top_k
    out = []
    for n in range(1, min(max_lookback, L - 1) + 1):
        hits = []
        for l in range(n, L):
            weights = _fit_linear(_one_hot(profile, range(l - n, l)), _one_hot(profile, [l]).toarray())
            score = _one_hot(rest, range(l - n, l)) @ weights
            top = np.argpartition(-score, K - 1, axis=1)[:, :K]
            hits.append((rest.expert_ids[:, l][:, :, None] == top[:, None, :]).any(axis=2).mean())
        out.append({"lookback": n, "hit_rate": float(np.mean(hits))})
    return out


def _one_hot(trace: RoutingTrace, layers: Sequence[int]) -> csr_matrix:
    """(T, len(layers) * E) float32: one-hot encoding of the experts that each token chose at these layers."""
    E = trace.fingerprint.num_experts
    columns = np.concatenate([trace.expert_ids[:, l] + np.int64(i * E) for i, l in enumerate(layers)], axis=1)
    indptr = np.arange(trace.num_tokens + 1) * columns.shape[1]
    ones = np.ones(columns.size, np.float32)
    return csr_matrix((ones, columns.ravel(), indptr), shape=(trace.num_tokens, len(layers) * E))


def _fit_linear(inputs: csr_matrix, targets: np.ndarray, ridge: float = 1.0) -> np.ndarray:
    """Ridge regression of targets (T, E) on inputs (T, M): weights (M, E) float32."""
    gram = (inputs.T @ inputs).toarray() + ridge * np.eye(inputs.shape[1], dtype=np.float32)
    return np.linalg.solve(gram, inputs.T @ targets)
