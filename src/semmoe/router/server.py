"""The router as a process: build the application and run it on uvicorn."""

import asyncio
import os
import resource
import socket

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from semmoe.core import Plan
from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash
from semmoe.router.prompts import Tokenizer
from semmoe.router.proxy import Router
from semmoe.router.schedule import warm_up
from semmoe.router.settings import RouterSettings

KEEP_ALIVE = 75  # seconds for which a client's connection may be idle
BACKLOG = 2048


def build(settings: RouterSettings, plan: Plan, tokenizer: str | None) -> Router:
    """The application, ready to serve. Raises ValueError if the plan was made for another tokenizer."""
    loaded = None if tokenizer is None else tokenizer_of(tokenizer, plan)
    warm_up(plan, settings)
    return Router(settings, plan, loaded)


def tokenizer_of(model: str, plan: Plan) -> Tokenizer:
    """The tokenizer of a model's directory. Raises ValueError if the plan was made for another."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # no model is run here, so torch is not needed
    found = load_tokenizer(model)
    if tokenizer_hash(found) != plan.fingerprint.tokenizer_hash:
        raise ValueError(f"this plan was made for another tokenizer than that of {model}")
    return Tokenizer(found)


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Port 0 stands for any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only on sockets whose protocol is given explicitly, which create_server does not do.
    # Without it each event of a stream would wait for the client's delayed acknowledgement, 40 ms.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise ValueError(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def run(router: Router, listener: socket.socket, settings: RouterSettings) -> None:
    """Serve until a signal arrives; requests in progress are finished first."""
    _allow_files(4 * (settings.max_in_flight + settings.queue) + 256)
    uvicorn.Server(configuration(router, settings)).run(sockets=[listener])


def configuration(router: Router, settings: RouterSettings) -> uvicorn.Config:
    return uvicorn.Config(
        router,
        log_level="error",
        access_log=False,
        lifespan="on",
        ws="none",
        server_header=False,
        date_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        proxy_headers=False,
        backlog=BACKLOG,
        http=_impatient(settings),
    )


def _impatient(settings: RouterSettings) -> type[asyncio.Protocol]:
    """uvicorn's protocol with time limits on a request's head and on reading an answer, where uvicorn has none.

    The application limits the time for bodies. The protocol is always the one on h11, even if httptools is installed,
    because the two differ in what they accept as a request.
    """

    class Impatient(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _unread: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self._late = self.loop.call_later(settings.head_seconds, transport.abort)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                _stop(self._late)  # the head is complete
                self._late = None
            elif self._late is None:
                self._late = self.loop.call_later(settings.head_seconds, self.transport.abort)

        def pause_writing(self) -> None:
            super().pause_writing()
            self._unread = self.loop.call_later(settings.unread_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _stop(self._unread)
            super().resume_writing()

        def connection_lost(self, error: Exception | None) -> None:
            _stop(self._late)
            _stop(self._unread)
            super().connection_lost(error)

    return Impatient


def _stop(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()


def _allow_files(wanted: int) -> None:
    """Raise the limit on open files: each request has two sockets, and the usual limit is 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
