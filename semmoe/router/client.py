"""One request of a client, on ASGI: its body read or streamed, its answer sent, and whether it has hung up."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any, TypeVar

from semmoe.router.headers import Headers, value_of

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
T = TypeVar("T")
HUNG_UP = 499  # as nginx says


class HungUpError(Exception):
    """The client is gone: nobody is to be answered."""


class RefusedError(Exception):
    """The router's own answer to a request."""

    def __init__(self, status: int, kind: str, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.kind, self.retry_after = status, kind, retry_after


class Client:
    def __init__(self, scope: Message, receive: Receive, send: Send) -> None:
        self.method: str = scope["method"]
        self.path: str = scope["path"]
        self.headers: Headers = [(bytes(name), bytes(value)) for name, value in scope["headers"]]
        raw, query = scope.get("raw_path") or self.path.encode(), scope["query_string"]
        self.target: bytes = raw + b"?" + query if query else raw
        self.status: int | None = None  # once an answer has begun
        self.gone, self._ended = False, False
        self._uploaded = asyncio.Event()
        self._receive, self._send = receive, send

    @property
    def has_body(self) -> bool:
        length = value_of(self.headers, b"content-length")
        return value_of(self.headers, b"transfer-encoding") is not None or length not in (None, b"0")

    async def read(self, limit: int, seconds: float) -> bytes:
        """The whole body. Raises RefusedError if it is too long or too late."""
        length = value_of(self.headers, b"content-length")
        if length is not None and int(length) > limit:
            raise _too_large(limit)
        try:
            return await asyncio.wait_for(self._read(limit), seconds)
        except asyncio.TimeoutError:
            raise RefusedError(408, "timeout_error", f"the body did not arrive in {seconds:g} s") from None

    async def _read(self, limit: int) -> bytes:
        chunks, size = [], 0
        async for chunk in self.stream():
            size += len(chunk)
            if size > limit:
                raise _too_large(limit)
            chunks.append(chunk)
        return b"".join(chunks)

    async def stream(self) -> AsyncIterator[bytes]:
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise HungUpError
            if message.get("body"):
                yield message["body"]
            more = message.get("more_body", False)
        self._uploaded.set()

    async def while_connected(self, work: Awaitable[T]) -> T:
        """The result of `work`, which reads or has read the body, unless the client hangs up: HungUpError then."""
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
            await self._uploaded.wait()  # until then it is the body's reader that receives
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ended:  # an answer's end looks like a client's
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
        """The router's own answer."""
        headers = [(b"content-type", kind), (b"content-length", b"%d" % len(body)), *(more or [])]
        await self.begin(status, headers)
        await self.end(body)

    async def refuse(self, refused: RefusedError) -> None:
        """In OpenAI's form. The connection is closed, as there may be a body on it that nobody reads."""
        error = {"message": str(refused), "type": refused.kind, "param": None, "code": refused.status}
        more = [(b"connection", b"close")]
        if refused.retry_after is not None:
            more.append((b"retry-after", b"%d" % refused.retry_after))
        await self.answer(refused.status, b"application/json", json.dumps({"error": error}).encode(), more)


def _too_large(limit: int) -> RefusedError:
    return RefusedError(413, "invalid_request_error", f"the body is longer than {limit} bytes")
