"""Schedule requests to data-parallel ranks in vLLM's front end, which has their token ids and sees their ends."""

from typing import Any

from semmoe.core import Plan
from semmoe.engines.counters import Counters
from semmoe.engines.requests import RequestNamer
from semmoe.requests.scheduler import Assigned


class RequestHook(RequestNamer):
    """The hook in the client of vLLM's engines."""

    def __init__(self, plan: Plan, counters: Counters) -> None:
        super().__init__(plan, counters)
        self._ranks = plan.topology.dp_size
        self._running: dict[str, Assigned] = {}

    def choose(self, original: Any, client: Any, request: Any) -> Any:
        """Wraps the client's choice of an engine for one request; a streaming session keeps its engine."""
        if request.request_id not in client.reqs_in_flight:
            rank = self.name(request.data_parallel_rank, lambda: self._choose(client, request))
            if rank is not None:
                request.data_parallel_rank = rank
        return original(client, request)

    def finished(self, original: Any, client: Any, outputs: Any) -> Any:
        """Wraps the client's processing of an engine's outputs; aborted requests end too."""
        for request in outputs.finished_requests or ():
            assigned = self._running.pop(request, None)
            if assigned is not None:
                self._balancer.finish(assigned)
        return original(client, outputs)

    def _choose(self, client: Any, request: Any) -> int | None:
        if not request.prompt_token_ids or len(client.core_engines) != self._ranks:
            return None  # no token ids, for example if the prompt is given as embeddings
        self._balancer.scheduler.most_at_once = client.vllm_config.scheduler_config.max_num_seqs
        most = getattr(request.sampling_params, "max_tokens", None)
        assigned = self.admit(request.prompt_token_ids, most)
        self._running[request.request_id] = assigned
        return assigned.group
