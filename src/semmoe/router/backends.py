"""The engines behind the router: connections and health checks.

Requests are sent with httpcore, the layer below httpx: a proxy needs neither the header fields nor the decoding that
httpx adds. httpcore's own pool compares all idle connections with each other on every request; here a request takes
the connection that was used last, at constant cost.
"""

import asyncio
import logging
import socket
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import httpcore

from semmoe.router.headers import Headers
from semmoe.router.settings import RouterSettings

log = logging.getLogger(__name__)
NOTHING_SENT = (httpcore.ConnectError, httpcore.ConnectTimeout)
FAILED = (httpcore.NetworkError, httpcore.TimeoutException, httpcore.ProtocolError)
# Answers have no time limit, so only TCP keep-alive detects that a machine is gone.
KEEP_ALIVE = [(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)] + [
    (socket.IPPROTO_TCP, getattr(socket, name), value)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
    if hasattr(socket, name)
]
Body = bytes | AsyncIterable[bytes]


class Backend:
    """One server, with persistent HTTP/1.1 connections."""

    def __init__(self, url: str, settings: RouterSettings) -> None:
        parts = urlsplit(url)
        self.url, self.healthy, self.running = url.rstrip("/"), False, 0
        self.host = parts.netloc.encode()
        self._scheme, self._name = parts.scheme.encode(), (parts.hostname or "").encode()
        self._port = parts.port or (443 if parts.scheme == "https" else 80)
        self._settings, self._failures = settings, 0
        self._idle: deque[httpcore.AsyncHTTPConnection] = deque()  # the one that was used last is at the right

    @asynccontextmanager
    async def send(self, method: str, target: bytes, headers: Headers, body: Body) -> AsyncIterator[httpcore.Response]:
        """Send a request and yield the response with its body unread. Raises NOTHING_SENT or FAILED."""
        connection = await self._take()
        try:
            url = httpcore.URL(scheme=self._scheme, host=self._name, port=self._port, target=target)
            timeout = {"timeout": {"connect": self._settings.connect_seconds}}  # no limit on generation
            request = httpcore.Request(method.encode(), url, headers=headers, content=body, extensions=timeout)
            response = await connection.handle_async_request(request)
            try:
                yield response
            finally:
                await response.aclose()
        finally:
            await self._give_back(connection)

    async def probe(self) -> str | None:
        """Check the backend's health once. Returns None, or what is wrong."""
        try:
            status = await asyncio.wait_for(self._health(), self._settings.health_timeout)
        except NOTHING_SENT:
            return "it refuses connections"
        except asyncio.TimeoutError:
            return self._bad(f"no answer to GET /health in {self._settings.health_timeout:g} s")
        except (*FAILED, httpcore.UnsupportedProtocol, OSError) as error:
            return self._bad(f"GET /health failed: {type(error).__name__}")
        if status >= 500:
            return self._bad(f"GET /health answered {status}")
        self._failures = 0
        return None

    async def close(self) -> None:
        while self._idle:
            await self._idle.pop().aclose()

    async def _health(self) -> int:
        async with self.send("GET", b"/health", [(b"host", self.host)], b"") as response:
            async for _ in response.aiter_stream():
                pass
            return response.status

    def _bad(self, reason: str) -> str | None:
        """Count a failure; it is reported only after several in a row, since a busy engine may be late."""
        self._failures += 1
        return None if self.healthy and self._failures < self._settings.health_failures else reason

    async def _take(self) -> httpcore.AsyncHTTPConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.has_expired():
                return connection
            await connection.aclose()
        origin = httpcore.Origin(self._scheme, self._name, self._port)
        kept = self._settings.idle_seconds
        return httpcore.AsyncHTTPConnection(origin, keepalive_expiry=kept, socket_options=KEEP_ALIVE)

    async def _give_back(self, connection: httpcore.AsyncHTTPConnection) -> None:
        if connection.is_closed() or not connection.is_idle():
            await connection.aclose()
            return
        self._idle.append(connection)
        while self._idle[0].has_expired():  # connections left over from busier times
            await self._idle.popleft().aclose()
            if not self._idle:
                break


class Fleet:
    """All backends, with health checks in the background."""

    def __init__(self, settings: RouterSettings, lost: Callable[[int], None]) -> None:
        """lost: called with the number of a backend that becomes unhealthy."""
        self.backends = [Backend(url, settings) for url in settings.backends]
        self._lost, self._seconds = lost, settings.health_seconds
        self._watches: list[asyncio.Task[None]] = []

    @property
    def ready(self) -> bool:
        return any(backend.healthy for backend in self.backends)

    def running(self, without: set[int]) -> list[int | None]:
        """Per backend, the number of requests in flight; None if it is unhealthy or in `without`."""
        return [b.running if b.healthy and i not in without else None for i, b in enumerate(self.backends)]

    async def start(self) -> None:
        """Check all backends, then start to check them periodically."""
        numbers = range(len(self.backends))
        await asyncio.gather(*map(self._look, numbers))
        self._watches = [asyncio.create_task(self._watch(number)) for number in numbers]

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for backend in self.backends:
            await backend.close()

    def mark(self, number: int, wrong: str | None) -> None:
        """Record that a backend is healthy (None) or what is wrong with it."""
        backend = self.backends[number]
        if backend.healthy and wrong is not None:
            log.warning("semmoe: backend %s is not used: %s", backend.url, wrong)
            self._lost(number)
        elif not backend.healthy and wrong is None:
            log.info("semmoe: backend %s is healthy", backend.url)
        backend.healthy = wrong is None

    async def _watch(self, number: int) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            await self._look(number)

    async def _look(self, number: int) -> None:
        self.mark(number, await self.backends[number].probe())
