"""Answer Envoy's external processing: name the rank of each request (endpoint picker protocol, version 1.0).

A gateway opens a stream for each HTTP request. Its headers are answered once a rank is chosen, which may need the whole
body. The request counts as load until the stream ends, so the gateway must keep it until the end of the answer.
"""

import asyncio
import signal
from collections.abc import AsyncIterator, Callable
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

from semmoe.gateway.addresses import address_of
from semmoe.gateway.prompts import PATHS, Tokenizer, read_prompt
from semmoe.gateway.scorer import Choice, Ranks

FINISH_SECONDS = 30  # for open streams after a signal to end
SERVICES = ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor")
MAX_BODY = 8 << 20  # bytes of a request whose prompt is read
MAX_HELD = 256 << 20  # bytes of all requests that wait for a rank
MESSAGE_BYTES = 1 << 10  # memory of a message without its part of a body
PICKED = "x-gateway-destination-endpoint"
RANK = "x-data-parallel-rank"
REPLACE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
HINT, SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"  # addresses that a gateway can reach


@dataclass
class Request:
    """A request until its rank is chosen."""

    path: str = ""
    named: int | None = None  # the rank that it names
    allowed: frozenset[str] | None = None  # addresses; None: all
    waiting: list[tuple[str, Any]] = field(default_factory=list)  # messages after the headers
    size: int = 0  # bytes of `waiting`
    fits: bool = True  # whether its body is read


class Picker(ExternalProcessorServicer):
    """Picks a rank for each request; `addresses` are those of the ranks, all the same if one server has them."""

    def __init__(self, ranks: Ranks, tokenizer: Tokenizer, addresses: list[str]) -> None:
        self._ranks = ranks
        self._tokenizer = tokenizer
        self._addresses = addresses
        self._one_server = len(set(addresses)) < len(addresses)
        self._numbers = {str(rank): rank for rank in range(len(addresses))}
        self._held = 0  # bytes

    async def Process(self, messages: AsyncIterator[Any], context: Any) -> None:  # noqa: N802
        """Answer the messages of a stream."""
        request, choice = Request(), Choice([])
        try:
            async for message in messages:
                kind = message.WhichOneof("request")
                if choice.ranks:
                    await context.write(_passed_on(kind, getattr(message, kind)))
                elif self._is_complete(request, message, kind):
                    choice = await self._choose(request)
                    if not choice.ranks:
                        await context.write(ext_proc.ProcessingResponse(immediate_response={"status": {"code": 503}}))
                        return
                    await self._answer(request, choice.ranks, context)
        finally:
            self._let_go(request)
            self._ranks.finish(choice)

    def _is_complete(self, request: Request, message: Any, kind: str) -> bool:
        """Note a message. Returns whether all is there that decides where the request goes."""
        value = getattr(message, kind)
        if kind == "request_headers":
            request.path = _header(value, ":path").partition("?")[0]
            request.named = self._numbers.get(_header(value, RANK))
            request.allowed = _subset(message.metadata_context.filter_metadata)
            return value.end_of_stream or request.path not in PATHS or request.named is not None
        request.waiting.append((kind, value))
        if kind != "request_body":
            return True
        size = len(value.body) + MESSAGE_BYTES
        request.size += size
        self._held += size
        request.fits = request.size <= MAX_BODY and self._held <= MAX_HELD
        return value.end_of_stream or not request.fits

    async def _choose(self, request: Request) -> Choice:
        """Choose among the ranks that may serve a request."""
        ranks = self._numbers.values() if request.named is None else [request.named]
        usable = [rank for rank in ranks if request.allowed is None or self._addresses[rank] in request.allowed]
        return self._ranks.admit(await asyncio.to_thread(self._read, request), usable)

    def _read(self, request: Request) -> np.ndarray | None:
        """(n,) token ids of the prompt; None if they cannot be known."""
        if request.path not in PATHS or request.named is not None or not request.fits:
            return None
        body = b"".join(value.body for kind, value in request.waiting if kind == "request_body")
        return read_prompt(request.path, body, self._tokenizer)

    async def _answer(self, request: Request, ranks: list[int], context: Any) -> None:
        """Answer all messages so far. The header and the metadata name the same addresses."""
        picked = ",".join(dict.fromkeys(self._addresses[rank] for rank in ranks))
        named = {PICKED: picked} | ({RANK: str(ranks[0])} if self._one_server else {})
        changes = ext_proc.HeaderMutation(
            set_headers=[
                HeaderValueOption(header=HeaderValue(key=name, raw_value=value.encode()), append_action=REPLACE)
                for name, value in named.items()
            ],
            remove_headers=[] if self._one_server else [RANK],
        )
        response = {"header_mutation": changes, "clear_route_cache": True}
        first = ext_proc.ProcessingResponse(request_headers={"response": response})
        first.dynamic_metadata.update({"envoy.lb": {PICKED: picked}})
        await context.write(first)
        for kind, value in request.waiting:
            await context.write(_passed_on(kind, value))
        self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self._held -= request.size
        request.size, request.waiting = 0, []


def _header(value: Any, name: str) -> str:
    return next((one.raw_value.decode("latin-1") for one in value.headers.headers if one.key == name), "")


def _subset(metadata: Any) -> frozenset[str] | None:
    """The addresses that a gateway says it can reach; None: all."""
    if HINT not in metadata or SUBSET not in metadata[HINT]:
        return None
    return frozenset(metadata[HINT][SUBSET])


def _passed_on(kind: str, value: Any) -> Any:
    """The answer that lets a message pass unchanged."""
    if kind.endswith("_body"):
        mutation = {"streamed_response": {"body": value.body, "end_of_stream": value.end_of_stream}}
        return ext_proc.ProcessingResponse(**{kind: {"response": {"body_mutation": mutation}}})
    empty = ext_proc.HeadersResponse() if kind.endswith("_headers") else ext_proc.TrailersResponse()
    return ext_proc.ProcessingResponse(**{kind: empty})


async def serve(picker: Picker, host: str, port: int, started: Callable[[str], None]) -> None:
    """Listen and answer until a signal comes; call `started` with the address. Raises ValueError if it cannot."""
    server, alive = grpc.aio.server(options=[("grpc.so_reuseport", 0)]), health.HealthServicer()
    add_ExternalProcessorServicer_to_server(picker, server)
    health_pb2_grpc.add_HealthServicer_to_server(alive, server)
    for service in SERVICES:
        await alive.set(service, health_pb2.HealthCheckResponse.SERVING)
    try:
        port = server.add_insecure_port(address_of(host, port))
    except RuntimeError:
        raise ValueError(f"cannot listen on {address_of(host, port)}: give another --host or --port") from None
    await server.start()
    asyncio.get_running_loop().add_signal_handler(
        signal.SIGTERM, lambda: asyncio.ensure_future(server.stop(FINISH_SECONDS))
    )
    started(address_of(host, port))
    await server.wait_for_termination()
