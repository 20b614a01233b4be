"""How concentrated routing is: the statistics of the paper's Table 1.

Each statistic is computed in two ways: per token type, as published, and weighted by occurrence. Rare tokens flatter
the published form: a token that was seen once has F1 and cumulative hotness 1 by construction.
"""

from typing import Any

import numpy as np
from scipy.sparse import csr_matrix

from semmoe.core import RoutingTrace
from semmoe.traces.affinity import count

QUANTILES = (0.25, 0.5, 0.75)


def token_counts(trace: RoutingTrace) -> list[csr_matrix]:
    """The paper's T^(L): L matrices (V, E) int32, how often a token id activates an expert."""
    f = trace.fingerprint
    return [count(trace.token_ids, trace.expert_ids[:, l], f.vocab_size, f.num_experts) for l in range(f.num_layers)]


def concentration(trace: RoutingTrace) -> list[dict[str, Any]]:
    """Per layer, by type and by occurrence: quantiles of F1, cumulative and maximum non-top-k hotness."""
    K = trace.fingerprint.top_k
    types, index, frequency = np.unique(trace.token_ids, return_inverse=True, return_counts=True)
    out = []
    for layer, matrix in enumerate(token_counts(trace)):
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
    }


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
