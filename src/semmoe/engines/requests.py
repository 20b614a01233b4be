"""Name the data-parallel rank of requests in an engine's front end. On any error the engine's own choice is used."""

import logging
from collections.abc import Callable, Iterator, Sequence

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
        return self.name_all(1, lambda: [choose()])[0]

    def name_all(self, count: int, choose: Callable[[], Sequence[int | None]]) -> Sequence[int | None]:
        """The ranks to give to `count` requests that name none; None where the engine should choose."""
        ranks: Sequence[int | None] = [None] * count
        try:
            self._switch()
            ranks = choose()
        except Exception:  # a request is served whatever happens here
            self._counters.add("schedule_failures", count)
            log.log(
                logging.WARNING if self._failed else logging.ERROR,
                "semmoe: a request could not be scheduled",
                exc_info=not self._failed,
            )
            self._failed = True
        for rank in ranks:
            shown, by = ("any", "engine") if rank is None else (rank, "plan")
            self._counters.add("scheduled_requests", dp_rank=shown, by=by)
        return ranks

    def admit(self, requests: Sequence[tuple[Prompt, int | None]]) -> list[Assigned]:
        """Assign requests by the balancer, and count the prompt ids outside its tables."""
        found = self._balancer.admit(requests)
        self._counters.add("unknown_tokens", self._balancer.unknown_tokens - self._unknown)
        self._unknown = self._balancer.unknown_tokens
        return found
