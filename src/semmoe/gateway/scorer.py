"""A plan's view of a prompt as a function, for gateways and routers: which rank has most of its experts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from semmoe.core import Plan
from semmoe.plan import load_plan
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import PromptScores

LEAD = 2  # requests that a rank which the plan prefers may run above the mean


class Scorer:
    """Scores the data-parallel ranks of a plan for a prompt. Stateless to its caller; use it in one thread at a time.

    A score is the share of the request's (token, expert) pairs that the rank is expected to host, less the rank's
    price, by which ranks that many requests of the profile prefer become dearer. It knows neither load nor prefix
    caches: a router adds its own terms for these. Raises ValueError for a plan that schedules no requests.
    """

    def __init__(self, plan: Plan | Path | str) -> None:
        loaded = plan if isinstance(plan, Plan) else load_plan(plan)
        if not isinstance(loaded.requests, PromptScores):
            raise ValueError("this plan schedules no requests: solve one with --attention dp or hybrid")
        self._scheduler, self._prices = CapacityScheduler(loaded.requests), loaded.requests.prices.astype(np.float64)
        self(np.zeros(1, np.int32))  # compiled, or read from the cache, before the first request waits for it

    @property
    def num_ranks(self) -> int:
        """Data-parallel ranks: an engine's `--dp-size`, and the values of its `X-data-parallel-rank`."""
        return len(self._prices)

    def __call__(self, prompt_ids: Sequence[int] | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Ranks (D,), best first, and their scores (D,), by the token ids of a prompt as the engine will see it."""
        scores = self._scheduler.score(prompt_ids) - self._prices
        ranks = np.argsort(-scores, kind="stable")
        return ranks, scores[ranks]


class Ranks:
    """The ranks of a plan with the requests that each runs. Use it in one thread."""

    def __init__(self, scorer: Scorer) -> None:
        self._scorer = scorer
        self.running = Counter[int]()

    def order(self, prompt_ids: Sequence[int] | np.ndarray | None, usable: Sequence[int]) -> list[int]:
        """The usable ranks, best first: by load alone if the prompt is None, else as the plan has them.

        Ranks that run more than `LEAD` requests above the mean of the usable ones come last.
        """
        if prompt_ids is None:
            return sorted(usable, key=lambda rank: self.running[rank])
        limit = sum(self.running[rank] for rank in usable) / max(len(usable), 1) + LEAD
        by_plan = [rank for rank in self._scorer(prompt_ids)[0].tolist() if rank in usable]
        return sorted(by_plan, key=lambda rank: self.running[rank] > limit)
