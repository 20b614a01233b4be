"""Schedule requests to data-parallel ranks in SGLang's controller, which has their token ids and all ranks' loads."""

import logging
import threading
import time
from pathlib import Path
from typing import Any

from semmoe.core import Plan
from semmoe.engines.balancer import Ages
from semmoe.engines.counters import Counters
from semmoe.engines.requests import RequestNamer
from semmoe.engines.sglang.targets import REQUESTS
from semmoe.live.status import staged

log = logging.getLogger(__name__)
REFRESH = 0.02  # seconds between reads of the ranks' loads


class RequestHook(RequestNamer):
    """The hook in SGLang's controller."""

    def __init__(self, plan: Plan, folder: Path | None, counters: Counters) -> None:
        super().__init__(plan, counters)
        self._folder = folder
        self._looked = 0.0
        self._loads: dict[int, float] = {}  # by rank: when its load was last reported
        self._ages = Ages()

    def dispatch(self, original: Any, controller: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the controller's dispatch of a request."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        if not is_health_check_generate_req(req):
            rank = self.name(req.routed_dp_rank, lambda: self._choose(controller, req))
            if rank is not None:
                req.routed_dp_rank = rank
        return original(controller, req, *args, **kwargs)

    def told(self, original: Any, controller: Any, message: Any) -> Any:
        """Wrap the controller's forwarding of a control message, which may ask for another plan."""
        number = getattr(message, "server_args", {}).get(REQUESTS) if self._folder is not None else None
        if number is not None:
            threading.Thread(target=self._prepare, args=(number,), name="semmoe-swap", daemon=True).start()
        return original(controller, message)

    def _prepare(self, number: int) -> None:
        assert self._folder is not None
        try:
            self.prepare(staged(self._folder, number))
        except (ValueError, OSError) as error:
            log.error("semmoe: requests are still assigned by the plan before: %s", error)

    def _choose(self, controller: Any, req: Any) -> int | None:
        ids = getattr(req, "input_ids", None)
        if ids is None or len(ids) == 0:  # a prompt given as embeddings
            return None
        self._refresh(controller)
        assigned = self.admit(ids, getattr(getattr(req, "sampling_params", None), "max_new_tokens", None))
        self._ages.add(assigned)
        usable = assigned.group in controller._active_workers and controller.status[assigned.group]
        return assigned.group if usable else None

    def _refresh(self, controller: Any) -> None:
        now = time.monotonic()
        if now - self._looked < REFRESH:
            return
        self._looked = now
        for load in controller.load_snapshot_reader.read_all():
            if load.timestamp != self._loads.get(load.dp_rank):
                self._loads[load.dp_rank] = load.timestamp
                self._balancer.scheduler.most_at_once = load.max_running_requests
                running = load.num_running_reqs + load.num_waiting_reqs
                for assigned in self._ages.ended(load.dp_rank, running, load.timestamp):
                    self._balancer.finish(assigned)
