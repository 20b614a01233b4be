"""Predict which experts a request will use from its prompt: a linear map fitted on the profile, projected on groups.

Two views of a prompt predict the (token, expert) rates of a request; their kernels are summed in one ridge regression:
    words    which token ids the prompt holds, weighted by inverse document frequency (idf) and normalised
    routing  what those ids, where they were themselves routed in the profile, routed to on average
Both are linear in the prompt's token ids, so the fitted predictor is one row of scores per token id, which has D
entries once the experts' groups are known. The online side looks up these rows only (`PromptScores`).

Weights are chosen by leave-group-out error: a request's near-duplicates are left out with it, in the regression and
in the routing averages, since duplicates would make any predictor look good. Requests are weighted by length.
"""

from dataclasses import dataclass

import numpy as np
from scipy.sparse import csr_matrix, diags

from semmoe.core import DECODE, RoutingTrace
from semmoe.numeric.jit import njit
from semmoe.requests.policy import PromptScores
from semmoe.traces.affinity import count

RIDGES = (0.03, 0.06, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 5.0)
ROUTING_WEIGHTS = (0.5, 1.0, 2.0)  # candidate weights of the second view, relative to the mean square of the first
UNSEEN = 0.3  # pseudo-occurrences of the mean that are mixed into a token's average routing
SKETCH = 1024  # random projections of the rates on which the weights are chosen if there are more columns
PRICE_LOAD, PRICE_STEPS = 1.05, 3000  # limit of a group's load over the mean; steps of the subgradient method


@dataclass(frozen=True, kw_only=True)
class RequestRates:
    """The fitted predictor, before experts have groups; `project` turns it into a PromptScores."""

    requests: np.ndarray  # (n,) the requests of the trace that it was fitted on
    lengths: np.ndarray  # (n,) routed tokens
    rates: np.ndarray  # (n, L * E) float32: share of each (layer, expert) in a request's pairs
    held_out: np.ndarray  # (n, L * E) float32: the prediction without the request's near-duplicates
    held_out_r2: float  # share of the rates' variance that is explained, requests weighted by length
    routing_weight: float
    ridge: float
    mean_length: float
    shape: tuple[int, int]  # (L, E)
    trace: RoutingTrace  # of `requests` alone
    words: csr_matrix  # (n, V + 1) normalised idf of each distinct prompt token
    idf: np.ndarray  # (V + 1,)
    mean_rate: np.ndarray  # (L * E,)
    routing: np.ndarray  # (n, L * E) float32: the second view
    routing_scale: float  # weight of the second view divided by its mean square
    inverse: np.ndarray  # (n, n) inverse of the regularised kernel

    @property
    def planning_rates(self) -> np.ndarray:
        """Rates (n, L, E) float32 for clustering: the mean of the true and the held-out predicted rates.

        Online only the predicted part can be followed, so that a placement by the true rates alone does worse.
        """
        return ((self.rates + self.held_out) / 2).reshape(-1, *self.shape)


def fit_request_rates(
    trace: RoutingTrace, duplicate_groups: np.ndarray, max_requests: int = 2048, seed: int = 0
) -> RequestRates:
    """Fit on the routed requests of a profile; duplicate_groups (R,) int: near-duplicates share a label.

    At most `max_requests` are used, drawn by `seed`, near-duplicates together, since the kernel has n * n entries and
    its decomposition costs n ** 3. Raises ValueError for fewer than two distinct requests.
    """
    R = trace.num_requests
    if duplicate_groups.shape != (R,):
        raise ValueError(f"{R} requests have duplicate groups of shape {duplicate_groups.shape}")
    requests = _choose(np.diff(trace.request_offsets), duplicate_groups, max_requests, seed)
    trace, groups = trace.select(requests), np.unique(duplicate_groups[requests], return_inverse=True)[1].ravel()
    if len(requests) <= 0 or groups.max() <= 0:
        raise ValueError("a request map needs at least two distinct routed requests")
    lengths, rates = np.diff(trace.request_offsets).astype(np.float64), request_rates(trace)
    mean_rate = ((lengths / lengths.sum()) @ rates).astype(np.float32)
    words, idf = _words(trace, groups)
    routing = _routing_view(trace, groups, words, mean_rate)
    search = _Regression(rates - mean_rate, lengths / lengths.mean(), groups)
    square = max(float(np.einsum("ij,ij->i", routing, routing).mean()), 1e-30)
    kernels = (words @ words.T).toarray(), (routing @ routing.T).astype(np.float64) / square
    weight, ridge = search.choose(*kernels, seed)
    inverse, held_out, error = search.fit(kernels[0] + weight * kernels[1], ridge)
    f = trace.fingerprint
    return RequestRates(
        requests=requests,
        lengths=lengths,
        rates=rates,
        held_out=held_out + mean_rate,
        held_out_r2=1 - error,
        routing_weight=weight,
        ridge=ridge,
        mean_length=mean_length(trace),
        shape=(f.num_layers, f.num_experts),
        trace=trace,
        words=words,
        idf=idf,
        mean_rate=mean_rate,
        routing=routing,
        routing_scale=weight / square,
        inverse=inverse,
    )


def project(fit: RequestRates, hosted: np.ndarray) -> PromptScores:
    """The scores for D groups; hosted (L, E, D): whether group d hosts the expert, or how near it is, from 0 to 1.

    Everything is projected on the D groups first, so that no array of size V * L * E is needed.
    """
    if hosted.shape[:2] != fit.shape:
        raise ValueError(f"hosted has shape {hosted.shape}, expected {(*fit.shape, 'D')}")
    member = hosted.reshape(-1, hosted.shape[2]).astype(np.float32)  # (L * E, D)
    coefficients = fit.inverse @ (fit.rates @ member - fit.mean_rate @ member)  # (n, D)
    scores = np.asarray(fit.words.T @ coefficients)
    toward = (fit.routing.T @ coefficients.astype(np.float32)) * fit.routing_scale  # (L * E, D)
    ids, averages = _average_routing(fit.trace, toward, fit.mean_rate)
    scores[ids] += averages
    profile = (fit.held_out @ member).astype(np.float64)
    return PromptScores(
        token_scores=(scores * fit.idf[:, None]).astype(np.float32),
        token_weights=(fit.idf**2).astype(np.float32),
        bias=(fit.mean_rate @ member).astype(np.float32),
        prices=load_prices(profile, fit.lengths, PRICE_LOAD).astype(np.float32),
        score_spread=float(profile.std()),
        mean_length=fit.mean_length,
    )


def request_rates(trace: RoutingTrace) -> np.ndarray:
    """(R, L * E) float32: a request's (token, expert) pairs as shares, which sum to 1 over all layers."""
    f, R = trace.fingerprint, trace.num_requests
    requests = trace.request_of_token()
    out = np.concatenate([_layer_counts(trace, requests, R, l) for l in range(f.num_layers)], axis=1)
    pairs = np.diff(trace.request_offsets) * float(f.num_layers * f.top_k)
    return out / np.maximum(pairs, 1)[:, None].astype(np.float32)


def load_prices(scores: np.ndarray, lengths: np.ndarray, limit: float) -> np.ndarray:
    """(D,) prices under which arg-max of score - price keeps every group's tokens within `limit` means.

    scores (R, D), lengths (R,). The prices are the dual variables of: maximise the score subject to
    load <= limit * mean. They are found by a subgradient method.
    """
    D = scores.shape[1]
    prices, step = np.zeros(D), 0.05 * scores.std()
    for k in range(PRICE_STEPS):
        load = np.bincount((scores - prices).argmax(axis=1), lengths, D) / lengths.sum() * D
        prices = np.maximum(prices + step * (load - limit) / np.sqrt(1 + k / 10), 0)
    return prices


def _choose(lengths: np.ndarray, groups: np.ndarray, most: int, seed: int) -> np.ndarray:
    """The routed requests in arrival order; of more than `most`, those of duplicate groups drawn at random."""
    routed = np.flatnonzero(lengths > 0)
    if len(routed) <= most:
        return routed
    labels, member, sizes = np.unique(groups[routed], return_inverse=True, return_counts=True)
    order = np.random.default_rng(seed).permutation(len(labels))
    fits = np.cumsum(sizes[order]) <= most
    return routed[np.isin(member.ravel(), order[fits])]


def mean_length(trace: RoutingTrace) -> float:
    """Mean number of decode tokens per request; of routed tokens if the trace has no decode."""
    decoded = int((trace.phase == DECODE).sum())
    return (decoded or trace.num_tokens) / trace.num_requests


def _words(trace: RoutingTrace, groups: np.ndarray) -> tuple[csr_matrix, np.ndarray]:
    """(n, V + 1) idf of every distinct prompt token, rows of norm 1, and (V + 1,) idf; id V is in no prompt.

    Near-duplicates count as one document.
    """
    n, columns = trace.num_requests, trace.fingerprint.vocab_size + 1
    holds = csr_matrix((np.ones(len(trace.prompt_ids)), trace.prompt_ids, trace.prompt_offsets), shape=(n, columns))
    holds.sum_duplicates()
    holds.data[:] = 1.0
    documents = csr_matrix((np.ones(n), (groups, np.arange(n)))) @ holds
    idf = np.log((documents.shape[0] + 1) / (documents.getnnz(axis=0) + 1.0))
    words = holds @ diags(idf)
    norm = np.sqrt(np.asarray(words.multiply(words).sum(axis=1)).ravel())
    return (diags(1 / np.maximum(norm, 1e-9)) @ words).tocsr(), idf


def _layer_counts(trace: RoutingTrace, row: np.ndarray, rows: int, layer: int) -> np.ndarray:
    """(rows, E) float32: (token, expert) pairs of each key at one layer; row (T,): the key of each token."""
    counts = count(row, trace.expert_ids[:, layer], rows, trace.fingerprint.num_experts)
    return counts.toarray().astype(np.float32)


def _routing_view(trace: RoutingTrace, groups: np.ndarray, words: csr_matrix, mean_rate: np.ndarray) -> np.ndarray:
    """(n, L * E) float32: the words' average routing minus the mean, leaving out the request's duplicate group."""
    L, E = trace.fingerprint.num_layers, trace.fingerprint.num_experts
    ids, row = np.unique(trace.token_ids, return_inverse=True)
    row = row.ravel().astype(np.int64)
    weights = words[:, ids].tocsr()
    weights.sort_indices()
    token_group = groups[trace.request_of_token()]
    order = np.argsort(token_group, kind="stable")
    first = np.searchsorted(token_group[order], np.arange(groups.max() + 2))
    # routed occurrences of each entry's id in its request's duplicate group
    keys, number = np.unique(token_group * len(ids) + row, return_counts=True)
    entries = np.repeat(groups, np.diff(weights.indptr)) * len(ids) + weights.indices
    places = np.minimum(np.searchsorted(keys, entries), len(keys) - 1)
    own = np.where(keys[places] == entries, number[places], 0)
    others = np.bincount(row)[weights.indices] - own
    weights.data = weights.data / (others + UNSEEN)
    centre = np.asarray(csr_matrix((weights.data * others, weights.indices, weights.indptr), weights.shape).sum(axis=1))
    out = np.empty((len(groups), L * E), np.float32)
    for l in range(L):
        part = np.asarray(weights @ _layer_counts(trace, row, len(ids), l)).astype(np.float64)
        experts = trace.expert_ids[order, l]
        _leave_out(weights.indptr, weights.indices, weights.data, groups, row[order], first, experts, len(ids), part)
        out[:, l * E : (l + 1) * E] = part / (L * trace.fingerprint.top_k) - centre * mean_rate[l * E : (l + 1) * E]
    return out


@njit()
def _leave_out(indptr, indices, weights, groups, row, first, experts, rows, out):
    """Subtract from out (n, E) the counts that the request's duplicate group contributed."""
    weight = np.zeros(rows)
    for i in range(len(groups)):
        for j in range(indptr[i], indptr[i + 1]):
            weight[indices[j]] = weights[j]
        for t in range(first[groups[i]], first[groups[i] + 1]):
            if weight[row[t]] != 0:
                for k in range(experts.shape[1]):
                    out[i, experts[t, k]] -= weight[row[t]]
        for j in range(indptr[i], indptr[i + 1]):
            weight[indices[j]] = 0


def _average_routing(trace: RoutingTrace, toward: np.ndarray, mean_rate: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The routed token ids (U,) and their average routing minus the mean, projected on `toward` (L * E, D): (U, D)."""
    L, E = trace.fingerprint.num_layers, trace.fingerprint.num_experts
    ids, row, occurrences = np.unique(trace.token_ids, return_inverse=True, return_counts=True)
    out = -np.outer(occurrences, mean_rate @ toward)
    for l in range(L):
        counts = _layer_counts(trace, row.ravel().astype(np.int64), len(ids), l)
        out += counts @ toward[l * E : (l + 1) * E] / (L * trace.fingerprint.top_k)
    return ids, out / (occurrences + UNSEEN)[:, None]


class _Regression:
    """Weighted kernel ridge regression of targets (n, C), with leave-group-out predictions."""

    def __init__(self, targets: np.ndarray, weights: np.ndarray, groups: np.ndarray) -> None:
        self.targets, self.weights = targets, weights
        sizes = np.bincount(groups)
        self.alone = np.flatnonzero(sizes[groups] == 1)
        self.together = [np.flatnonzero(groups == g) for g in np.flatnonzero(sizes > 1)]

    def choose(self, words, routing, seed) -> tuple[float, float]:
        """(routing weight, ridge) of the least leave-group-out error, on a sketch of targets with many columns."""
        targets = self.targets
        if targets.shape[1] > SKETCH:
            signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (targets.shape[1], SKETCH))
            targets = targets @ signs
        errors = {}
        for weight in ROUTING_WEIGHTS:
            basis, values = self._decompose(words + weight * routing)
            for ridge in RIDGES:
                errors[weight, ridge] = self._error(self._held_out(basis, values + ridge, targets), targets)
        return min(errors, key=lambda pair: errors[pair])

    def fit(self, kernel: np.ndarray, ridge: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Inverse (n, n) of the regularised kernel, held-out predictions (n, C) float32, and their relative error."""
        basis, values = self._decompose(kernel)
        held_out = np.empty(self.targets.shape, np.float32)
        for start in range(0, self.targets.shape[1], SKETCH):  # in blocks: the work is in float64
            block = np.s_[:, start : start + SKETCH]
            held_out[block] = self._held_out(basis, values + ridge, self.targets[block])
        return (basis / (values + ridge)) @ basis.T, held_out, self._error(held_out, self.targets)

    def _decompose(self, kernel: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """B, s with inverse(kernel + ridge / weights) = B diag(1 / (s + ridge)) B^T for every ridge."""
        root = np.sqrt(self.weights)
        values, vectors = np.linalg.eigh(root[:, None] * kernel * root)
        return root[:, None] * vectors, np.maximum(values, 0)

    def _held_out(self, basis: np.ndarray, values: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """Each row predicted without its group: y - inverse[I, I]^-1 (inverse y)[I] for the rows I of a group."""
        dual = (basis / values) @ (basis.T @ targets)
        out = np.empty_like(dual)
        i = self.alone
        out[i] = targets[i] - dual[i] / np.einsum("ij,ij,j->i", basis[i], basis[i], 1 / values)[:, None]
        for i in self.together:
            out[i] = targets[i] - np.linalg.solve((basis[i] / values) @ basis[i].T, dual[i])
        return out

    def _error(self, held_out: np.ndarray, targets: np.ndarray) -> float:
        """Weighted squared error relative to the weighted squares of the targets."""
        squares = self.weights @ np.einsum("ij,ij->i", targets, targets)
        wrong = held_out - targets
        return float(self.weights @ np.einsum("ij,ij->i", wrong, wrong) / max(squares, 1e-30))
