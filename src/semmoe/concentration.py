"""How concentrated routing is: the statistics of the paper's Table 1 and appendix A.2.

Each statistic is computed in two ways: per token type, as published, and weighted by occurrence. Rare tokens flatter
the published form: a token that was seen once has F1 and cumulative hotness 1 by construction.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.sparse import csr_matrix
from scipy.stats import kurtosis

from semmoe.affinity import Affinity, build_affinity
from semmoe.core import RoutingTrace
from semmoe.splitter import split

QUANTILES = (0.25, 0.5, 0.75)


def concentration(trace: RoutingTrace, affinity: Affinity) -> list[dict[str, Any]]:
    """Per layer, by type and by occurrence: quantiles of F1, cumulative and maximum non-top-k hotness, and kurtosis."""
    K = trace.fingerprint.top_k
    types, index, frequency = np.unique(trace.token_ids, return_inverse=True, return_counts=True)
    out = []
    for layer, matrix in enumerate(affinity.token_counts):
        counts = matrix[types].toarray()
        columns = token_statistics(counts, K)
        by_type = {name: quantiles(values, np.ones(len(types))) for name, values in columns.items()}
        by_occurrence = {name: quantiles(values, frequency) for name, values in columns.items()}
        f1 = _static_hits(counts, index, trace.expert_ids[:, layer]) / K
        by_type["f1"] = quantiles(_group_medians(f1, index, frequency), np.ones(len(types)))
        by_occurrence["f1"] = quantiles(f1, np.ones(len(f1)))
        out.append({"layer": layer, "by_type": by_type, "by_occurrence": by_occurrence})
    return out


def token_statistics(counts: np.ndarray, top_k: int) -> dict[str, np.ndarray]:
    """Statistics (U,) of U token types from their activations (U, E); a type activates `top_k` experts per occurrence.

    The hotness of an expert is its share of the type's activations, so the k hottest sum to 1 if routing never varies.
    Worked example, k = 2, counts [3, 2, 1, 0]: cumulative hotness 5/6, maximum hotness of the others 1/6.
    """
    hottest = np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, ::-1]
    others = hottest[:, top_k] if counts.shape[1] > top_k else np.zeros(len(counts))
    return {
        "cumulative_hotness": hottest[:, :top_k].sum(axis=1),
        "max_other_hotness": others,
        "kurtosis": _kurtosis(counts),
    }


def _kurtosis(counts: np.ndarray) -> np.ndarray:
    """(U,) Pearson's kurtosis of each row (U, E); 1, the least that there is, for a row of equal counts."""
    varied = counts.min(axis=1) != counts.max(axis=1)  # the kurtosis of equal values is not defined
    out = np.ones(len(counts))
    out[varied] = kurtosis(counts[varied], axis=1, fisher=False)
    return out


def _static_hits(counts: np.ndarray, index: np.ndarray, expert_ids: np.ndarray) -> np.ndarray:
    """(T,) how many of a token's K experts are among the K hottest of its type. counts (U, E); index (T,) of types."""
    top = np.argsort(-counts, axis=1, kind="stable")[:, : expert_ids.shape[1]]
    return (expert_ids[:, :, None] == top[index][:, None, :]).any(axis=2).sum(axis=1)


def _group_medians(values: np.ndarray, index: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """(U,) median of the values (T,) of each type; the lower one, because F1 of a prediction is a multiple of 1/k."""
    order = np.lexsort((values, index))
    first = np.cumsum(sizes) - sizes
    return values[order][first + (sizes - 1) // 2]


def quantiles(values: np.ndarray, weights: np.ndarray) -> dict[str, float]:
    """p25, p50 and p75: the smallest value at which the cumulative weight reaches that share."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return {f"p{round(100 * q)}": float(values[order][np.searchsorted(reached, q)]) for q in QUANTILES}


def prediction(trace: RoutingTrace, profile_share: float = 0.25, seed: int = 0) -> dict[str, Any]:
    """Precision and F1 per layer of the static top-k of a share of the requests on the rest (A.2: 25 / 75).

    Precision is over tokens that the profile has seen; F1 also counts tokens that it has not seen, as misses.
    """
    profile, rest = split(trace, profile_share, seed)
    affinity = build_affinity(profile)
    K = trace.fingerprint.top_k
    known = affinity.token_frequency[rest.token_ids] > 0
    types, index = np.unique(rest.token_ids[known], return_inverse=True)
    layers = []
    for layer, matrix in enumerate(affinity.token_counts):
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
