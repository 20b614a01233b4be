"""A plan's view of a prompt as a function, for gateways and routers: which rank has most of its experts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from semmoe.core import Plan
from semmoe.engines.balancer import RequestBalancer
from semmoe.plan import load_plan
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import PromptScores
from semmoe.requests.scheduler import Assigned, Prompt


class Scorer:
    """Scores the data-parallel ranks of a plan for a prompt. Stateless to its caller; use it in one thread at a time.

    A score is the share of the request's (token, expert) pairs that the rank is expected to host, less the rank's
    price, which is higher for ranks that many requests of the profile prefer. It knows neither load nor prefix caches:
    a router adds its own terms for both. Raises ValueError for a plan that schedules no requests.
    """

    def __init__(self, plan: Plan | Path | str) -> None:
        loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        if not isinstance(loaded.requests, PromptScores):
            raise ValueError("this plan schedules no requests: solve one with --attention dp or hybrid")
        self._scheduler, self._prices = CapacityScheduler(loaded.requests), loaded.requests.prices.astype(np.float64)
        self(np.zeros(1, np.int32))  # compiled, or read from the cache, before the first request waits for it

    def __call__(self, prompt_ids: Prompt) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (D,), best first, and their scores (D,), by the token ids of a prompt as the engine will see it."""
        scores = self._scheduler.score(prompt_ids) - self._prices
        ranks = np.argsort(-scores, kind="stable")
        return ranks, scores[ranks]


@dataclass(frozen=True)
class Choice:
    """The ranks that may serve a request, best first, and its place in the balancer's ledger, if it has one."""

    ranks: list[int]
    assigned: Assigned | None = None


class Ranks:
    """The ranks of a plan under the requests that each runs, by the balancer of engines. Use it in one thread."""

    def __init__(self, plan: Plan) -> None:
        self._balancer = RequestBalancer(plan)
        self.running = Counter[int]()

    def admit(self, prompt_ids: Prompt | None, usable: Sequence[int]) -> Choice:
        """Choose a rank for a request, the first of the choice, and count it until `finish`.

        The other usable ranks follow by load. Without a prompt, or where the plan's rank is not usable, load decides.
        """
        ranks, assigned = sorted(usable, key=lambda rank: self.running[rank]), None
        if prompt_ids is not None and ranks:
            assigned = self._balancer.admit(prompt_ids, None)
            if assigned.group in ranks:
                ranks.insert(0, ranks.pop(ranks.index(assigned.group)))
            else:
                self._balancer.finish(assigned)
                assigned = None
        self.running.update(ranks[:1])
        return Choice(ranks, assigned)

    def finish(self, choice: Choice) -> None:
        """Report that a request has ended."""
        self.running.subtract(choice.ranks[:1])
        if choice.assigned is not None:
            self._balancer.finish(choice.assigned)
