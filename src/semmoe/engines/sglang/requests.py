"""Schedule requests to data-parallel ranks in SGLang's controller, which has their token ids and all ranks' loads.

Requests can be held for a bounded wait to be assigned together (`SEMMOE_WINDOW_MS`). The controller's loop asks for
messages without a pause and feeds its watchdog each time; there held requests are sent once they are due. Any other
message, such as an abort, is passed on only after them, so that it finds the requests that it is about.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semmoe.core import Plan
from semmoe.engines.balancer import Ages, warm_up
from semmoe.engines.counters import Counters
from semmoe.engines.requests import RequestNamer
from semmoe.engines.sglang.swap import REQUESTS
from semmoe.live.status import staged
from semmoe.requests.window import Window

log = logging.getLogger(__name__)
REFRESH = 0.02  # seconds between reads of the ranks' loads


@dataclass(frozen=True)
class Held:
    """A request that waits, and the call that sends it."""

    req: Any
    send: Callable[[], Any]


class RequestHook(RequestNamer):
    """The hook in SGLang's controller."""

    def __init__(self, plan: Plan, counters: Counters, window_seconds: float = 0.0, folder: Path | None = None) -> None:
        super().__init__(plan, counters)
        self._folder = folder
        self._plan, self._looked = plan, 0.0
        self._loads: dict[int, float] = {}  # by rank: when its load was last reported
        self._ages = Ages()
        self._window: Window[Held] = Window(window_seconds)

    def dispatch(self, original: Any, controller: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
        """Wraps the controller's dispatch of one request."""
        from sglang.srt.managers.utils import is_health_check_generate_req

        if is_health_check_generate_req(req):
            return original(controller, req, *args, **kwargs)
        if req.routed_dp_rank is not None or not _has_ids(req):
            self.name(req.routed_dp_rank, lambda: None)
            return original(controller, req, *args, **kwargs)
        self._window.add(Held(req, lambda: original(controller, req, *args, **kwargs)))
        return self.send_due(controller)

    def run(self, original: Any, controller: Any) -> Any:
        """Wraps the controller's loop: sends what is due in every turn, and all that is held before other messages."""
        from sglang.srt.managers import io_struct

        requests = (
            io_struct.TokenizedGenerateReqInput,
            io_struct.TokenizedEmbeddingReqInput,
            io_struct.BatchTokenizedGenerateReqInput,
            io_struct.BatchTokenizedEmbeddingReqInput,
        )
        feed, dispatcher = controller.soft_watchdog.feed, controller._request_dispatcher

        def send_and_feed() -> None:
            self.send_due(controller)
            feed()

        def pass_on(message: Any) -> Any:
            if not isinstance(message, requests):
                self.send_all(controller)
            return dispatcher(message)

        warm_up(self._plan)
        controller.soft_watchdog.feed, controller._request_dispatcher = send_and_feed, pass_on
        return original(controller)

    def told(self, original: Any, controller: Any, message: Any) -> Any:
        """Wraps the controller's passing on of a control message, which may tell it to follow another plan."""
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

    def send_due(self, controller: Any) -> None:
        """Send the requests of a window that has ended."""
        if self._window.due:
            self.send_all(controller)

    def send_all(self, controller: Any) -> None:
        """Send all requests that are held, each with its rank, in order of arrival."""
        held = self._window.take()
        if not held:
            return
        ranks = self.name_all(len(held), lambda: self._choose(controller, [one.req for one in held]))
        for one, rank in zip(held, ranks, strict=True):
            if rank is not None:
                one.req.routed_dp_rank = rank
            one.send()

    def _choose(self, controller: Any, reqs: Sequence[Any]) -> list[int | None]:
        self._refresh(controller)
        most = [getattr(getattr(req, "sampling_params", None), "max_new_tokens", None) for req in reqs]
        found = self.admit([(req.input_ids, new) for req, new in zip(reqs, most, strict=True)])
        for assigned in found:
            self._ages.add(assigned)
        ranks = [assigned.group for assigned in found]
        return [rank if rank in controller._active_workers and controller.status[rank] else None for rank in ranks]

    def _refresh(self, controller: Any) -> None:
        now = time.monotonic()
        if now - self._looked < REFRESH:
            return
        self._looked = now
        for load in controller.load_snapshot_reader.read_all():
            if load.timestamp != self._loads.get(load.dp_rank):
                self._loads[load.dp_rank] = load.timestamp
                running = load.num_running_reqs + load.num_waiting_reqs
                for assigned in self._ages.ended(load.dp_rank, running, load.timestamp):
                    self._balancer.finish(assigned)


def _has_ids(req: Any) -> bool:
    """Whether the request has token ids; a prompt given as embeddings has none."""
    ids = getattr(req, "input_ids", None)
    return ids is not None and len(ids) > 0
