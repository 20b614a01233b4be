"""Attention-DP, online: send each request to the group that should host most of its experts, under a bound on load.

Score. A prompt's score for group d estimates the share of its (token, expert) pairs that d hosts (`PromptScores`).

Load. One ledger holds the work of every group in decode tokens: a request enters with its expected work, and `finish`
corrects that to its actual work. The ledger can measure two kinds of load:
    keep_finished=True   all work so far: the load that a replay measures
    keep_finished=False  running work: finished requests leave; it decides how long a live engine's next step takes

Bound. No assignment takes a group further ahead of the mean of all groups than

    allowance = max(lead_requests * mean work of a request / D, lead_share * mean work of a group)         (in tokens)

where a request's work is that of its prompt and of the decode tokens expected of it, and its mean is over all requests
so far; so that with n requests in the ledger max / mean is at most 1 + max(lead_share, lead_requests / n). The bound is
loose for few requests, which cannot be balanced anyway, and a fixed share for many. Only the least loaded group is
exempt: it accepts a request larger than the allowance. When `finish` corrects a length, a group may exceed its bound;
it then gets no further request until it is within the bound again. A ledger of running requests stays short, so an
engine sets keep_finished=False and lead_requests to a few times D.

Price. Among the allowed groups the arg-max of score - price is chosen, and among equals the least loaded; without
scores and prices this is the least-loaded rule. Prices start as the profile's dual prices and rise, for every mean
request by which a group's expected work exceeds the mean, by

    feedback * score_spread + lead_price / sqrt(max(mean requests of a group, 1))

The first is for a ledger of all work; prices that followed true lengths, which are noise, would lose locality. The
second is what running requests cost, in shares of a request's pairs: a pass takes as long as its fullest group, which
one more request makes of a group the less likely the more requests run.

Prefix caches. A policy with a `cache_weight` adds to the score of a group that weight times the share of the prompt
that the group has cached. The caller states what groups have cached; otherwise it is estimated from the prompts
assigned so far (`PrefixIndex`).

Window. Requests that are assigned together (`admit_window`) are improved by moves and swaps among them, which raise
the total value.

Worked example, two groups, requests of work 10, lead_requests 2 (allowance 10 tokens), no share, feedback or prices:
requests that all prefer group 0 go to groups 0, 0, 1, 0, 1, ..., since group 0 may be 10 tokens ahead of the mean.
After two requests it is (20, and the mean is 10), so the third goes to group 1, and the fourth to group 0 (30, 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.capacity import improve_assignment
from semmoe.jit import njit
from semmoe.requests.policy import PromptScores
from semmoe.requests.prefix import PrefixIndex
from semmoe.requests.scheduler import Assigned, RequestScheduler

SWEEPS = 20  # passes over a window
LEAST_WORK = 1e-9  # of a request, in tokens


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    lead_requests: float = 40.0  # bound on a group's lead for a short ledger: requests of mean work, times D
    lead_share: float = 0.085  # bound on a group's lead for a long ledger: share of the mean work of a group
    feedback: float = 0.02  # price per mean request ahead of the mean, in standard deviations of the score
    lead_price: float = 0.0  # the same, in shares of a request's pairs, while a group has one request on average
    prompt_cost: float = 0.0  # work of one prompt token that is not cached, in decode tokens
    cache_tokens: int = 1 << 18  # prompt tokens that the prefix cache of one group holds
    keep_finished: bool = True  # the ledger holds all work so far; False: running work only

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative: {value}")


@dataclass(frozen=True)
class _Arrived:
    request: int
    scores: np.ndarray  # (D,)
    expected_tokens: float
    prompt_work: np.ndarray  # (D,)
    prompt_ids: np.ndarray | None  # for the prefix index; None if there is no index


class CapacityScheduler:
    """Requests to attention groups, one at a time (`assign`, `admit`) or in windows. Not thread-safe."""

    keeps_ledger: ClassVar[bool] = True

    def __init__(self, table: PromptScores, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self._scores = np.ascontiguousarray(table.token_scores, np.float32)
        self._weights = np.ascontiguousarray(table.token_weights, np.float32)
        rows, D = self._scores.shape
        if self._weights.shape != (rows,):
            raise ValueError(f"token_weights has shape {self._weights.shape}, expected {(rows,)}")
        if not table.mean_length > 0:
            raise ValueError(f"mean_length must be positive, not {table.mean_length}")
        self._bias, self._prices = table.bias.astype(np.float64), table.prices.astype(np.float64)
        if not self._bias.shape == self._prices.shape == (D,):
            raise ValueError(f"bias and prices must have {D} entries")
        self.mean_length = float(table.mean_length)
        self._cache_weight = float(table.cache_weight)
        self._prefixes = PrefixIndex(D, self.settings.cache_tokens) if self._cache_weight > 0 else None
        self._price_per_request = self.settings.feedback * table.score_spread
        self._seen, self._mean_work = 0, 0.0  # requests, and the mean of their work
        self._stamp, self._tick = np.zeros(rows, np.int64), 0
        self._arrivals = 0
        self._work, self._expected = np.zeros(D), np.zeros(D)  # the ledger with and without the corrections of `finish`
        self.unknown_tokens = 0  # prompt tokens outside the vocabulary, so far

    @property
    def work(self) -> np.ndarray:
        """(D,) the ledger: decode tokens of each group."""
        return self._work.copy()

    @property
    def arrivals(self) -> int:
        """Requests so far."""
        return self._arrivals

    def score(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        """(D,) float64: estimated share of the request's pairs that each group hosts."""
        self._tick += 1
        ids = np.asarray(prompt_ids, np.int64)
        out = self._bias.copy()
        self.unknown_tokens += _add_scores(ids, self._scores, self._weights, self._stamp, self._tick, out)
        return out

    def assign(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
        cached_tokens: np.ndarray | None = None,
    ) -> int:
        """The group for one request, assigned at once: same as `admit`, for callers that never call `finish`."""
        return self.admit(prompt_ids, expected_tokens, cached_tokens).group

    def admit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
        cached_tokens: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> Assigned:
        """Assign one request at once.

        expected_tokens: decode tokens, by default the profile's mean. cached_tokens (D,): prompt tokens in the prefix
        cache of each group; they add `cache_weight` times their share to its score and cost no work. If it is not
        given, a policy with a cache_weight estimates it by a PrefixIndex of the prompts assigned so far. allowed (D,)
        bool: groups that may be chosen and whose loads are compared; by default all.
        """
        return self._place([self._arrive(prompt_ids, expected_tokens, cached_tokens)], allowed=allowed)[0]

    def assign_window(self, prompts: Sequence[Sequence[int] | np.ndarray]) -> list[int]:
        """The groups of several requests, assigned together at once."""
        return [assigned.group for assigned in self.admit_window(prompts)]

    def admit_window(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        expected_tokens: float | Sequence[float] | None = None,
        allowed: np.ndarray | None = None,
    ) -> list[Assigned]:
        """Same as `assign_window`, but returns handles for `finish`; expected_tokens: of all or of each, as in `admit`,
        and `allowed` too.
        """
        each = expected_tokens if isinstance(expected_tokens, Sequence) else [expected_tokens] * len(prompts)
        window = [self._arrive(prompt, tokens, None) for prompt, tokens in zip(prompts, each, strict=True)]
        return self._place(window, allowed=allowed)

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Correct the ledger for a request that ended after `actual_tokens` decode tokens. Call it once per handle."""
        self._work[assigned.group] -= assigned.work
        if self.settings.keep_finished:
            self._work[assigned.group] += assigned.prompt_work + actual_tokens
        else:
            self._expected[assigned.group] -= assigned.work

    def follow(self, before: RequestScheduler) -> None:
        """Begin with the running work of another scheduler, whose handles `finish` then takes too."""
        self._work, self._expected = before.work, before.work
        self._arrivals = before.arrivals

    def _arrive(self, prompt_ids, expected_tokens, cached_tokens) -> _Arrived:
        expected = self.mean_length if expected_tokens is None else float(expected_tokens)
        if not expected >= 0:
            raise ValueError(f"expected_tokens must not be negative: {expected_tokens}")
        scores, uncached = self.score(prompt_ids), np.full(len(self._work), float(len(prompt_ids)))
        if cached_tokens is None and self._prefixes is not None:
            cached_tokens = self._prefixes.cached_tokens(prompt_ids)
        if cached_tokens is not None:
            cached = np.asarray(cached_tokens, np.float64)
            if cached.shape != scores.shape:
                raise ValueError(f"cached_tokens has shape {cached.shape}, expected {scores.shape}")
            scores += self._cache_weight * cached / max(len(prompt_ids), 1)
            uncached = np.maximum(uncached - cached, 0)
        self._arrivals += 1
        self._seen += 1
        prompt_work = self.settings.prompt_cost * uncached
        self._mean_work += (expected + prompt_work.min() - self._mean_work) / self._seen
        prompt = None if self._prefixes is None else np.asarray(prompt_ids, np.int64)
        return _Arrived(self._arrivals - 1, scores, expected, prompt_work, prompt)

    def _place(self, window: list[_Arrived], allowed: np.ndarray | None = None) -> list[Assigned]:
        """Assign `window` together and enter its requests in the ledger."""
        if not window:
            return []
        columns = np.arange(len(self._work)) if allowed is None else np.flatnonzero(allowed)
        if len(columns) <= 0:
            raise ValueError("no group is allowed")
        scores = np.stack([request.scores for request in window])
        expected = np.array([request.expected_tokens for request in window])
        prompt_work = np.stack([request.prompt_work for request in window])
        work = prompt_work + expected[:, None]
        lead, live = self._expected - self._expected[columns].mean(), self._live_price(columns)
        price = self._price_per_request / max(self._mean_work, LEAST_WORK) + live
        value = _of(columns, scores - self._prices - price * lead)
        costs, room = _of(columns, work), (self._limit(work, columns) - self._work)[columns]
        chosen = _greedy(value, costs, room, self._work[columns], live)
        if len(window) > 1:
            if live > 0:  # what follows knows no prices of its own: it exchanges requests of about equal work
                given = np.bincount(chosen, costs[np.arange(len(chosen)), chosen], len(columns))
                room = np.minimum(room, given + 0.5 * self._mean_work)
            chosen = improve_assignment(value * (costs.min(axis=1)[:, None] + 1e-9), costs, room, chosen, SWEEPS)
        groups = columns[chosen]
        out = [
            Assigned(w.request, int(d), float(work[i, d]), float(prompt_work[i, d]))
            for i, (w, d) in enumerate(zip(window, groups, strict=True))
        ]
        for request, assigned in zip(window, out, strict=True):
            self._work[assigned.group] += assigned.work
            self._expected[assigned.group] += assigned.work
            if self._prefixes is not None and request.prompt_ids is not None:
                self._prefixes.insert(request.prompt_ids, assigned.group)
        return out

    def _live_price(self, columns: np.ndarray) -> float:
        """What a token of work ahead of the mean costs while requests run, in shares of a request's pairs."""
        request = max(self._mean_work, LEAST_WORK)
        return self.settings.lead_price / request / max(float(self._expected[columns].mean()) / request, 1.0) ** 0.5

    def _limit(self, work: np.ndarray, columns: np.ndarray) -> float:
        """The most work that any of the groups `columns` may have after the requests of `work` (W, D) are assigned.

        work holds the work of each request in each group; the bound uses the least of each request.
        """
        D = len(columns)
        mean = (self._work[columns].sum() + work[:, columns].min(axis=1).sum()) / D
        return float(mean + max(self.settings.lead_requests * self._mean_work / D, self.settings.lead_share * mean))


def _of(columns: np.ndarray, array: np.ndarray) -> np.ndarray:
    """(W, C): the given columns of an array (W, D), in the memory layout that the compiled functions require."""
    return np.ascontiguousarray(array[:, columns])


@njit()
def _add_scores(ids, scores, weights, stamp, tick, out):
    """Add a prompt's score to `out` (D,); returns how many of its ids are outside the vocabulary.

    stamp (V + 1,): the tick at which an id was last seen, so that each id counts once and nothing must be cleared.
    """
    last = len(weights) - 1
    unknown, weight = 0, 0.0
    total = np.zeros(len(out))
    for token in ids:
        row = token
        if token < 0 or token >= last:
            row = last
            unknown += 1
        if stamp[row] != tick:
            stamp[row] = tick
            weight += weights[row]
            for d in range(len(total)):
                total[d] += scores[row, d]
    if weight > 0:
        out += total / np.sqrt(weight)
    return unknown


@njit()
def _greedy(value, work, room, ledger, price):
    """(W,) groups, chosen in order of arrival: the group of most value that has room (D,), else the least loaded group.

    Each token that earlier requests of the window bring to a group lowers its value by `price`. Among groups of equal
    value the least loaded one is chosen, among those that are equally loaded that of most value.
    """
    W, D = value.shape
    added, groups = np.zeros(D), np.empty(W, np.int64)
    for i in range(W):
        best, least, worth = -1, 0, value[i] - price * added
        for d in range(D):
            load, lightest = ledger[d] + added[d], ledger[least] + added[least]
            if load < lightest - 1e-9 or (load <= lightest + 1e-9 and worth[d] > worth[least]):
                least = d
            if added[d] + work[i, d] <= room[d] + 1e-9:
                lighter = best >= 0 and worth[d] == worth[best] and load < ledger[best] + added[best]
                if best < 0 or worth[d] > worth[best] or lighter:
                    best = d
        groups[i] = least if best < 0 else best
        added[groups[i]] += work[i, groups[i]]
    return groups
