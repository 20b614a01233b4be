"""The path predictor: predict a token's expected activations of each expert and so the pairs that each rank will host.

Expected activations of expert e at layer l are a sum of four parts, fitted together by ridge regression, one convex
closed-form problem per layer:
    token     the token id's own shares of experts in the profile (shrunk towards the layer's shares)
    path      the experts that the token chose at previous layers; for the nearest layers, also their order by weight
    running   decode: the mean of the experts that the request's tokens chose at this layer, weighted to recent tokens
    previous  decode: the experts that the request's previous token chose at this layer
The fit minimises squared errors of counts rather than a likelihood of classes. It therefore estimates the quantity that
placement optimises, the expected number of local experts; it is additive over experts, so that one fit projects onto
the ranks of any layout with any copies; and online it is a sum of table rows. While fitting, a token's own occurrence
is left out of its shares, because tokens seen once would otherwise be trusted. Look-back, ordering and ridge minimise
the squared error on held-out requests.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count

import numba
import numpy as np
from scipy import linalg
from scipy.sparse import csr_matrix

from semmoe.affinity import count, resolve_tokens
from semmoe.core import DECODE, Placement, RoutingTrace
from semmoe.settings import PredictorSettings
from semmoe.tokens.kernels import RUNNING_LIMIT, RUNNING_PRIOR, SCALE
from semmoe.tokens.slices import PathScores

TOKEN_PRIOR = 4.0  # pseudo-occurrences of the layer's shares that are mixed into a token's shares
MAX_COLUMNS = 3000  # most columns of one layer's regression
SHAPES = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (5, 2))  # (look-back, ordered layers) to try
RIDGES = (10.0, 100.0, 1000.0)


@dataclass(frozen=True)
class LayerFit:
    """Weights of one layer, whose columns are experts (E), and the layer's mean activations (E,)."""

    token: np.ndarray  # (E, E) weights of a token's shares minus the mean
    running: np.ndarray  # (E, E) weights of the running mean minus the mean
    previous: np.ndarray  # (E + 1, E); the last row is for tokens without a previous token
    path: np.ndarray  # (F, E)
    intercept: np.ndarray  # (E,)
    mean: np.ndarray  # (E,)


@dataclass(frozen=True, kw_only=True)
class Predictor:
    layers: list[LayerFit]
    lookback: int
    ordered: int
    ridge: float
    held_out_error: float  # squared error on held-out requests, relative to that of the mean alone
    hit_rate: float  # share of the true top-k that is predicted, on the same requests


def path_columns(lookback: int, ordered: int, top_k: int, num_experts: int) -> int:
    """F: the number of path rows for the experts of the `lookback` previous layers."""
    return (ordered * top_k + lookback - ordered) * num_experts


def fit(
    trace: RoutingTrace, settings: PredictorSettings, seed: int, progress: Callable[[int], None] = lambda n: None
) -> Predictor:
    """Fit every layer on the tokens of `trace` (at most `settings.max_tokens`, whole requests)."""
    sample = _sample(trace, settings.max_tokens, seed)
    lookback, ordered, ridge, error, hit_rate = _choose(sample, settings, seed)
    history = sample.phase == DECODE

    def one(layer: int) -> LayerFit:
        depth = min(lookback, layer)
        design = _design(sample, layer, depth, min(ordered, depth), _token_counts(sample, layer), history, loo=True)
        out = _solve(design, ridge, path_columns(lookback, ordered, *_shape(sample)))
        progress(1)
        return out

    with ThreadPoolExecutor(cpu_count()) as pool:
        layers = list(pool.map(one, range(trace.fingerprint.num_layers)))
    return Predictor(
        layers=layers, lookback=lookback, ordered=ordered, ridge=ridge, held_out_error=error, hit_rate=hit_rate
    )


def _shape(trace: RoutingTrace) -> tuple[int, int]:
    return trace.fingerprint.top_k, trace.fingerprint.num_experts


def sample_requests(trace: RoutingTrace, max_tokens: int, seed: int) -> np.ndarray:
    """Random requests with about `max_tokens` routed tokens in total, in arrival order; all if there are no more."""
    if trace.num_tokens <= max_tokens:
        return np.arange(trace.num_requests)
    order = np.random.default_rng(seed).permutation(trace.num_requests)
    enough = int(np.searchsorted(np.cumsum(np.diff(trace.request_offsets)[order]), max_tokens)) + 1
    return np.sort(order[:enough])


def _sample(trace: RoutingTrace, max_tokens: int, seed: int) -> RoutingTrace:
    return trace.select(sample_requests(trace, max_tokens, seed))


@dataclass(frozen=True)
class _Design:
    """One layer's regression: active[n] lists the one-hot columns of row n, the last K of them the targets."""

    dense: np.ndarray  # (N, 2E) float32: token shares and running mean, less the mean
    active: np.ndarray  # (N, A) int32, -1 padded
    columns: int  # one-hot feature columns: intercept, E + 1 of the previous token, F of the path
    mean: np.ndarray  # (E,)
    num_experts: int


def _token_counts(trace: RoutingTrace, layer: int):
    """(V, E) int32 csr: how often each token id chose each expert at one layer."""
    f = trace.fingerprint
    return count(trace.token_ids, trace.expert_ids[:, layer], f.vocab_size, f.num_experts)


def token_shares(counts: np.ndarray, mean: np.ndarray, top_k: int) -> np.ndarray:
    """(N, E): expected activations minus the mean, from `counts` (N, E) shrunk towards `mean` (E,)."""
    occurrences = counts.sum(axis=1, keepdims=True) / top_k
    return ((counts + TOKEN_PRIOR * mean) / (occurrences + TOKEN_PRIOR) - mean).astype(np.float32)


def _design(trace, layer, lookback, ordered, token_counts, history, loo) -> _Design:
    """The regression rows of `trace` at one layer.

    token_counts (V, E) csr. loo: leave each token's own occurrence out of its counts; False if they come from other
    requests.
    """
    K, E = _shape(trace)
    experts = trace.expert_ids[:, layer].astype(np.int32)
    total = np.asarray(token_counts.sum(axis=0), np.float64).ravel()
    mean = total * K / max(total.sum(), 1)
    counts = token_counts[trace.token_ids].toarray().astype(np.float32)
    if loo:
        np.put_along_axis(counts, experts, np.take_along_axis(counts, experts, axis=1) - 1, axis=1)
    running, has_previous = _running_means(experts, trace.request_offsets, history, mean.astype(np.float32))
    dense = np.concatenate([token_shares(counts, mean, K), running], axis=1)
    previous = np.full((len(experts), K), -1, np.int32)
    previous[1:][has_previous[1:]] = 1 + experts[:-1][has_previous[1:]]
    previous[~has_previous, 0] = 1 + E
    blocks, base = [np.zeros((len(experts), 1), np.int32), previous], E + 2
    for back in range(1, lookback + 1):
        step = np.arange(K, dtype=np.int32) * E if back <= ordered else 0
        blocks.append(base + step + trace.expert_ids[:, layer - back].astype(np.int32))
        base += E * (K if back <= ordered else 1)
    active = np.concatenate([*blocks, base + experts], axis=1)
    return _Design(dense, active, base, mean, E)


@numba.njit(cache=True, nogil=True)
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
            if history[t]:
                out[t] = state
                has_previous[t] = seen > 0
            rate = np.float32(1.0 / (min(seen, RUNNING_LIMIT) + RUNNING_PRIOR))
            state -= rate * (state + mean)
            for k in range(experts.shape[1]):
                state[experts[t, k]] += rate
    return out, has_previous


@numba.njit(cache=True, nogil=True)
def _one_hot_products(dense, active, size):
    """Inner products of one-hot columns with each other (size, size) and with the dense ones (size, 2E)."""
    both, mixed = np.zeros((size, size)), np.zeros((size, dense.shape[1]))
    for n in range(active.shape[0]):
        for i in range(active.shape[1]):
            a = active[n, i]
            if a >= 0:
                for j in range(i, active.shape[1]):
                    if active[n, j] >= 0:
                        both[a, active[n, j]] += 1 if j > i else 0.5  # every pair once, half of it on each side
                for d in range(dense.shape[1]):
                    mixed[a, d] += dense[n, d]
    return both + both.T, mixed


def _products(design: _Design) -> tuple[np.ndarray, np.ndarray]:
    """X'X (columns + 2E, square) and X'Y (columns + 2E, E) of one layer's regression."""
    C, E = design.columns, design.num_experts
    both, mixed = _one_hot_products(design.dense, design.active, C + E)
    square = np.block([[both[:C, :C], mixed[:C]], [mixed[:C].T, (design.dense.T @ design.dense).astype(np.float64)]])
    return square, np.concatenate([both[:C, C:], mixed[C:].T])


def _weights(square: np.ndarray, target: np.ndarray, ridge: float) -> np.ndarray:
    penalty = np.full(len(square), ridge)
    penalty[0] = 1e-3  # the intercept is free
    return linalg.solve(square + np.diag(penalty), target, assume_a="pos")


def _solve(design: _Design, ridge: float, path_rows: int) -> LayerFit:
    E, C = design.num_experts, design.columns
    weights = _weights(*_products(design), ridge)
    path = np.zeros((path_rows, E))
    path[: C - E - 2] = weights[E + 2 : C]
    return LayerFit(
        token=weights[C : C + E],
        running=weights[C + E :],
        previous=weights[1 : E + 2],
        path=path,
        intercept=weights[0],
        mean=design.mean,
    )


def _choose(trace: RoutingTrace, settings: PredictorSettings, seed: int) -> tuple[int, int, float, float, float]:
    """Choose look-back, ordered layers and ridge by the squared error on a quarter of the requests, at a few layers.

    The smallest look-back within `settings.tolerance` of the best error is chosen. Also returns its error and hit rate.
    """
    K, E = _shape(trace)
    L = trace.fingerprint.num_layers
    order = np.random.default_rng(seed).permutation(trace.num_requests)
    cut = max(len(order) // 4, 1)
    if len(order) < 2:
        return min(2, L - 1), 0, RIDGES[1], float("nan"), float("nan")
    held, rest = trace.select(np.sort(order[:cut])), trace.select(np.sort(order[cut:]))
    held, rest = _sample(held, settings.max_tokens // 8, seed), _sample(rest, settings.max_tokens // 4, seed)
    if min(held.num_tokens, rest.num_tokens) == 0:
        return min(2, L - 1), 0, RIDGES[1], float("nan"), float("nan")
    deepest = settings.lookback if settings.lookback is not None else 5
    shapes = [
        s
        for s in SHAPES
        if s[0] < L and path_columns(*s, K, E) <= MAX_COLUMNS and (s[0] == deepest or settings.lookback is None)
    ] or [(min(deepest, L - 1), 0)]
    layers = sorted({min(max(L * (2 * i + 1) // 6, shapes[-1][0]), L - 1) for i in range(3)})
    with ThreadPoolExecutor(cpu_count()) as pool:
        totals = np.sum(list(pool.map(lambda layer: _held_out(rest, held, layer, shapes), layers)), axis=0)
    errors, hits = totals[..., 0] / np.maximum(totals[..., 1], 1e-9), totals[..., 2] / len(layers)
    for shape, of_ridge, hit in zip(shapes, errors, hits, strict=True):
        i = int(of_ridge.argmin())
        if of_ridge[i] <= errors.min() * (1 + settings.tolerance):
            return *shape, RIDGES[i], float(of_ridge[i]), float(hit[i])
    raise AssertionError("one of the shapes is the best")


def _held_out(rest: RoutingTrace, held: RoutingTrace, layer: int, shapes: list[tuple[int, int]]) -> np.ndarray:
    """(shapes, ridges, 3): squared error, that of the mean alone, and hit rate on one layer of `held`.

    The products of the widest regression are computed once: those of a shape are sums of some of them.
    """
    K, E = _shape(rest)
    widest = min(max(s[0] for s in shapes), layer), min(max(s[1] for s in shapes), layer)
    counts = _token_counts(rest, layer)
    train = _design(rest, layer, *widest, counts, rest.phase == DECODE, loo=True)
    test = _design(held, layer, *widest, counts, held.phase == DECODE, loo=False)
    square, target = _products(train)
    truth = np.zeros((held.num_tokens, E), np.float32)
    np.put_along_axis(truth, held.expert_ids[:, layer].astype(np.int64), 1, axis=1)
    nothing, out = ((train.mean - truth) ** 2).sum(), np.empty((len(shapes), len(RIDGES), 3))
    for s, shape in enumerate(shapes):
        narrow = _narrower(widest, (min(shape[0], layer), min(shape[1], layer)), K, E)
        part, aim = np.asarray((narrow.T @ (narrow.T @ square).T).T), narrow.T @ target
        for i, ridge in enumerate(RIDGES):
            predicted = _apply(test, narrow @ _weights(part, aim, ridge))
            top = np.argpartition(-predicted, K - 1, axis=1)[:, :K]
            hits = np.take_along_axis(truth, top, axis=1).mean(dtype=np.float64)
            out[s, i] = ((predicted - truth) ** 2).sum(), nothing, hits
    return out


def _narrower(wide: tuple[int, int], narrow: tuple[int, int], top_k: int, num_experts: int) -> csr_matrix:
    """(columns of the wide regression, columns of the narrow one) 0 or 1: the wide columns that each column sums."""
    (lookback, ordered), E = wide, num_experts
    column, base = list(range(E + 2)), E + 2  # of every wide column; -1: none
    for back in range(1, lookback + 1):
        for _ in range(top_k if back <= ordered else 1):
            column += list(range(base, base + E)) if back <= narrow[0] else [-1] * E
            base += E if back <= narrow[1] else 0
        base += E if narrow[1] < back <= narrow[0] else 0
    column += list(range(base, base + 2 * E))
    rows = np.flatnonzero(np.array(column) >= 0)
    return csr_matrix((np.ones(len(rows)), (rows, np.array(column)[rows])), shape=(len(column), base + 2 * E))


def _apply(design: _Design, weights: np.ndarray) -> np.ndarray:
    """(N, E) predicted activations."""
    C, K = design.columns, design.active.shape[1]
    out = design.dense @ weights[C:]
    padded = np.concatenate([weights[:C], np.zeros((1, weights.shape[1]))])
    for i in range(K):
        column = design.active[:, i]
        out += padded[np.where((column >= 0) & (column < C), column, C)]
    return out


def predict(
    predictor: Predictor, profile: RoutingTrace, part: RoutingTrace, layer: int, rows: np.ndarray
) -> np.ndarray:
    """(rows, E) float: expected activations of the given tokens of `part`, which holds requests of `profile`.

    Each token's own occurrence is left out of its shares.
    """
    lookback = min(predictor.lookback, layer)
    ordered, history = min(predictor.ordered, lookback), part.phase == DECODE
    design = _design(part, layer, lookback, ordered, _token_counts(profile, layer), history, loo=True)
    design = replace(design, dense=design.dense[rows], active=design.active[rows])
    f = predictor.layers[layer]
    weights = np.concatenate(
        [f.intercept[None], f.previous, f.path[: design.columns - len(f.previous) - 1], f.token, f.running]
    )
    return _apply(design, weights)


def project(
    predictor: Predictor, trace: RoutingTrace, placement: Placement, embeddings: np.ndarray | None = None
) -> PathScores:
    """The predictor's tables for a placement: integer rows with one entry per rank, in units of 1 / `SCALE` experts.

    embeddings: (V, H); with them, tokens that were not profiled use the rows of their nearest profiled neighbour.
    """
    f = trace.fingerprint
    source, serving = resolve_tokens(trace.token_ids, f.vocab_size, embeddings)
    seen = np.flatnonzero(np.bincount(trace.token_ids, minlength=f.vocab_size))
    token_rows = np.full(f.vocab_size + 1, len(seen), np.int32)
    token_rows[seen] = np.arange(len(seen))
    hosts = placement.hosts.transpose(0, 2, 1).astype(np.float64)  # (L, E, G)
    parts = [
        _project_layer(fitted, hosts[l], _token_counts(trace, l)[seen], f.top_k)
        for l, fitted in enumerate(predictor.layers)
    ]
    token, shift, path, history = (np.stack(part) for part in zip(*parts, strict=True))
    return PathScores(
        token_rows=token_rows[serving],
        token_source=source,
        token_scores=token,
        token_shift=shift.astype(np.uint8),
        path_scores=path,
        history_scores=history,
        lookback=predictor.lookback,
        ordered=predictor.ordered,
    )


def _project_layer(fitted: LayerFit, hosts: np.ndarray, counts, top_k: int):
    """Token rows (N + 1, G) int8 and their shift, path rows (F, G) and history rows (2E + 1, G) int16 of one layer."""
    onto = fitted.token @ hosts  # (E, G)
    base = fitted.intercept @ hosts
    occurrences = np.asarray(counts.sum(axis=1)).ravel()[:, None] / top_k
    kept = occurrences / (occurrences + TOKEN_PRIOR)  # the rest of a row is the mean, which adds nothing
    shares = (counts @ onto) / np.maximum(occurrences, 1e-9) - fitted.mean @ onto
    token = np.concatenate([kept * shares, np.zeros((1, hosts.shape[1]))]) + base
    shift = max(int(np.ceil(np.log2(max(np.abs(token).max() * SCALE / 127, 1)))), 0)
    running = fitted.running @ hosts
    running -= fitted.mean @ running / top_k  # so that experts drawn from the layer's mean add nothing
    history = np.concatenate([running, fitted.previous @ hosts])
    return (
        np.clip(np.rint(token * SCALE / 2**shift), -127, 127).astype(np.int8),
        shift,
        _int16(fitted.path @ hosts),
        _int16(history),
    )


def _int16(rows: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(rows * SCALE), -32767, 32767).astype(np.int16)
