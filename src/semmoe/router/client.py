"""One client request on ASGI: read or stream its body, send its answer, notice when the client hangs up."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from semmoe.router.headers import Headers, value_of
from semmoe.router.settings import RouterSettings

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
HUNG_UP = 499  # the same status as in nginx


class HungUpError(Exception):
    """The client has closed its connection, so there is nobody to answer."""


class RefusedError(Exception):
    """The router refuses a request with an answer of its own."""

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after = status, kind, retry_after


class Client:
    def __init__(self, scope: Message, receive: Receive, send: Send, settings: RouterSettings) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        raw, query = scope.get("raw_path") or self.path.encode(), scope["query_string"]
        self.target: bytes = raw + b"?" + query if query else raw
        self.status: int | None = None  # set when an answer begins
        self.gone, self._ended = False, False
        self._uploaded = asyncio.Event()
        self._receive, self._send, self._settings = receive, send, settings

    @property
    def has_body(self) -> bool:
        length = value_of(self.headers, b"content-length")
        return value_of(self.headers, b"transfer-encoding") is not None or length not in (None, b"0")

    def check(self) -> None:
        """Raise RefusedError for a request that must not be forwarded, before its body is read.

        A backend could take a target that names a host for a request to that host, and a request that declares its
        length in two ways for two requests (RFC 9112, section 6.3).
        """
        length = value_of(self.headers, b"content-length")
        if not self.target.startswith(b"/"):
            raise RefusedError(400, "invalid_request_error", "the target of a request must be a path")
        if length is not None and value_of(self.headers, b"transfer-encoding") is not None:
            reason = "a request has either Content-Length or Transfer-Encoding, and this one has both"
            raise RefusedError(400, "invalid_request_error", reason)
        if length is not None and int(length) > self._settings.max_body:
            raise self._too_large()

    async def read(self, hold: Callable[[int], None]) -> bytes:
        """The whole body. `hold` is called with the size of each chunk as it arrives, and may raise."""
        body = bytearray()
        async for chunk in self.stream():
            hold(len(chunk))
            body += chunk
        return bytes(body)

    async def stream(self) -> AsyncIterator[bytes]:
        """The body in chunks as they arrive. Raises RefusedError if it is too long or too late.

        Only the time spent waiting for the client counts against the limit.
        """
        clock = asyncio.get_running_loop().time
        size, left, more = 0, self._settings.body_seconds, True
        while more:
            begin = clock()
            message = await self._next(min(left, self._settings.stall_seconds))
            left -= clock() - begin
            size += len(message.get("body", b""))
            if size > self._settings.max_body:
                raise self._too_large()
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._uploaded.set()

    async def _next(self, seconds: float) -> Message:
        """The next message with a part of the body."""
        try:
            message = await asyncio.wait_for(self._receive(), seconds)
        except asyncio.TimeoutError:
            stall, whole = self._settings.stall_seconds, self._settings.body_seconds
            reason = f"the body did not arrive: nothing for {stall:g} s, or not all of it in {whole:g} s"
            raise RefusedError(408, "timeout_error", reason) from None
        if message["type"] == "http.disconnect":
            self.gone = True
            raise HungUpError
        return message

    def _too_large(self) -> RefusedError:
        reason = f"the body is longer than {self._settings.max_body} bytes"
        return RefusedError(413, "invalid_request_error", reason)

    async def while_connected(self, work: Awaitable[T]) -> T:
        """The result of `work`, which reads or has read the body. Raises HungUpError if the client hangs up."""
        task = asyncio.current_task()
        assert task is not None
        watch = asyncio.create_task(self._watch(task))
        try:
            return await work
        except asyncio.CancelledError:
            if not self.gone:
                raise
            raise HungUpError from None
        finally:
            watch.cancel()

    async def _watch(self, task: asyncio.Task[Any]) -> None:
        if self.has_body:
            await self._uploaded.wait()  # until then, `stream` receives the messages
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:  # the end of an answer is reported as a disconnect too
            self.gone = True
            task.cancel()

    async def begin(self, status: int, headers: Headers) -> None:
        self.status = status
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def write(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def end(self, chunk: bytes = b"") -> None:
        self._ended = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def answer(self, status: int, kind: bytes, body: bytes, more: Headers | None = None) -> None:
        """Send an answer of the router's own."""
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(more or [])]
        await self.begin(status, headers)
        await self.end(body)

    async def refuse(self, refused: RefusedError) -> None:
        """Answer with an error in OpenAI's format; close the connection, which may still carry an unread body."""
        error = {"message": str(refused), "type": refused.kind, "param": None, "code": refused.status}
        more = [(b"connection", b"close")]
        if refused.retry_after is not None:
            more.append((b"retry-after", b"%d" % refused.retry_after))
        await self.answer(refused.status, b"application/json", json.dumps({"error": error}).encode(), more)
