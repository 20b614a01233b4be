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

Price. Among the groups within the bound the arg-max of score - price is chosen, and among equals the least loaded;
without scores and prices this is the least-loaded rule. Prices start as the profile's dual prices and rise, for every
mean request by which a group's expected work exceeds the mean, by

    feedback * score_spread + lead_price / sqrt(max(mean requests of a group, 1))

The first is for a ledger of all work; prices that followed true lengths, which are noise, would lose locality. The
second is what running requests cost, in shares of a request's pairs: a pass takes as long as its fullest group, which
one more request makes of a group the less likely the more requests run.

Waves. An engine runs at most N (`most_at_once`) requests of a group at once. If one group gets few long requests and
another many short ones of as much work, its first N end sooner, and it decodes while the other reads prompts. A
request's excess is its work beyond the ledger's mean request, in mean requests, and a group's is the sum over its
requests. A request's value in a group falls by excess_price * its excess * the group's, in full once groups have N
requests and in proportion before. At a price of .8 twice the mean work then costs .8 of the pairs at an excess of 1.

Window. Requests that are assigned together are improved by moves and swaps among them, which raise the total value.

Worked example, two groups, requests of work 10, lead_requests 2 (allowance 10 tokens), no share, feedback or prices:
requests that all prefer group 0 go to groups 0, 0, 1, 0, 1, ..., since group 0 may be 10 tokens ahead of the mean.
After two requests it is (20, and the mean is 10), so the third goes to group 1, and the fourth to group 0 (30, 10).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.numeric.assignment import improve_assignment
from semmoe.requests.policy import PromptScores
from semmoe.requests.scheduler import Assigned, Prompt, RequestScheduler
from semmoe.traces.affinity import known_rows

SWEEPS = 20  # passes over a window
LEAST_WORK = 1e-9  # of a request, in tokens


@dataclass(frozen=True, kw_only=True)
class SchedulerSettings:
    lead_requests: float = 40.0  # bound on a group's lead for a short ledger: requests of mean work, times D
    lead_share: float = 0.085  # bound on a group's lead for a long ledger: share of the mean work of a group
    feedback: float = 0.02  # price per mean request ahead of the mean, in standard deviations of the score
    lead_price: float = 0.0  # the same, in shares of a request's pairs, while a group has one request on average
    excess_price: float = 0.0  # of a request's excess times its group's, in shares of a request's pairs
    prompt_cost: float = 0.0  # work of a prompt token, in decode tokens
    keep_finished: bool = True  # the ledger holds all work so far; False: running work only

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value >= 0:
                raise ValueError(f"{name} must not be negative: {value}")


@dataclass(frozen=True)
class _Arrived:
    request: int
    scores: np.ndarray  # (D,)
    work: float
    prompt_work: float


class CapacityScheduler(RequestScheduler):
    """Requests to attention groups under a bound on load. Not thread-safe."""

    keeps_ledger: ClassVar[bool] = True

    def __init__(self, table: PromptScores, settings: SchedulerSettings | None = None) -> None:
        self.settings = settings or SchedulerSettings()
        self._scores = np.ascontiguousarray(table.token_scores, np.float32)
        self._weights = np.ascontiguousarray(table.token_weights, np.float32)
        rows, D = self._scores.shape
        super().__init__(D)
        if self._weights.shape != (rows,):
            raise ValueError(f"token_weights has shape {self._weights.shape}, expected {(rows,)}")
        self._bias, self._prices = table.bias.astype(np.float64), table.prices.astype(np.float64)
        if not self._bias.shape == self._prices.shape == (D,):
            raise ValueError(f"bias and prices must have {D} entries")
        self.mean_length = float(table.mean_length)
        self._price_per_request = self.settings.feedback * table.score_spread
        self._seen, self._mean_work = 0, LEAST_WORK  # requests, and the mean of their work
        self._work, self._expected = np.zeros(D), np.zeros(D)  # the ledger with and without the corrections of `finish`

    @property
    def work(self) -> np.ndarray:
        """(D,) the ledger: decode tokens of each group."""
        return self._work.copy()

    def score(self, prompt_ids: Prompt) -> np.ndarray:
        """(D,) float64: estimated share of the request's pairs that each group hosts."""
        rows = np.sort(known_rows(np.asarray(prompt_ids, np.int64), len(self._weights)))
        self.unknown_tokens += int(np.count_nonzero(rows == len(self._weights) - 1))
        distinct = rows[np.diff(rows, prepend=-1) > 0]  # NumPy's `unique` takes eight times as long
        weight = self._weights[distinct].sum(dtype=np.float64)
        if weight <= 0:
            return self._bias.copy()
        total: np.ndarray = self._scores[distinct].sum(axis=0, dtype=np.float64)
        return self._bias + total / np.sqrt(weight)

    def admit(self, prompts: Sequence[Prompt], expected_tokens: Sequence[float] | None = None) -> list[Assigned]:
        each = [self.mean_length] * len(prompts) if expected_tokens is None else expected_tokens
        return self._place([self._arrive(prompt, tokens) for prompt, tokens in zip(prompts, each, strict=True)])

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Correct the ledger for a request that ended after `actual_tokens` decode tokens. Call it once per handle."""
        self._work[assigned.group] -= assigned.work
        if self.settings.keep_finished:
            self._work[assigned.group] += assigned.prompt_work + actual_tokens
        else:
            self._expected[assigned.group] -= assigned.work
            self.running[assigned.group] -= assigned.work > 0

    def follow(self, before: RequestScheduler) -> None:
        """Begin with the running work of another scheduler, whose handles `finish` then takes too."""
        self._work, self._expected = before.work, before.work
        super().follow(before)

    def _arrive(self, prompt_ids: Prompt, expected: float) -> _Arrived:
        if not expected >= 0:
            raise ValueError(f"expected_tokens must not be negative: {expected}")
        self.arrivals += 1
        self._seen += 1
        prompt_work = self.settings.prompt_cost * float(len(prompt_ids))
        work = prompt_work + float(expected)
        self._mean_work = max(self._mean_work + (work - self._mean_work) / self._seen, LEAST_WORK)
        return _Arrived(self.arrivals - 1, self.score(prompt_ids), work, prompt_work)

    def _place(self, window: list[_Arrived]) -> list[Assigned]:
        """Assign `window` together and enter its requests in the ledger."""
        if not window:
            return []
        work = np.array([request.work for request in window])
        live = self._live_price()
        price = self._price_per_request / self._mean_work + live
        scores = np.stack([request.scores for request in window])
        value = scores - self._prices - price * (self._expected - self._expected.mean())
        if self.most_at_once:
            mean = max((self._expected.sum() + work.sum()) / (self.running.sum() + len(work)), LEAST_WORK)
            excess = np.outer(work / mean - 1, self._expected / mean - self.running)
            value -= self.settings.excess_price * min(float(self.running.mean()) / self.most_at_once, 1.0) * excess
        room = self._limit(work) - self._work
        chosen = _greedy(value, work, room, self._work, live)
        if len(window) > 1 and live == 0:  # moves and swaps ignore the price of a lead
            costs = np.repeat(work[:, None], len(room), axis=1)
            chosen = improve_assignment(value * (work[:, None] + 1e-9), costs, room, chosen, SWEEPS)
        out = []
        for request, group in zip(window, chosen.tolist(), strict=True):
            out.append(Assigned(request.request, group, request.work, request.prompt_work))
            self._work[group] += request.work
            self._expected[group] += request.work
            self.running[group] += request.work > 0  # a handle without work is not of this ledger: see `follow`
        return out

    def _live_price(self) -> float:
        """Return the price of a token of work ahead of the mean while requests run, in shares of a request's pairs."""
        running = float(self._expected.mean()) / self._mean_work
        return self.settings.lead_price / self._mean_work / max(running, 1.0) ** 0.5

    def _limit(self, work: np.ndarray) -> float:
        """The most work that any group may have after requests of `work` (W,) are assigned."""
        D = len(self._work)
        mean = (self._work.sum() + work.sum()) / D
        return float(mean + max(self.settings.lead_requests * self._mean_work / D, self.settings.lead_share * mean))


def _greedy(value: np.ndarray, work: np.ndarray, room: np.ndarray, ledger: np.ndarray, price: float) -> np.ndarray:
    """(W,) groups for requests of `work` (W,), in order of arrival: the group of most value (W, D) that has room (D,),
    else the least loaded group.

    Each token that earlier requests of the window bring to a group lowers its value by `price`. Among groups of equal
    value the least loaded one is chosen, among those that are equally loaded that of most value.
    """
    added, groups = np.zeros(len(room)), np.empty(len(work), np.int64)
    for i, own in enumerate(work):
        gain, load = value[i] - price * added, ledger + added
        fits = added + own <= room + 1e-9
        if fits.any():
            best = fits & (gain == gain[fits].max())
            groups[i] = np.where(best, load, np.inf).argmin()
        else:
            groups[i] = np.where(load <= load.min() + 1e-9, gain, -np.inf).argmax()
        added[groups[i]] += own
    return groups
