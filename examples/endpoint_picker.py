"""An endpoint picker for llm-d and other inference gateways of Kubernetes: it names a rank, by a plan and by load.

    python examples/endpoint_picker.py PLAN MODEL ADDRESS ADDRESS ...    # host:port of every rank, in their order

A gateway asks it about every request by Envoy's external processing (gRPC on port 9002 of loopback; --listen), as
version 1.0 of the endpoint picker protocol of the Gateway API Inference Extension says. The answer is the addresses of
the ranks: first the one that the plan prefers of those that do not run ahead of the others, then the rest, for a
gateway that tries again. A prompt that cannot be known here, such as one with images, goes by load alone. MODEL has
the tokenizer. Needs `pip install semmoe[serve] grpcio-health-checking xds-protos`.
"""

import argparse
import asyncio
import socket
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import numpy as np
from envoy.config.core.v3.base_pb2 import HeaderValue, HeaderValueOption
from envoy.service.ext_proc.v3 import external_processor_pb2 as ext_proc
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import (
    ExternalProcessorServicer,
    add_ExternalProcessorServicer_to_server,
)
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health

from semmoe.plan import load_plan
from semmoe.router import Scorer
from semmoe.router.prompts import ENDPOINTS, Tokenizer, read_prompt
from semmoe.router.server import tokenizer_of

LEAD = 2  # requests that a rank may run above the mean of all
MOST_BYTES = 32 << 20  # of a request that is read to its end before a rank is chosen
PICKED = "x-gateway-destination-endpoint"
ALLOWED = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"  # where a gateway says which it can reach
SERVICES = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")


@dataclass
class Exchange:
    """What is known of one request; a gateway's stream is about one."""

    path: str = ""
    allowed: set[str] | None = None  # addresses; None: all
    chunks: list[Any] = field(default_factory=list)  # of its body, until a rank is chosen
    size: int = 0


class Picker(ExternalProcessorServicer):
    """The ranks of a plan, with what each runs."""

    def __init__(self, scorer: Scorer, tokenizer: Tokenizer, addresses: list[str]) -> None:
        self._scorer, self._tokenizer, self._addresses = scorer, tokenizer, addresses
        self.running = Counter[int]()

    async def Process(self, requests: Any, context: Any) -> AsyncIterator[Any]:  # noqa: N802
        """Answer the messages about one request; it runs on its rank until the gateway ends the stream."""
        known, rank = Exchange(), None
        try:
            async for message in requests:
                kind = message.WhichOneof("request")
                value = getattr(message, kind)
                if rank is None and not self._complete(known, message, kind, value):
                    continue
                if rank is not None:
                    yield _passed_on(kind, value)
                    continue
                ranks = self._order(known, await asyncio.to_thread(self._ids, known))
                if not ranks:
                    yield ext_proc.ProcessingResponse(immediate_response={"status": {"code": 503}})
                    return
                rank = ranks[0]
                self.running[rank] += 1
                for answer in self._chosen(known, ranks):
                    yield answer
        finally:
            if rank is not None:
                self.running[rank] -= 1

    def _complete(self, known: Exchange, message: Any, kind: str, value: Any) -> bool:
        """Whether all of a request is there that decides where it goes."""
        if kind == "request_headers":
            headers = {one.key: one.raw_value.decode() or one.value for one in value.headers.headers}
            known.path = headers.get(":path", "").partition("?")[0]
            hint = message.metadata_context.filter_metadata.get(ALLOWED[0])
            known.allowed = set(hint[ALLOWED[1]]) if hint is not None and ALLOWED[1] in hint else None
            return bool(value.end_of_stream)
        known.chunks.append((kind, value))
        known.size += len(value.body) if kind == "request_body" else 0
        return kind != "request_body" or bool(value.end_of_stream) or known.size > MOST_BYTES

    def _order(self, known: Exchange, ids: np.ndarray | None) -> list[int]:
        """The ranks that may serve a request, best first."""
        usable = [i for i, address in enumerate(self._addresses) if known.allowed is None or address in known.allowed]
        by_plan = usable if ids is None else [rank for rank in self._scorer(ids)[0].tolist() if rank in usable]
        most = sum(self.running[rank] for rank in usable) / max(len(usable), 1) + (0 if ids is None else LEAD)
        return sorted(by_plan, key=lambda rank: self.running[rank] > most)

    def _ids(self, known: Exchange) -> np.ndarray | None:
        """(n,) token ids of the prompt; None if they cannot be known."""
        if known.path not in ENDPOINTS or known.size > MOST_BYTES:
            return None
        body = b"".join(value.body for kind, value in known.chunks if kind == "request_body")
        return read_prompt(known.path, body, self._tokenizer).ids

    def _chosen(self, known: Exchange, ranks: list[int]) -> list[Any]:
        """The answers to all of a request's messages so far; the header and the metadata say the same."""
        picked = ",".join(self._addresses[rank] for rank in ranks)
        header = HeaderValueOption(
            header=HeaderValue(key=PICKED, raw_value=picked.encode()),
            append_action=HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
        )
        common = ext_proc.CommonResponse(header_mutation={"set_headers": [header]}, clear_route_cache=True)
        first = ext_proc.ProcessingResponse(request_headers=ext_proc.HeadersResponse(response=common))
        first.dynamic_metadata.update({"envoy.lb": {PICKED: picked}})
        return [first, *(_passed_on(kind, value) for kind, value in known.chunks)]


def _passed_on(kind: str, value: Any) -> Any:
    """The answer that lets a message pass as it is."""
    if kind.endswith("_body"):
        streamed = ext_proc.StreamedBodyResponse(body=value.body, end_of_stream=value.end_of_stream)
        common = ext_proc.CommonResponse(body_mutation=ext_proc.BodyMutation(streamed_response=streamed))
        return ext_proc.ProcessingResponse(**{kind: ext_proc.BodyResponse(response=common)})
    empty = ext_proc.HeadersResponse() if kind.endswith("_headers") else ext_proc.TrailersResponse()
    return ext_proc.ProcessingResponse(**{kind: empty})


def resolved(address: str) -> str:
    """The address with its host as a number, which gateways want."""
    host, _, port = address.rpartition(":")
    return f"{socket.gethostbyname(host)}:{int(port)}"


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("model")
    parser.add_argument("addresses", nargs="+", metavar="address")
    parser.add_argument("--listen", default="127.0.0.1:9002", help="in a pod: 0.0.0.0:9002")
    given = parser.parse_args()
    plan = load_plan(given.plan)
    scorer = Scorer(plan)
    if len(given.addresses) != scorer.num_ranks:
        parser.error(f"the plan has {scorer.num_ranks} data-parallel ranks, and {len(given.addresses)} addresses came")
    picker = Picker(scorer, tokenizer_of(given.model, plan), [resolved(address) for address in given.addresses])
    server, alive = grpc.aio.server(), health.HealthServicer()
    add_ExternalProcessorServicer_to_server(picker, server)
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    for service in SERVICES:
        await alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    server.add_insecure_port(given.listen)
    await server.start()
    print(f"picking among {scorer.num_ranks} ranks on {given.listen}", flush=True)
    await server.wait_for_termination()


if __name__ == "__main__":
    asyncio.run(main())
