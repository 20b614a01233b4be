"""Schedule requests to attention-DP ranks of a live engine, by the plan and the load that runs now.

Some engines report the end of each request (`finish`). Others report only how many requests each rank has: then
`Ages` ends the oldest requests of a rank.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator

import numpy as np

from semmoe.core import Plan
from semmoe.evaluation.online import expected_tokens, live_settings, start
from semmoe.requests.scheduler import Assigned, Prompt

GRACE = 0.2  # seconds until a request is expected to appear in its rank's load


class RequestBalancer:
    """Assigns requests to ranks by a scheduler, which counts prompt ids outside its tables. Not thread-safe."""

    def __init__(self, plan: Plan) -> None:
        if not plan.requests.by_tables:
            raise ValueError("this plan schedules no requests: solve one with --attention dp or hybrid")
        self.scheduler = start(plan.requests, live_settings(plan.topology.dp_size))

    def admit(self, prompt_ids: Prompt, max_new_tokens: int | None) -> Assigned:
        """Assign a request that decodes at most `max_new_tokens` (None: no limit)."""
        expected = expected_tokens(self.scheduler.mean_length, max_new_tokens)
        return self.scheduler.admit([np.asarray(prompt_ids, np.int64)], [expected])[0]

    def finish(self, assigned: Assigned) -> None:
        """Report that a request has ended or will never begin."""
        self.scheduler.finish(assigned, assigned.work)

    def follow(self, before: "RequestBalancer") -> None:
        """Take over the ledger of the balancer of another plan, whose requests still run."""
        self.scheduler.follow(before.scheduler)


class Ages:
    """The requests of each rank by age, for an engine that reports how many it runs and not which have ended."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._sent: defaultdict[int, deque[tuple[float, Assigned]]] = defaultdict(deque)

    def add(self, assigned: Assigned) -> None:
        """Note a request that is sent now."""
        self._sent[assigned.group].append((self._clock(), assigned))

    def ended(self, rank: int, unfinished: int, as_of: float) -> Iterator[Assigned]:
        """Yield and forget the oldest requests that a rank knew at `as_of`, until `unfinished` requests remain."""
        sent = self._sent[rank]
        known = sum(when <= as_of - GRACE for when, _ in sent)
        for _ in range(known - unfinished):
            yield sent.popleft()[1]
