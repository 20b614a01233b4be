"""Schedule requests to attention-DP ranks inside a live engine, by the plan and the currently running load.

Some engines report the end of each request (`admit`, `finish`). Others report only how many requests each rank has:
then the ledger of running work is kept by age (`choose`, `reconcile`), and the oldest requests sent to a rank are
assumed to have ended first.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from semmoe.core import Plan
from semmoe.evaluation.online import expected_tokens, live_settings, start
from semmoe.requests.scheduler import Assigned

GRACE = 0.2  # seconds until a request is expected to appear in its rank's load


class RequestBalancer:
    """Chooses the rank of each request, and counts prompt ids outside the tables. Not thread-safe."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.time) -> None:
        if not plan.requests.by_tables:
            raise ValueError("this plan schedules no requests: it is for attention tp, or was solved without")
        self._clock, groups = clock, plan.topology.dp_size
        self._scheduler = start(plan.requests, live_settings(groups))
        self._sent: list[deque[tuple[float, Assigned]]] = [deque() for _ in range(groups)]

    @property
    def unknown_tokens(self) -> int:
        """Prompt ids outside the tables so far."""
        return self._scheduler.unknown_tokens

    def choose(self, prompt_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None) -> int:
        """The rank for a request that decodes at most `max_new_tokens`; `reconcile` later infers its end."""
        return self.choose_together([(prompt_ids, max_new_tokens)])[0]

    def choose_together(self, prompts: Sequence[tuple[Sequence[int] | np.ndarray, int | None]]) -> list[int]:
        """Same as `choose` for several requests at once, each given by its prompt and its most new tokens."""
        expected = [expected_tokens(self._scheduler.mean_length, most) for _, most in prompts]
        found = self._scheduler.admit_window([np.asarray(ids, np.int64) for ids, _ in prompts], expected)
        if self._scheduler.keeps_ledger:
            for assigned in found:
                self._sent[assigned.group].append((self._clock(), assigned))
        return [assigned.group for assigned in found]

    def admit(self, prompt_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None) -> tuple[int, Assigned]:
        """Same as `choose`, for an engine that reports each request's end: the rank, and the handle for `finish`."""
        ids = np.asarray(prompt_ids, np.int64)
        assigned = self._scheduler.admit(ids, expected_tokens(self._scheduler.mean_length, max_new_tokens))
        return assigned.group, assigned

    def finish(self, assigned: Assigned) -> None:
        """Report that an admitted request has ended or will never begin."""
        self._scheduler.finish(assigned, assigned.work)

    def follow(self, before: "RequestBalancer") -> None:
        """Take over the ledger of the balancer of another plan, whose requests still run."""
        self._scheduler.follow(before._scheduler)
        self._sent = before._sent

    def reconcile(self, rank: int, requests: int, as_of: float) -> None:
        """Finish the oldest requests of a rank that reported, at clock time `as_of`, to have `requests` unfinished
        ones.
        """
        sent = self._sent[rank]
        known = sum(when <= as_of - GRACE for when, _ in sent)
        for _ in range(known - requests):
            self.finish(sent.popleft()[1])


def warm_up(plan: Plan) -> None:
    """Compile what assigns a window with a balancer that is thrown away, so that no request waits for it."""
    RequestBalancer(plan).choose_together([(np.arange(64), None)] * 2)
