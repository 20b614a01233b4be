"""The least squares behind `tokens.predictor`: one layer's regression, its normal equations and its predictions.

Letters beside core's: A one-hot columns of a row, C all one-hot columns, F one-hot columns for the path.
"""

from dataclasses import dataclass, replace

import numpy as np
from scipy import linalg

from semmoe.core import DECODE, RoutingTrace
from semmoe.numeric.jit import njit
from semmoe.tokens.kernels import RUNNING_LIMIT, RUNNING_PRIOR
from semmoe.tokens.slices import Looks

BLOCK = 128  # dense columns that are summed together
TOKEN_PRIOR = 4.0  # pseudo-occurrences of the layer's shares that are mixed into a token's shares


@dataclass(frozen=True)
class Design:
    """One layer's regression: active[n] lists the one-hot columns of row n; the last K are the targets."""

    dense: np.ndarray  # (N, 2E) float32: token shares and running mean, less the mean
    active: np.ndarray  # (N, A) int32, -1 padded
    columns: int  # one-hot feature columns: intercept, E + 1 of the previous token, F of the path
    mean: np.ndarray  # (E,)
    num_experts: int
    has_previous: np.ndarray  # (N,) bool: whether there is a previous token


@dataclass(frozen=True)
class TokenCounts:
    """How often each token id of a trace chose each expert at one layer."""

    row_of: np.ndarray  # (V,) int32: a token id's row of `rows`
    rows: np.ndarray  # (N + 1, E) int64: of the N token ids that occur, ascending; then zeros, for all others


def count_tokens(trace: RoutingTrace, layer: int) -> TokenCounts:
    """Count in dense rows, which takes a tenth of the time of a sparse matrix."""
    E = trace.fingerprint.num_experts
    seen = np.flatnonzero(np.bincount(trace.token_ids, minlength=trace.fingerprint.vocab_size))
    row_of = np.full(trace.fingerprint.vocab_size, len(seen), np.int32)
    row_of[seen] = np.arange(len(seen))
    pairs = row_of[trace.token_ids].astype(np.int64)[:, None] * E + trace.expert_ids[:, layer]
    return TokenCounts(row_of, np.bincount(pairs.ravel(), minlength=(len(seen) + 1) * E).reshape(-1, E))


def token_shares(counts: np.ndarray, mean: np.ndarray, top_k: int) -> np.ndarray:
    """(N, E): expected activations minus the mean, from `counts` (N, E) shrunk towards `mean` (E,)."""
    mean, occurrences = mean.astype(np.float32), counts.sum(axis=1, dtype=np.float32, keepdims=True) / top_k
    return (counts + np.float32(TOKEN_PRIOR) * mean) / (occurrences + np.float32(TOKEN_PRIOR)) - mean


def design_of(trace: RoutingTrace, layer: int, looks: Looks, token_counts: TokenCounts, loo: bool) -> Design:
    """The regression rows of `trace` at one layer.

    loo: leave each token's own occurrence out of its counts; False if these come from other requests.
    """
    history = trace.phase == DECODE
    K = trace.fingerprint.top_k
    experts = trace.expert_ids[:, layer].astype(np.int32)
    total = token_counts.rows.sum(axis=0).astype(np.float64)
    mean = total * K / max(total.sum(), 1)
    counts = token_counts.rows.astype(np.float32)[token_counts.row_of[trace.token_ids]]
    if loo:
        np.put_along_axis(counts, experts, np.take_along_axis(counts, experts, axis=1) - 1, axis=1)
    running, has_previous = _running_means(experts, trace.request_offsets, history, mean.astype(np.float32))
    dense = np.concatenate([token_shares(counts, mean, K), running], axis=1)
    active, columns = _one_hot_columns(trace, layer, looks, has_previous)
    return Design(dense, active, columns, mean, trace.fingerprint.num_experts, has_previous)


def with_looks(design: Design, trace: RoutingTrace, layer: int, looks: Looks) -> Design:
    """Return a design of the same trace and layer with another path."""
    active, columns = _one_hot_columns(trace, layer, looks, design.has_previous)
    return replace(design, active=active, columns=columns)


def _one_hot_columns(trace: RoutingTrace, layer: int, looks: Looks, has_previous: np.ndarray) -> tuple[np.ndarray, int]:
    """The one-hot columns (N, A) of each row, targets last, and the number of columns of features."""
    K, E = trace.fingerprint.top_k, trace.fingerprint.num_experts
    experts = trace.expert_ids[:, layer].astype(np.int32)
    previous = np.full((len(experts), K), -1, np.int32)
    previous[1:][has_previous[1:]] = 1 + experts[:-1][has_previous[1:]]
    previous[~has_previous, 0] = 1 + E
    blocks, base = [np.zeros((len(experts), 1), np.int32), previous], E + 2
    for j, chosen in enumerate(looks.planes(trace, layer)):
        step = np.arange(K, dtype=np.int32) * E if j < looks.ordered else 0
        blocks.append(base + step + chosen.astype(np.int32))
        base += E * (K if j < looks.ordered else 1)
    return np.concatenate([*blocks, base + experts], axis=1), base


@njit(nogil=True)
def _running_means(experts, offsets, history, mean):
    """(N, E): running mean of the request's earlier activations minus `mean`; (N,): whether there is an earlier token.

    Rows without history are zero, as in prefill, where all tokens are routed at once.
    """
    N, E = experts.shape[0], mean.shape[0]
    out, has_previous = np.zeros((N, E), np.float32), np.zeros(N, np.bool_)
    for r in range(offsets.shape[0] - 1):
        state = np.zeros(E, np.float32)
        for t in range(offsets[r], offsets[r + 1]):
            seen = t - offsets[r]
            has_previous[t] = history[t] and seen > 0
            rate = np.float32(1.0 / (min(seen, RUNNING_LIMIT) + RUNNING_PRIOR))
            for e in range(E):  # a loop compiles faster than array expressions, by seconds
                out[t, e] = state[e] if history[t] else np.float32(0.0)
                state[e] -= rate * (state[e] + mean[e])
            for k in range(experts.shape[1]):
                state[experts[t, k]] += rate
    return out, has_previous


@njit(nogil=True)
def _one_hot_products(dense, active, size):
    """Multiply the one-hot columns with each other (size, size) and with the dense columns (size, 2E), in float32."""
    both, mixed = np.zeros((size, size), np.float32), np.zeros((size, dense.shape[1]), np.float32)
    for n in range(active.shape[0]):
        for i in range(active.shape[1]):
            a = active[n, i]
            if a >= 0:
                for j in range(i, active.shape[1]):
                    if active[n, j] >= 0:
                        both[a, active[n, j]] += 1 if j > i else 0.5  # every pair once, half of it on each side
    for first in range(0, dense.shape[1], BLOCK):  # so much of `mixed` stays in a core's cache
        for n in range(active.shape[0]):
            row = dense[n, first : first + BLOCK]
            for a in active[n]:
                if a >= 0:
                    sums = mixed[a, first : first + BLOCK]
                    for d in range(row.shape[0]):
                        sums[d] += row[d]
    return both + both.T, mixed


def dense_products(design: Design) -> np.ndarray:
    """(2E, 2E) float32: the dense columns times each other."""
    return design.dense.T @ design.dense


def products(design: Design, of_dense: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """X'X (columns + 2E, square) and X'Y (columns + 2E, E) of a layer's regression; of_dense: its `dense_products`.

    Both are float32.
    """
    C, E = design.columns, design.num_experts
    both, mixed = _one_hot_products(design.dense, design.active, C + E)
    square = np.block([[both[:C, :C], mixed[:C]], [mixed[:C].T, of_dense]])
    return square, np.concatenate([both[:C, C:], mixed[C:].T])


def ridge_weights(square: np.ndarray, target: np.ndarray, ridge: float) -> np.ndarray:
    """Return the weights (columns + 2E, E) of a ridge regression, in the type of `square`."""
    penalty = np.full(len(square), ridge, square.dtype)
    penalty[0] = 1e-3  # the intercept is free
    return linalg.solve(square + np.diag(penalty), target, assume_a="pos")


def apply_weights(design: Design, weights: np.ndarray) -> np.ndarray:
    """(N, E) float32: predicted activations."""
    C, weights = design.columns, weights.astype(np.float32)
    out = design.dense @ weights[C:]
    _add_rows(design.active, weights[:C], out)
    return out


@njit(nogil=True)
def _add_rows(active, weights, out):
    """Add to out (N, E) the rows of weights (C, E) that `active` (N, A) names; others are targets or padding."""
    for n in range(active.shape[0]):
        row = out[n]
        for i in range(active.shape[1]):
            column = active[n, i]
            if 0 <= column < weights.shape[0]:
                for e in range(row.shape[0]):
                    row[e] += weights[column, e]
