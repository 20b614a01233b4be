"""Attention-DP: cluster requests and experts together over all layers, so that a request's experts are in its group.

The method alternates two steps from seeded starts. Given the groups of the requests, the experts of each layer are
assigned exactly (an assignment problem with E / D slots per group, rounded up). Given the experts, requests move and
swap under a limit on the tokens per group. Neither step lowers the objective, the share of (token, expert) pairs in
their request's group.

A request has one label for all layers: solved layer by layer, the labels of different layers would disagree and the
share would fall to that of chance. The time of a step is linear in requests and layers, and depends on tokens only
through the rates.
"""

import numpy as np
from scipy.optimize import linear_sum_assignment, quadratic_assignment

from semmoe.numeric.assignment import equal_groups, improve_assignment, one_hot
from semmoe.numeric.jit import njit
from semmoe.placement.search import InTime

STEPS = 30  # most alternations of one start; it ends earlier when the objective no longer rises
SWEEPS = 30  # passes over the requests in one step
TOKEN_LIMIT = 1.1  # most tokens of a group relative to the mean, as far as whole requests allow
KICK = 0.2  # share of the requests that every second start redraws from the best result so far


def cocluster_requests(
    rates: np.ndarray,
    lengths: np.ndarray,
    num_groups: int,
    starts: int = 100,
    seed: int = 0,
    token_limit: float = TOKEN_LIMIT,
    in_time: InTime = lambda: True,
) -> tuple[np.ndarray, np.ndarray]:
    """(L, E) int64: the group of each expert, at most E / D, rounded up, per group; and (R,) int64: of each request.

    rates: (R, L, E) float32, a request's (token, expert) pairs per token; only their proportions matter. Rates that
    are partly predicted (`requests.predictor.RequestRates.planning_rates`) give better placements than the true ones,
    since online only the predicted part can be followed.
    lengths: (R,) tokens of each request. token_limit: most tokens of a group relative to the mean, as far as whole
    requests allow. in_time: whether a further start may begin. Every second start begins near the best result so far;
    the result with most local pairs is kept.
    """
    rng = np.random.default_rng(seed)
    problem = _Problem(rates, lengths, num_groups, token_limit)
    best = problem.alternate(problem.start(rng))
    for i in range(1, starts):
        if not in_time():
            break
        found = problem.alternate(problem.kick(best[2], rng) if i % 2 else problem.start(rng))
        if found[0] > best[0]:
            best = found
    return best[1].reshape(rates.shape[1:]), best[2]


def recluster_requests(
    rates: np.ndarray,
    lengths: np.ndarray,
    gains: np.ndarray,
    top_k: int,
    move_cost: float,
    seed: int = 0,
    in_time: InTime = lambda: True,
) -> np.ndarray:
    """(R,) int64: the group of each request, where experts are placed already and moves cost something.

    gains (L, E, D): of a pair of each expert in each group. move_cost: of an expert in another group than
    before, in local pairs per token of its layer. Other arguments as `cocluster_requests` takes them. Clusters near the
    placement are compared with those found anew, whose groups get the numbers that move fewest experts; without a limit
    on tokens, drifted requests would all prefer the groups that suit them least badly.
    """
    problem = _Problem(rates, lengths, gains.shape[2], TOKEN_LIMIT)
    flat = gains.reshape(-1, problem.groups).astype(np.float32)
    at_home = problem.rates @ flat
    near = problem.alternate(problem.place_requests(at_home, at_home.argmax(axis=1)))
    experts, requests = cocluster_requests(rates, lengths, problem.groups, seed=seed, in_time=in_time)
    overlap = one_hot(experts.ravel(), problem.groups).T @ flat
    number = linear_sum_assignment(-overlap)[1]
    found = [near[1:], (number[experts.ravel()], number[requests])]

    def value(experts: np.ndarray, requests: np.ndarray) -> float:
        """Local pairs per token and layer, less the moves."""
        moved = 1 - flat[np.arange(len(experts)), experts]
        shape = rates.shape[1:]
        return top_k * locality(rates, lengths, experts.reshape(shape), requests) - move_cost * moved.sum() / shape[0]

    return max(found, key=lambda pair: value(*pair))[1]


def locality(rates: np.ndarray, lengths: np.ndarray, expert_groups: np.ndarray, request_groups: np.ndarray) -> float:
    """The objective: share of the pairs whose expert is in the request's group, requests weighted by length."""
    home = expert_groups[None] == request_groups[:, None, None]
    weighted = rates * lengths[:, None, None]
    return float((weighted * home).sum() / max(weighted.sum(), 1e-30))


def pairs_between(
    rates: np.ndarray, lengths: np.ndarray, expert_groups: np.ndarray, request_groups: np.ndarray, num_groups: int
) -> np.ndarray:
    """(D, D) pairs of each group's requests with each group's experts; arguments as `locality` takes them."""
    used = (rates * lengths[:, None, None]).reshape(len(rates), -1) @ one_hot(expert_groups.ravel(), num_groups)
    return (one_hot(request_groups, num_groups).T @ used).astype(np.float64)


def seat_groups(pairs: np.ndarray, costs: np.ndarray) -> np.ndarray:
    """Return a new number (D,) for each group, which lowers the cost of the pairs (D, D) between groups.

    costs (D, D): of a pair between two numbers. So groups that use each other's experts come to one node, and the group
    with least traffic behind a slow link. All groups weigh the same, as when they serve. This quadratic assignment
    swaps numbers two by two, from the present ones and from those of SciPy's `quadratic_assignment`.
    """
    pairs = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1e-30)
    drawn = {"rng": np.random.default_rng(0)}
    starts = np.arange(len(costs)), quadratic_assignment(pairs, costs, options=drawn)["col_ind"]
    ends = (_swap_seats(pairs, costs, start.astype(np.int64)) for start in starts)
    return min(ends, key=lambda seats: (pairs * costs[np.ix_(seats, seats)]).sum())


@njit(nogil=True)
def _swap_seats(pairs, costs, seats):
    """Let two groups change seats while the cost of all pairs falls by it."""
    D, least, better = len(seats), -1e-9 * (pairs * costs).sum(), True
    while better:
        better = False
        for a in range(D):
            for b in range(a):
                x, y = seats[a], seats[b]
                change = (pairs[a, b] - pairs[b, a]) * (costs[y, x] - costs[x, y])
                change += (pairs[a, a] - pairs[b, b]) * (costs[y, y] - costs[x, x])
                for k in range(D):
                    if k not in (a, b):
                        z = seats[k]
                        change += (pairs[a, k] - pairs[b, k]) * (costs[y, z] - costs[x, z])
                        change += (pairs[k, a] - pairs[k, b]) * (costs[z, y] - costs[z, x])
                if change < least:
                    seats[a], seats[b], better = y, x, True
    return seats


class _Problem:
    """The data that all starts share: flat rates and limits."""

    def __init__(self, rates, lengths, num_groups, token_limit) -> None:
        (R, self.layers, self.experts), self.groups = rates.shape, num_groups
        self.rates = np.ascontiguousarray(rates, np.float32).reshape(R, -1)
        self.lengths = np.asarray(lengths, np.float64)
        self.weighted = self.rates * self.lengths[:, None].astype(np.float32)
        self.pairs = max(float(self.weighted.sum(dtype=np.float64)), 1e-30)
        self.capacity = np.full(num_groups, token_limit * self.lengths.sum() / num_groups)

    def start(self, rng: np.random.Generator) -> np.ndarray:
        """(R,) groups around D requests drawn at random: each request joins the one most similar to it."""
        seeds = rng.choice(len(self.rates), self.groups, replace=len(self.rates) < self.groups)
        groups = rng.integers(self.groups, size=len(self.rates))
        mean = self.rates.mean(axis=0)
        centres = self.rates[seeds] - mean
        likeness = (self.rates - mean) @ (centres / (np.linalg.norm(centres, axis=1, keepdims=True) + 1e-9)).T
        return self.place_requests(likeness, groups)

    def kick(self, groups: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """(R,) `groups`, the best so far, with a share `KICK` of them drawn again at random."""
        drawn = rng.random(len(groups)) < KICK
        return np.where(drawn, rng.integers(self.groups, size=len(groups)), groups)

    def alternate(self, request_groups: np.ndarray) -> tuple[float, np.ndarray, np.ndarray]:
        """(local share, (L * E,) expert groups, (R,) request groups) of the best alternation."""
        best = None
        for _ in range(STEPS):
            expert_groups = self.place_experts(request_groups)
            at_home = self.rates @ one_hot(expert_groups, self.groups)
            request_groups = self.place_requests(at_home, request_groups)
            chosen = np.take_along_axis(at_home, request_groups[:, None], axis=1)[:, 0]
            share = float(chosen @ self.lengths) / self.pairs
            if best is not None and share <= best[0] + 1e-7:
                break
            best = (share, expert_groups, request_groups)
        assert best is not None
        return best

    def place_requests(self, value: np.ndarray, groups: np.ndarray) -> np.ndarray:
        """(R,) groups that improve on `groups` under the token limit; value (R, D): gain per token in each group."""
        work = np.repeat(self.lengths[:, None], self.groups, axis=1)
        return improve_assignment(value * work, work, self.capacity, groups.copy(), SWEEPS)

    def place_experts(self, request_groups: np.ndarray) -> np.ndarray:
        """(L * E,) expert groups with the most local pairs, at most E / D, rounded up, of each layer per group."""
        pairs = (self.weighted.T @ one_hot(request_groups, self.groups)).astype(np.float64)
        by_layer = pairs.reshape(self.layers, self.experts, self.groups)
        return np.concatenate([equal_groups(layer) for layer in by_layer])
