"""Name the data-parallel rank of requests in an engine's front end. On any error the engine's own choice is used."""

import logging
from collections.abc import Callable, Iterator

from semmoe.core import Plan
from semmoe.engines.balancer import RequestBalancer
from semmoe.engines.counters import Counters, Reading
from semmoe.live.status import plan_number
from semmoe.requests.scheduler import Assigned, Prompt

log = logging.getLogger(__name__)


class RequestNamer:
    """Names the rank of every request that names none; without a rank from semmoe the engine chooses."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        self._counters = counters
        self._balancer = RequestBalancer(plan)
        self._unknown, self._failed = 0, False
        self._next: tuple[int, RequestBalancer] | None = None  # another plan's number and balancer
        self._number = plan_number(plan)
        counters.sources.append(self._readings)

    def prepare(self, plan: Plan) -> None:
        """Make another plan's tables, in any thread; the next request is assigned by them."""
        self._next = plan_number(plan), RequestBalancer(plan)

    def _switch(self) -> None:
        """Follow the plan that was prepared, if there is one; requests that run stay in the ledger."""
        if self._next is not None:
            (self._number, balancer), self._next = self._next, None
            balancer.follow(self._balancer)
            self._balancer, self._unknown = balancer, 0

    def _readings(self) -> Iterator[Reading]:
        yield "request_plan_number", {}, self._number

    def name(self, named: int | None, choose: Callable[[], int | None]) -> int | None:
        """The rank to give a request; None if it has `named` one or the engine should choose."""
        if named is not None:
            self._counters.add("scheduled_requests", dp_rank=named, by="named")
            return None
        rank = None
        try:
            self._switch()
            rank = choose()
        except Exception:  # a request is served whatever happens here
            self._counters.add("schedule_failures")
            log.log(
                logging.WARNING if self._failed else logging.ERROR,
                "semmoe: a request could not be scheduled",
                exc_info=not self._failed,
            )
            self._failed = True
        shown, by = ("any", "engine") if rank is None else (rank, "plan")
        self._counters.add("scheduled_requests", dp_rank=shown, by=by)
        return rank

    def admit(self, prompt_ids: Prompt, max_new_tokens: int | None) -> Assigned:
        """Assign a request by the balancer, and count the prompt ids outside its tables."""
        found = self._balancer.admit(prompt_ids, max_new_tokens)
        self._counters.add("unknown_tokens", self._balancer.scheduler.unknown_tokens - self._unknown)
        self._unknown = self._balancer.scheduler.unknown_tokens
        return found
