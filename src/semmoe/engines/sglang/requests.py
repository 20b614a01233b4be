"""Schedule requests to data-parallel ranks in SGLang's controller, which has their token ids and all ranks' loads."""

import time
from typing import Any

from semmoe.core import Plan
from semmoe.engines.counters import Counters
from semmoe.engines.requests import RequestNamer

REFRESH = 0.02  # seconds between reads of the ranks' loads


class RequestHook(RequestNamer):
    """The hook in SGLang's controller."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        super().__init__(plan, counters)
        self._looked = 0.0
        self._loads: dict[int, float] = {}  # by rank: when its load was last reported

    def dispatch(self, original: Any, controller: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps the controller's dispatch of one request."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        if not is_health_check_generate_req(req):
            rank = self.name(req.routed_dp_rank, lambda: self._choose(controller, req))
            if rank is not None:
                req.routed_dp_rank = rank
        return original(controller, req, *args, **kwargs)

    def _choose(self, controller: Any, req: Any) -> int | None:
        if getattr(req, "input_ids", None) is None or len(req.input_ids) == 0:
            return None  # no token ids, for example if the prompt is given as embeddings
        self._refresh(controller)
        most = getattr(getattr(req, "sampling_params", None), "max_new_tokens", None)
        rank = self._balancer.choose(req.input_ids, most)
        self.count_unknown()
        return rank if rank in controller._active_workers and controller.status[rank] else None

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
