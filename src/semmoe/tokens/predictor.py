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

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from os import cpu_count
from time import perf_counter

import numpy as np

from semmoe.core import Placement, RoutingTrace
from semmoe.settings import PredictorSettings
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.regression import (
    TOKEN_PRIOR,
    apply_weights,
    count_tokens,
    dense_products,
    design_of,
    products,
    ridge_weights,
    with_looks,
)
from semmoe.tokens.slices import Looks, PathScores
from semmoe.topology import Fingerprint
from semmoe.traces.affinity import resolve_tokens
from semmoe.traces.split import draw_requests

MAX_COLUMNS = 3000  # most columns of a layer's regression for the path
# (look-back, ordered planes) to try
SHAPES = ((0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2), (3, 0), (3, 2), (5, 2))
RIDGES = (10.0, 100.0, 1000.0)
JUDGED = 256  # most experts whose errors are compared


@dataclass(frozen=True)
class LayerFit:
    """The weights of a layer, whose columns are experts (E), and the layer's mean activations (E,).

    Rows: the intercept; E + 1 of the previous token, the last for tokens that have none; F of the path; E of the
    token's shares minus the mean; E of the running mean minus the mean.
    """

    weights: np.ndarray  # (rows, E)
    mean: np.ndarray  # (E,)

    @property
    def parts(self) -> list[np.ndarray]:
        """The weights of the intercept, the previous token, the path, the token's shares and the running mean."""
        E = len(self.mean)
        return np.split(self.weights, [1, E + 2, -2 * E, -E])


@dataclass(frozen=True, kw_only=True)
class Predictor:
    layers: list[LayerFit]
    looks: Looks
    ridge: float
    held_out_error: float  # squared error on held-out requests, relative to that of the mean alone


def fit(trace: RoutingTrace, settings: PredictorSettings, seed: int, in_time=lambda: True) -> Predictor:
    """Fit every layer on the tokens of `trace` (at most `settings.max_tokens`, whole requests).

    in_time: whether a further look-back may be tried, beside the shortest.
    """
    sample = _sample(trace, settings.max_tokens, seed)
    looks, ridge, error = _choose(sample, settings, seed, in_time)

    def one(layer: int) -> LayerFit:
        design = design_of(sample, layer, looks, count_tokens(sample, layer), loo=True)
        square, target = products(design, dense_products(design))
        return LayerFit(ridge_weights(square.astype(np.float64), target, ridge), design.mean)

    with ThreadPoolExecutor(cpu_count()) as pool:
        layers = list(pool.map(one, range(trace.fingerprint.num_layers)))
    return Predictor(layers=layers, looks=looks, ridge=ridge, held_out_error=error)


def least_seconds(f: Fingerprint) -> float:
    """About how long `fit` takes at least for a model, by the time of a small layer's equations on this machine."""
    small, seconds = 256, []
    for _ in range(8):  # the first calls may wait for threads to start
        begun = perf_counter()
        ridge_weights(np.eye(3 * small), np.ones((3 * small, small)), 1.0)
        seconds.append(perf_counter() - begun)
    return min(seconds) * (f.num_experts / small) ** 3 * f.num_layers / (cpu_count() or 1)


def _shape(trace: RoutingTrace) -> tuple[int, int]:
    return trace.fingerprint.top_k, trace.fingerprint.num_experts


def _sample(trace: RoutingTrace, max_tokens: int, seed: int) -> RoutingTrace:
    """Random requests with about `max_tokens` routed tokens in total, in arrival order; all if there are no more."""
    return trace.select(draw_requests(np.diff(trace.request_offsets), max_tokens, seed))


def _choose(trace: RoutingTrace, settings: PredictorSettings, seed: int, in_time) -> tuple[Looks, float, float]:
    """Choose what to look at and the ridge by the squared error on a quarter of the requests, at a few layers.

    The fewest rows within `settings.tolerance` of the best error are chosen. Also returns their error.
    """
    L = trace.fingerprint.num_layers
    few = Looks(lookback=min(2, L - 1), ordered=0), RIDGES[1], float("nan")
    order = np.random.default_rng(seed).permutation(trace.num_requests)
    cut = max(len(order) // 4, 1)
    if len(order) < 2:
        return few
    held, rest = trace.select(np.sort(order[:cut])), trace.select(np.sort(order[cut:]))
    held, rest = _sample(held, settings.max_tokens // 8, seed), _sample(rest, settings.max_tokens // 4, seed)
    if min(held.num_tokens, rest.num_tokens) == 0:
        return few
    shapes = _candidates(trace, settings.lookback)
    deepest = max(one.lookback for one in shapes)
    layers = sorted({min(max(L * (2 * i + 1) // 6, deepest), L - 1) for i in range(3)})
    with ThreadPoolExecutor(cpu_count()) as pool:
        found = list(pool.map(lambda layer: _held_out(rest, held, layer, shapes, in_time), layers))
    errors = np.sum([of_shapes for of_shapes, _ in found], axis=0) / max(sum(of_mean for _, of_mean in found), 1e-9)
    for shape, of_ridge in zip(shapes, errors, strict=True):
        i = int(of_ridge.argmin())
        if of_ridge[i] <= errors.min() * (1 + settings.tolerance):
            return shape, RIDGES[i], float(of_ridge[i])
    raise AssertionError("one of the shapes is the best")


def _candidates(trace: RoutingTrace, lookback: int | None) -> list[Looks]:
    """What may be looked at, the cheapest first; lookback: a given one, or None."""
    (K, E), L = _shape(trace), trace.fingerprint.num_layers
    found = [Looks(lookback=back, ordered=order) for back, order in SHAPES]
    fit = [one for one in found if one.lookback < L and one.rows(K, E) <= MAX_COLUMNS]
    fit = [one for one in fit if lookback in (None, one.lookback)]
    most = min(5 if lookback is None else lookback, L - 1)
    return fit or [Looks(lookback=most, ordered=0)]


def _held_out(
    rest: RoutingTrace, held: RoutingTrace, layer: int, shapes: list[Looks], in_time
) -> tuple[np.ndarray, float]:
    """Squared errors (shapes, ridges), infinite if not tried in time, and the mean's, on one layer and some experts."""
    E, counts = rest.fingerprint.num_experts, count_tokens(rest, layer)
    judged = np.sort(np.random.default_rng(0).permutation(E)[:JUDGED])
    truth = np.zeros((held.num_tokens, E), np.float32)
    np.put_along_axis(truth, held.expert_ids[:, layer].astype(np.int64), 1, axis=1)
    truth = truth[:, judged]
    errors = np.full((len(shapes), len(RIDGES)), np.inf)
    first, tested = (design_of(part, layer, shapes[0], counts, loo=part is rest) for part in (rest, held))
    of_dense = dense_products(first)
    for s, shape in enumerate(shapes):  # shapes differ in their path alone
        if s > 0 and not in_time():
            break
        test = with_looks(tested, held, layer, shape)
        square, target = products(with_looks(first, rest, layer, shape), of_dense)
        for i, ridge in enumerate(RIDGES):
            predicted = apply_weights(test, ridge_weights(square, target[:, judged], ridge))
            errors[s, i] = ((predicted - truth) ** 2).sum()
    return errors, float(((first.mean[judged] - truth) ** 2).sum())


def predict(
    predictor: Predictor, profile: RoutingTrace, part: RoutingTrace, layer: int, rows: np.ndarray
) -> np.ndarray:
    """(rows, E) float: expected activations of the given tokens of `part`, which holds requests of `profile`.

    Each token's own occurrence is left out of its shares.
    """
    design = design_of(part, layer, predictor.looks, count_tokens(profile, layer), loo=True)
    design = replace(design, dense=design.dense[rows], active=design.active[rows])
    return apply_weights(design, predictor.layers[layer].weights)


def project(
    predictor: Predictor, trace: RoutingTrace, placement: Placement, embeddings: np.ndarray | None = None
) -> PathScores:
    """The predictor's tables for a placement: integer rows with one entry per rank, in units of 1 / `SCALE` experts.

    embeddings: (V, H); with them, tokens that were not profiled use the rows of their nearest profiled neighbour.
    """
    f = trace.fingerprint
    source, serving = resolve_tokens(trace.token_ids, f.vocab_size, embeddings)
    counts = count_tokens(trace, 0)
    token_rows = np.append(counts.row_of, np.int32(len(counts.rows) - 1))
    hosts = placement.hosts.transpose(0, 2, 1).astype(np.float64)  # (L, E, G)
    parts = [
        _project_layer(fitted, hosts[l], count_tokens(trace, l).rows, f.top_k, predictor.looks.rows(*_shape(trace)))
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
        lookback=predictor.looks.lookback,
        ordered=predictor.looks.ordered,
    )


def _project_layer(fitted: LayerFit, hosts: np.ndarray, counts, top_k: int, path_rows: int):
    """Token rows (N + 1, G) int8 and their shift, path rows (F, G) and history rows (2E + 1, G) int16 of a layer.

    hosts (E, G): the ranks that host each expert. counts (N + 1, E): of each profiled id, then zeros. path_rows: F.
    """
    intercept, previous, path, token_weights, running_weights = fitted.parts
    onto = token_weights @ hosts  # (E, G)
    base = intercept[0] @ hosts
    occurrences = counts.sum(axis=1, keepdims=True) / top_k
    kept = occurrences / (occurrences + TOKEN_PRIOR)  # the rest of a row is the mean, which adds nothing
    token = kept * ((counts @ onto) / np.maximum(occurrences, 1e-9) - fitted.mean @ onto) + base
    shift = max(int(np.ceil(np.log2(max(np.abs(token).max() * SCALE / 127, 1)))), 0)
    running = running_weights @ hosts
    running -= fitted.mean @ running / top_k  # so that experts drawn from the layer's mean add nothing
    history = np.concatenate([running, previous @ hosts])
    missing = np.zeros((path_rows - len(path), hosts.shape[1]))  # of layers that have fewer layers before them
    return (
        np.clip(np.rint(token * SCALE / 2**shift), -127, 127).astype(np.int8),
        shift,
        _int16(np.concatenate([path @ hosts, missing])),
        _int16(history),
    )


def _int16(rows: np.ndarray) -> np.ndarray:
    return np.clip(np.rint(rows * SCALE), -32767, 32767).astype(np.int16)
