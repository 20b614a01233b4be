"""What a routing trace looks like, in statistics that a synthetic trace can be held against.

Nothing here knows of ranks, placements or plans: all of it is fixed before anything is solved. With x_t (E,) the 0/1
vector of the experts that token t chose at a layer, the likeness of a set of token pairs is

    (mean of x_t . x_s over the pairs - mean over pairs from different requests) / (K - mean over different requests)

which is 0 where the pairs have nothing in common and 1 where they always choose alike. It has no bias from rare tokens
or short requests, because no token is paired with itself.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix

from semmoe.core import RoutingTrace
from semmoe.traces.affinity import count, pair_count
from semmoe.traces.split import near_duplicates

CLUSTERS = (2, 4, 8, 16, 32)
QUANTILES = np.linspace(0, 1, 11)
LAGS = (1, 2, 4)  # layers apart
RANKS = 40  # points of the curve of token frequencies
FOLDS, RIDGES = 5, (0.01, 0.1, 1.0)


@dataclass(frozen=True, kw_only=True)
class Statistics:
    """Figures of one trace; those by layer have shape (L,)."""

    model: str
    num_experts: int
    top_k: int
    requests: int
    tokens: int
    shares: (
        np.ndarray
    )  # (L, E) how often each expert is chosen relative to the mean, from the most to the least popular
    token: np.ndarray  # likeness of two occurrences of a token id in different requests
    request: np.ndarray  # likeness of tokens of different ids in the two halves of a request
    path: np.ndarray  # nats that an expert tells of an expert at the layer before; 0 at the first layer
    path_decay: np.ndarray  # (2,) the same over 2 and 4 layers, as a share of the above, mean of layers
    together: np.ndarray  # nats by which the pairs of experts of a token differ from those of independent experts
    token_directions: (
        float  # how many directions the differences between frequent token ids have, a participation ratio
    )
    request_directions: float  # the same for differences between requests
    clusters: np.ndarray  # (5,) share of requests' differences that 2, 4, 8, 16, 32 clusters explain
    from_prompt: float  # share of requests' differences that a ridge regression on the prompt's ids explains
    recurrence: float  # chance of one id at two places of the halves of a request, beyond that in different requests
    distinct: float  # distinct token ids of a request per routed token, mean of requests
    vocabulary: int  # token ids that occur
    zipf: tuple[float, float]  # exponent and shift of frequency ~ (rank + shift) ** -exponent
    answer_lengths: np.ndarray  # (11,) quantiles of the routed tokens of a request
    prompt_lengths: np.ndarray  # (11,)


def fit(trace: RoutingTrace) -> Statistics:
    """Measure a trace. Nothing is drawn at random but the starts of the clusters, which have a fixed seed."""
    f, halves = trace.fingerprint, request_halves(trace)
    layers = [_layer(trace, l, halves) for l in range(f.num_layers)]
    first, second = half_rates(trace, halves)
    frequency = np.sort(np.bincount(trace.token_ids))[::-1]
    frequency = frequency[frequency > 0]
    return Statistics(
        model=f.model,
        num_experts=f.num_experts,
        top_k=f.top_k,
        requests=trace.num_requests,
        tokens=trace.num_tokens,
        **{name: np.array([layer[name] for layer in layers]) for name in layers[0]},
        path=np.array([0.0, *(path_information(trace, l, 1) for l in range(1, f.num_layers))]),
        path_decay=path_decay(trace),
        token_directions=directions(*token_rates(trace)),
        request_directions=directions(first, second),
        clusters=np.array([explained_by_clusters(first, second, k) for k in CLUSTERS]),
        from_prompt=explained_by_prompts(trace, first, second),
        recurrence=recurrence(trace, halves),
        distinct=float(np.mean([len(np.unique(ids)) / len(ids) for ids in _answers(trace)])),
        vocabulary=len(frequency),
        zipf=zipf_curve(frequency),
        answer_lengths=np.quantile(np.diff(trace.request_offsets), QUANTILES),
        prompt_lengths=np.quantile(np.diff(trace.prompt_offsets), QUANTILES),
    )


def _answers(trace: RoutingTrace) -> list[np.ndarray]:
    """The routed token ids of each request that has any."""
    rows = [trace.rows(r) for r in range(trace.num_requests)]
    return [trace.token_ids[own] for own in rows if own.stop > own.start]


def recurrence(trace: RoutingTrace, halves: np.ndarray) -> float:
    """Chance that two tokens of the two halves of a request have one id, less the chance in the whole trace."""
    f, request = trace.fingerprint, trace.request_of_token()
    shape, sides = (trace.num_requests, f.vocab_size), []
    for half in (0, 1):
        rows = halves == half
        sides.append(csr_matrix((np.ones(rows.sum()), (request[rows], trace.token_ids[rows])), shape=shape))
    pairs = np.prod([np.asarray(side.sum(axis=1)).ravel() for side in sides], axis=0)
    overall = np.bincount(trace.token_ids) / trace.num_tokens
    return _weighted(_dots(*sides), pairs, np.diff(trace.request_offsets).astype(float)) - float(overall @ overall)


def request_halves(trace: RoutingTrace) -> np.ndarray:
    """(T,) 0 for tokens in the first half of their request's rows, 1 for the others."""
    lengths = np.diff(trace.request_offsets)
    place = np.arange(trace.num_tokens) - np.repeat(trace.request_offsets[:-1], lengths)
    return (2 * place >= np.repeat(lengths, lengths)).astype(np.int64)


def _layer(trace: RoutingTrace, layer: int, halves: np.ndarray) -> dict[str, float | np.ndarray]:
    """Figures of one layer."""
    E, experts, request = trace.fingerprint.num_experts, trace.expert_ids[:, layer], trace.request_of_token()
    shares = np.sort(np.bincount(experts.ravel(), minlength=E))[::-1] / experts.size
    base = chance(experts, request, E)
    scale = experts.shape[1] - base
    return {
        "shares": shares * E,
        "token": (same_token(trace.token_ids, request, experts, E) - base) / scale,
        "request": (same_request(trace.token_ids, request, halves, experts, E) - base) / scale,
        "together": together(experts, E),
    }


def _dots(counts: csr_matrix, other: csr_matrix | None = None) -> np.ndarray:
    """Scalar product of each row of a sparse matrix with the same row of another, by default with itself."""
    counts = counts.astype(np.float64)
    product = counts.multiply(counts if other is None else other.astype(np.float64))
    return np.asarray(product.sum(axis=1)).ravel()


def chance(experts: np.ndarray, request: np.ndarray, num_experts: int) -> float:
    """Mean of x_t . x_s over all pairs of tokens of different requests; experts (T, K), request (T,)."""
    counts = count(request, experts, int(request.max()) + 1, num_experts)
    total, lengths = np.asarray(counts.sum(axis=0)).ravel().astype(np.float64), np.bincount(request).astype(np.float64)
    pairs = lengths.sum() ** 2 - (lengths**2).sum()
    return float((total @ total - _dots(counts).sum()) / max(pairs, 1.0))


def same_token(ids: np.ndarray, request: np.ndarray, experts: np.ndarray, num_experts: int) -> float:
    """Mean of x_t . x_s over pairs of one token id in different requests; every token weighs the same."""
    kinds, kind = np.unique(ids, return_inverse=True)
    _, first, both = np.unique(kind * (request.max() + 1) + request, return_index=True, return_inverse=True)
    inside = count(both, experts, len(first), num_experts)
    of_kind = kind[first]
    alike = _dots(count(kind, experts, len(kinds), num_experts)) - np.bincount(of_kind, _dots(inside))
    number = np.bincount(kind).astype(np.float64)
    pairs = number**2 - np.bincount(of_kind, np.bincount(both).astype(np.float64) ** 2)
    return _weighted(alike, pairs, number)


def same_request(
    ids: np.ndarray, request: np.ndarray, halves: np.ndarray, experts: np.ndarray, num_experts: int
) -> float:
    """Mean of x_t . x_s over pairs of different ids from the two halves of a request; every token weighs the same."""
    R, (_, kind) = int(request.max()) + 1, np.unique(ids, return_inverse=True)
    keys, both = np.unique(kind * R + request, return_inverse=True)
    early, late = halves == 0, halves == 1
    whole = [(request[part], experts[part], R) for part in (early, late)]
    by_id = [(both[part], experts[part], len(keys)) for part in (early, late)]
    alike = _dots(*(count(*one, num_experts) for one in whole))
    alike -= np.bincount(keys % R, _dots(*(count(*one, num_experts) for one in by_id)), R)
    pairs = np.prod([np.bincount(one[0], minlength=R) for one in whole], axis=0).astype(np.float64)
    pairs -= np.bincount(keys % R, np.prod([np.bincount(one[0], minlength=len(keys)) for one in by_id], axis=0), R)
    return _weighted(alike, pairs, np.bincount(request, minlength=R).astype(np.float64))


def _weighted(alike: np.ndarray, pairs: np.ndarray, weight: np.ndarray) -> float:
    """Mean of alike / pairs by weight, over the keys that have pairs."""
    some = pairs > 0
    if not some.any():
        return 0.0
    return float((weight[some] * alike[some] / pairs[some]).sum() / weight[some].sum())


def together(experts: np.ndarray, num_experts: int) -> float:
    """Nats by which pairs of different experts of a token differ from independent pairs of the same popularity."""
    pairs = pair_count(experts, experts, num_experts).astype(np.float64)
    np.fill_diagonal(pairs, 0.0)
    pairs /= pairs.sum()
    shares, weight = pairs.sum(axis=1), np.sqrt(pairs.sum(axis=1))
    for _ in range(50):  # independent pairs are weight[e] * weight[e'] for e != e', with these shares
        weight = np.sqrt(weight * shares / np.maximum(weight.sum() - weight, 1e-12))
    independent = np.outer(weight, weight)
    np.fill_diagonal(independent, 0.0)
    return _divergence(pairs, independent / independent.sum())


def path_information(trace: RoutingTrace, layer: int, lag: int) -> float:
    """Nats that an expert at `layer` and one `lag` layers before tell of each other."""
    E = trace.fingerprint.num_experts
    pairs = pair_count(trace.expert_ids[:, layer - lag], trace.expert_ids[:, layer], E).astype(np.float64)
    number, pairs = pairs.sum(), pairs / pairs.sum()
    bias = (E - 1) ** 2 / (2 * number)
    return _divergence(pairs, np.outer(pairs.sum(axis=1), pairs.sum(axis=0))) - bias


def _divergence(found: np.ndarray, expected: np.ndarray) -> float:
    some = found > 0
    return float((found[some] * np.log(found[some] / np.maximum(expected[some], 1e-300))).sum())


def path_decay(trace: RoutingTrace) -> np.ndarray:
    """(2,) the information over 2 and over 4 layers as a share of that over one layer, mean of layers."""
    L, out = trace.fingerprint.num_layers, []
    near = np.mean([path_information(trace, l, 1) for l in range(1, L)]) if L > 1 else 0.0
    for lag in LAGS[1:]:
        far = [path_information(trace, l, lag) for l in range(lag, L)]
        out.append(np.mean(far) / near if far and near > 0 else 0.0)
    return np.array(out)


def half_rates(trace: RoutingTrace, halves: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Two (R, L * E) arrays: rates of each request's halves above the mean of requests, weighted by root of length."""
    f, request = trace.fingerprint, trace.request_of_token()
    out = []
    for half in (0, 1):
        rows = np.flatnonzero(halves == half)
        counts = [count(request[rows], trace.expert_ids[rows, l], trace.num_requests, f.num_experts).toarray()
                  for l in range(f.num_layers)]  # fmt: skip
        rates = np.concatenate(counts, axis=1).astype(np.float64)
        out.append(rates / np.maximum(np.bincount(request[rows], minlength=trace.num_requests), 1)[:, None])
    mean, weight = (out[0] + out[1]).mean(axis=0) / 2, np.sqrt(np.diff(trace.request_offsets))[:, None]
    return (out[0] - mean) * weight, (out[1] - mean) * weight


def token_rates(trace: RoutingTrace, kinds: int = 512) -> tuple[np.ndarray, np.ndarray]:
    """Two (512, L * E) arrays: rates of the most frequent ids above their mean, in alternating requests."""
    f, request = trace.fingerprint, trace.request_of_token()
    frequent = np.argsort(-np.bincount(trace.token_ids), kind="stable")[:kinds]
    place = np.full(f.vocab_size, -1)
    place[frequent] = np.arange(len(frequent))
    out = []
    for side in (0, 1):
        rows = np.flatnonzero((request % 2 == side) & (place[trace.token_ids] >= 0))
        keys = place[trace.token_ids[rows]]
        counts = [count(keys, trace.expert_ids[rows, l], len(frequent), f.num_experts).toarray()
                  for l in range(f.num_layers)]  # fmt: skip
        out.append(np.concatenate(counts, axis=1) / np.maximum(np.bincount(keys, minlength=len(frequent)), 1)[:, None])
    mean = (out[0] + out[1]).mean(axis=0) / 2
    return out[0] - mean, out[1] - mean


def directions(first: np.ndarray, second: np.ndarray) -> float:
    """Participation ratio of the covariance that two noisy measurements (n, d) of the same n things share."""
    cross = first @ second.T
    return float(np.trace(cross) ** 2 / max((cross * cross.T).sum(), 1e-30))


def explained_by_clusters(first: np.ndarray, second: np.ndarray, k: int) -> float:
    """Share of the differences that k-means on one half explains in the other; first, second (R, d)."""
    if len(first) <= k:
        return 1.0
    label = min((_kmeans(first, k, seed) for seed in range(4)), key=lambda found: found[0])[1]
    member = np.eye(k)[label]
    centres = member.T @ first / np.maximum(member.sum(axis=0), 1)[:, None]
    return float((centres[label] * second).sum() / max((first * second).sum(), 1e-30))


def _kmeans(points: np.ndarray, k: int, seed: int) -> tuple[float, np.ndarray]:
    """(sum of squared distances, (R,) labels) of Lloyd's iterations from k points drawn at random."""
    centres = points[np.random.default_rng(seed).choice(len(points), k, replace=False)]
    for _ in range(25):
        distance = (centres**2).sum(axis=1) - 2 * points @ centres.T
        label = distance.argmin(axis=1)
        member = np.eye(k)[label]
        centres = member.T @ points / np.maximum(member.sum(axis=0), 1)[:, None]
    return float(distance.min(axis=1).sum()), label


def explained_by_prompts(trace: RoutingTrace, first: np.ndarray, second: np.ndarray) -> float:
    """Share of requests' differences that their prompts predict for unseen requests, near-duplicates on one side."""
    kernel, fold = prompt_kernel(trace), near_duplicates(trace) % FOLDS
    signal = max((first * second).sum(), 1e-30)
    best = 0.0
    for ridge in RIDGES:
        guess = np.zeros_like(first)
        for k in range(FOLDS):
            known, unseen = fold != k, fold == k
            weights = np.linalg.solve(kernel[np.ix_(known, known)] + ridge * np.eye(known.sum()), first[known])
            guess[unseen] = kernel[np.ix_(unseen, known)] @ weights
        best = max(best, float((2 * guess * second - guess**2).sum() / signal))
    return best


def prompt_kernel(trace: RoutingTrace) -> np.ndarray:
    """(R, R) cosine of prompts' token counts, log(1 + count) weighted by the log of inverse request frequency."""
    request = np.repeat(np.arange(trace.num_requests), np.diff(trace.prompt_offsets))
    shape = (trace.num_requests, trace.fingerprint.vocab_size)
    counts = csr_matrix((np.ones(len(request)), (request, trace.prompt_ids)), shape=shape)
    rarity = np.log(shape[0] / np.maximum(np.bincount(counts.indices, minlength=shape[1]), 1))
    counts.data = np.log1p(counts.data) * rarity[counts.indices]
    gram = np.asarray((counts @ counts.T).todense())
    norm = np.sqrt(np.maximum(np.diag(gram), 1e-12))
    return gram / np.outer(norm, norm)


def zipf_curve(frequency: np.ndarray) -> tuple[float, float]:
    """Exponent and shift of the Zipf-Mandelbrot curve nearest to falling frequencies (V,), at even log ranks."""
    ranks = np.unique(np.geomspace(1, len(frequency), RANKS).astype(np.int64))
    target, best = np.log(frequency[ranks - 1]), (np.inf, 1.0, 0.0)
    for shift in (0.0, 0.5, 1, 2, 4, 8, 16, 32):
        slope, level = np.polyfit(np.log(ranks + shift), target, 1)
        error = float(((slope * np.log(ranks + shift) + level - target) ** 2).sum())
        best = min(best, (error, -float(slope), float(shift)))
    return best[1], best[2]
