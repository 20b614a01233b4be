"""Requests to attention-DP ranks inside a live engine: the plan's choice, under the load that runs now.

Some engines tell each request's end (`admit`, `finish`). Others say how many requests each rank has and not which of
them ended: there the ledger of running work is kept by age (`choose`, `reconcile`), and of what was sent to a rank the
oldest requests are taken to have ended first.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from semmoe.assignment import RequestScheduler
from semmoe.core import Plan, RequestMap, require
from semmoe.scheduler import Assigned, CapacityScheduler, SchedulerSettings

GRACE = 0.2  # seconds that a request may take to appear in its rank's load


def live_settings(groups: int, **changes: Any) -> SchedulerSettings:
    """For a ledger of the work that runs now, which stays short: a group may be two requests above the mean."""
    return SchedulerSettings(keep_finished=False, lead_requests=2.0 * groups, prompt_cost=1.0, **changes)


def expected_tokens(mean: float, max_new_tokens: int | None) -> float:
    """Decode tokens of a request that may have at most so many."""
    return mean if max_new_tokens is None else min(mean, float(max_new_tokens))


class RequestBalancer:
    """The rank of each request, and how many of its ids the tables do not know. Not thread-safe."""

    def __init__(self, plan: Plan, clock: Callable[[], float] = time.time) -> None:
        table = plan.schedule.requests if plan.schedule else None
        require(table is not None, "this plan schedules no requests: it is for attention tp, or was solved without")
        self._clock, groups = clock, plan.topology.dp_size
        self._capacity: CapacityScheduler | None = None
        if isinstance(table, RequestMap):
            self._capacity = CapacityScheduler(table, live_settings(groups))
        else:
            assert table is not None
            self._paper = RequestScheduler(table)
        self._sent: list[deque[tuple[float, Assigned]]] = [deque() for _ in range(groups)]

    @property
    def unknown_tokens(self) -> int:
        """Prompt ids outside the tables so far."""
        return (self._capacity or self._paper).unknown_tokens

    def choose(self, prompt_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None) -> int:
        """The rank for a request that decodes at most `max_new_tokens`, whose end `reconcile` is to find."""
        rank, assigned = self.admit(prompt_ids, max_new_tokens)
        if assigned is not None:
            self._sent[rank].append((self._clock(), assigned))
        return rank

    def admit(
        self, prompt_ids: Sequence[int] | np.ndarray, max_new_tokens: int | None = None
    ) -> tuple[int, Assigned | None]:
        """The same for an engine that tells each request's end: the rank, and what `finish` takes back, if anything."""
        ids = np.asarray(prompt_ids, np.int64)
        if self._capacity is None:
            return self._paper.assign(ids), None
        assigned = self._capacity.admit(ids, expected_tokens(self._capacity.mean_length, max_new_tokens))
        return assigned.group, assigned

    def finish(self, assigned: Assigned) -> None:
        """A request that `admit` let in has ended, or will never begin."""
        assert self._capacity is not None
        self._capacity.finish(assigned, assigned.work)

    def reconcile(self, rank: int, requests: int, as_of: float) -> None:
        """A rank said at `as_of` (seconds of the clock) that it has so many requests, waiting or running."""
        if self._capacity is None:
            return
        sent = self._sent[rank]
        known = sum(when <= as_of - GRACE for when, _ in sent)
        for _ in range(known - requests):
            self.finish(sent.popleft()[1])
