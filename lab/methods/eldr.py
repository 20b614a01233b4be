"""ELDR: send each request to the group whose centroid is nearest to its expert signature.

Experts stay where `linear` puts them. `CapacityScheduler` adds its bound on load. See
docs/method.md for how its rule is interpreted.
"""

from dataclasses import replace

import numpy as np
from scipy.sparse import csr_matrix, diags, vstack

from semmoe.core import RoutingTrace
from semmoe.numeric.assignment import equal_groups
from semmoe.placement import linear
from semmoe.placement.methods import Method
from semmoe.placement.problem import Problem, Solution
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import PromptScores
from semmoe.requests.predictor import mean_length
from semmoe.traces.affinity import count

METHOD = Method(__name__, needs_groups=True, reads=("seed",))
MAX_REQUESTS = 2048  # most requests whose signatures are clustered: the assignment costs their number cubed
ITERATIONS = 30


def solve(problem: Problem) -> Solution:
    """Contiguous experts; requests by the nearest centroid."""
    found = linear.solve(problem)
    table = eldr(problem.trace, problem.topology.dp_size, problem.settings.seed)
    return replace(found, requests=table)


def eldr(trace: RoutingTrace, num_groups: int, seed: int) -> PromptScores:
    """Nearest centroid of expert signatures (ELDR, arXiv 2607.00466, sections 4.2 and 4.3).

    A signature counts how often each (layer, expert) was chosen, times idf over requests, to unit length; balanced
    k-means gives each group a centroid. A prompt's signature is the sum of the average counts of its distinct ids in
    the profile (the mean for ids not seen). Its product with a centroid is a sum of token rows. Its norm, by which
    cosines divide and which is the same for all groups, is estimated as if tokens were unrelated. Since only
    differences between groups matter, scores have their mean over groups removed and are in units of their spread
    over the profile.
    """
    signatures, idf = request_signatures(trace)
    used = np.flatnonzero(np.asarray(signatures.multiply(signatures).sum(axis=1)).ravel() > 0)
    if len(used) < num_groups:
        raise ValueError(f"{len(used)} routed requests cannot be clustered into {num_groups} groups")
    rng = np.random.default_rng(seed)
    chosen = np.sort(rng.choice(used, min(len(used), MAX_REQUESTS), replace=False))
    rows = signatures[chosen].toarray()
    _, centroids = balanced_kmeans(rows, num_groups, rng)
    scores, weights = _token_rows(trace, idf, centroids - centroids.mean(axis=0))
    none = np.zeros(num_groups, np.float32)
    table = PromptScores(
        token_scores=scores.astype(np.float32),
        token_weights=weights.astype(np.float32),
        bias=none,
        prices=none,
        score_spread=1.0,
        mean_length=mean_length(trace),
    )
    scheduler = CapacityScheduler(table)
    spread = float(np.std([scheduler.score(trace.prompt(r)) for r in range(trace.num_requests)]))
    return replace(table, token_scores=table.token_scores / np.float32(spread or 1.0))


def request_signatures(trace: RoutingTrace) -> tuple[csr_matrix, np.ndarray]:
    """(R, L * E): signatures of unit length; (L * E,): idf.

    idf = log((R + 1) / (df + 1)) for df requests that chose an expert. If every request chose every expert, so that
    idf carries no information, it is 1.
    """
    counts = _all_layers(trace, trace.request_of_token(), trace.num_requests)
    requests = int((np.diff(trace.request_offsets) > 0).sum())
    idf = np.log((requests + 1) / (np.asarray((counts > 0).sum(axis=0)).ravel() + 1))
    idf = np.maximum(idf, 0.0) if (idf[_chosen(counts)] > 0).any() else np.ones_like(idf)
    weighted = (counts @ diags(idf)).tocsr()
    lengths = np.sqrt(np.asarray(weighted.multiply(weighted).sum(axis=1)).ravel())
    return (diags(1 / np.maximum(lengths, 1e-30)) @ weighted).tocsr(), idf


def _chosen(counts: csr_matrix) -> np.ndarray:
    return np.asarray(counts.sum(axis=0)).ravel() > 0


def _all_layers(trace: RoutingTrace, keys: np.ndarray, num_keys: int) -> csr_matrix:
    """(num_keys, L * E) float64: how often each key, given per token as keys (T,), chose each expert of each layer."""
    f, layers = trace.fingerprint, range(trace.fingerprint.num_layers)
    flat = np.concatenate([trace.expert_ids[:, l].astype(np.int64) + l * f.num_experts for l in layers], axis=1)
    return count(keys, flat, num_keys, f.num_layers * f.num_experts).astype(np.float64)


def _token_rows(trace: RoutingTrace, idf: np.ndarray, toward: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Average counts of each token id times idf: products with `toward` (V + 1, D), and squared lengths (V + 1,).

    toward: (D, L * E). Ids that were not routed have the overall mean.
    """
    vocabulary = trace.fingerprint.vocab_size
    frequency = np.bincount(trace.token_ids, minlength=vocabulary)
    counts = _all_layers(trace, trace.token_ids, vocabulary)
    mean = csr_matrix(np.asarray(counts.sum(axis=0)) / trace.num_tokens)
    rows = vstack([diags(1 / np.maximum(frequency, 1)) @ counts, mean]).tocsr() @ diags(idf)
    serving = np.append(np.where(frequency > 0, np.arange(vocabulary), vocabulary), vocabulary)
    squared = np.asarray(rows.multiply(rows).sum(axis=1)).ravel()
    return np.asarray(rows @ toward.T)[serving], squared[serving]


def balanced_kmeans(rows: np.ndarray, num_clusters: int, rng) -> tuple[np.ndarray, np.ndarray]:
    """Clusters (N,) of unit vectors (N, M), none above ceil(N / clusters), and their centroids (clusters, M).

    Each round assigns all rows at the least total cosine distance (an assignment problem, Malinen & Fränti 2014) and
    recomputes the centroids, scaled to unit length; it ends when no row moves. It starts from k-means++ on cosine
    distances.
    """
    centroids = rows[_spread_out(rows, num_clusters, rng)]
    labels = np.full(len(rows), -1)
    for _ in range(ITERATIONS):
        now = equal_groups(rows @ centroids.T)
        if (now == labels).all():
            break
        labels = now
        sums = (labels == np.arange(num_clusters)[:, None]).astype(rows.dtype) @ rows
        lengths = np.linalg.norm(sums, axis=1, keepdims=True)
        centroids = np.where(lengths > 0, sums / np.maximum(lengths, 1e-30), centroids)
    return labels, centroids


def _spread_out(rows: np.ndarray, count: int, rng) -> list[int]:
    """`count` rows for k-means++: each is drawn with a probability by its distance to the nearest row drawn so far."""
    chosen = [int(rng.integers(len(rows)))]
    far = np.full(len(rows), np.inf)
    while len(chosen) < count:
        far = np.minimum(far, np.maximum(1 - rows @ rows[chosen[-1]], 0.0))
        far[chosen] = 0.0
        even = np.ones(len(rows))
        even[chosen] = 0.0
        weight = far if far.sum() > 0 else even
        chosen.append(int(rng.choice(len(rows), p=weight / weight.sum())))
    return chosen
