"""Requests to attention-DP ranks inside a live engine: the plan's choice, under the load that runs now.

The engine knows how many requests each rank has and not which of them ended. The ledger of running work is therefore
kept by age: of what was sent to a rank, the oldest requests are taken to have ended first.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from semmoe.assignment import RequestScheduler
from semmoe.core import Plan, RequestMap, require
from semmoe.scheduler import Assigned, CapacityScheduler, SchedulerSettings

GRACE = 0.2  # seconds that a request may take to appear in its rank's load


class RequestBalancer:
    """The rank of each request, and how many of its ids the tables do not know. Not thread-safe."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.time) -> None:
        table = plan.schedule.requests if plan.schedule else None
        require(table is not None, "this plan schedules no requests: it is for attention tp, or was solved without")
        self._clock, groups = clock, plan.topology.dp_size
        self._capacity: CapacityScheduler | None = None
        if isinstance(table, RequestMap):
            lead = 2.0 * groups  # two requests above the mean: a ledger of what runs now stays short
            settings = SchedulerSettings(keep_finished=False, lead_requests=lead, prompt_cost=1.0)
            self._capacity = CapacityScheduler(table, settings)
        else:
            assert table is not None
            self._paper = RequestScheduler(table)
        self._sent: list[deque[tuple[float, Assigned]]] = [deque() for _ in range(groups)]

    @property
    def unknown_tokens(self) -> int:
        """Prompt ids outside the tables so far."""
        return (self._capacity or self._paper).unknown_tokens

    def choose(self, prompt_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None) -> int:
        """The rank for a request that decodes at most `max_new_tokens`."""
        ids = np.asarray(prompt_ids, np.int64)
        if self._capacity is None:
            return self._paper.assign(ids)
        mean = self._capacity.mean_length
        expected = mean if max_new_tokens is None else min(mean, float(max_new_tokens))
        assigned = self._capacity.admit(ids, expected)
        self._sent[assigned.group].append((self._clock(), assigned))
        return assigned.group

    def reconcile(self, rank: int, requests: int, as_of: float) -> None:
        """A rank said at `as_of` (seconds of the clock) that it has so many requests, waiting or running."""
        if self._capacity is None:
            return
        sent = self._sent[rank]
        known = sum(when <= as_of - GRACE for when, _ in sent)
        for _ in range(known - requests):
            _, assigned = sent.popleft()
            self._capacity.finish(assigned, assigned.work)
