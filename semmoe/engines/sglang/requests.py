"""Requests to data-parallel ranks in SGLang's controller, which sees their token ids and every rank's load."""

import logging
import time
from typing import Any

from semmoe.core import Plan
from semmoe.engines.balancer import RequestBalancer
from semmoe.engines.metrics import Counters

log = logging.getLogger(__name__)
REFRESH = 0.02  # seconds between looks at the ranks' loads


class RequestHook:
    """Names the rank of every request that names none; the engine's own choice serves where semmoe has none."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        self._counters = counters
        self._balancer = RequestBalancer(plan)
        self._looked, self._unknown, self._failed = 0.0, 0, False
        self._loads: dict[int, float] = {}  # by rank: when its load was last reported

    def dispatch(self, original: Any, controller: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the controller's dispatch of one request."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        if not is_health_check_generate_req(req):
            self._schedule(controller, req)
        return original(controller, req, *args, **kwargs)

    def _schedule(self, controller: Any, req: Any) -> None:
        if req.routed_dp_rank is not None:
            self._counters.add("scheduled_requests", dp_rank=req.routed_dp_rank, by="named")
            return
        rank = None
        try:
            rank = self._choose(controller, req)
        except Exception:  # a request is served whatever happens here
            self._counters.add("schedule_failures")
            log.log(logging.WARNING if self._failed else logging.ERROR, "semmoe: a request could not be scheduled",
                    exc_info=not self._failed)  # fmt: skip
            self._failed = True
        if rank is None or not (rank in controller._active_workers and controller.status[rank]):
            self._counters.add("scheduled_requests", dp_rank="any", by="engine")
            return
        req.routed_dp_rank = rank
        self._counters.add("scheduled_requests", dp_rank=rank, by="plan")

    def _choose(self, controller: Any, req: Any) -> int | None:
        if getattr(req, "input_ids", None) is None or len(req.input_ids) == 0:
            return None  # embeddings in place of ids, for one
        self._refresh(controller)
        most = getattr(getattr(req, "sampling_params", None), "max_new_tokens", None)
        rank = self._balancer.choose(req.input_ids, most)
        self._counters.add("unknown_tokens", self._balancer.unknown_tokens - self._unknown)
        self._unknown = self._balancer.unknown_tokens
        return rank

    def _refresh(self, controller: Any) -> None:
        now = time.monotonic()
        if now - self._looked < REFRESH:
            return
        self._looked = now
        for load in controller.load_snapshot_reader.read_all():
            if load.timestamp != self._loads.get(load.dp_rank):
                self._loads[load.dp_rank] = load.timestamp
                running = load.num_running_reqs + load.num_waiting_reqs
                self._balancer.reconcile(load.dp_rank, running, load.timestamp)
