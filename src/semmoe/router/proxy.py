"""The router as an ASGI application.

The body of a request to one of `prompts.ENDPOINTS` is read completely and tokenised in a thread. The request then waits
for its turn, is scheduled, and is forwarded with its rank; its body is not changed. Any other request is streamed to
the backend with the fewest requests. The same limits apply to the length of both bodies and to the time in which the
client must send them.

A request goes to another backend only if the first could not be connected to, so that no byte of it was sent. Any later
failure is answered with 502, because the engine may have begun to work on the request; if the answer has begun, it is
cut off. Neither prompts nor header fields are logged.
"""

import asyncio
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from semmoe.core import Plan
from semmoe.requests.window import AsyncWindow
from semmoe.router.backends import FAILED, NOTHING_SENT, Backend, Body, Fleet
from semmoe.router.client import HUNG_UP, Client, HungUpError, Message, Receive, RefusedError, Send
from semmoe.router.counters import CONTENT_TYPE, Meters
from semmoe.router.gate import BusyError, Gate, Place
from semmoe.router.headers import Headers, end_to_end, named_rank, names_rank, to_backend, with_rank, without_rank
from semmoe.router.prompts import ENDPOINTS, Prompt, Tokenizer, read_prompt
from semmoe.router.schedule import Choice, RankScheduler, Running, UnavailableError
from semmoe.router.settings import RouterSettings

log = logging.getLogger(__name__)
RETRY_AFTER = 1  # seconds
UNKNOWN = Prompt(None)


class Router:
    """An ASGI application. Without a tokenizer, only prompts that are given as token ids are scheduled."""

    def __init__(self, settings: RouterSettings, plan: Plan, tokenizer: Tokenizer | None) -> None:
        self._settings, self._tokenizer = settings, tokenizer
        self.scheduler = RankScheduler(plan, settings)
        self.fleet = Fleet(settings, self.scheduler.forget)
        self.gate = Gate(settings.max_in_flight, settings.queue, settings.queue_seconds, settings.max_held)
        self._meters = Meters(self.fleet, self.gate)
        self._threads = ThreadPoolExecutor(settings.tokenizer_threads, thread_name_prefix="semmoe-tokenizer")
        self._window = AsyncWindow(settings.window_ms / 1000, self._choose_together, self.scheduler.finish)
        self._unknown = 0
        self._failed = False

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
        elif scope["type"] == "http":
            client = Client(scope, receive, send, self._settings)
            if client.method in ("GET", "HEAD") and client.path in ("/router/health", "/router/ready", "/metrics"):
                await self._answer_self(client)
            else:
                await self._serve(client)
        else:
            await send({"type": "websocket.close", "code": 1003})

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self.fleet.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self.fleet.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
        await send({"type": "lifespan.shutdown.complete"})

    async def _answer_self(self, client: Client) -> None:
        if client.path == "/metrics":
            await client.answer(200, CONTENT_TYPE, self._meters.page())
        elif client.path == "/router/ready" and not self.fleet.ready:
            await client.answer(503, b"text/plain", b"no backend is healthy\n")
        else:
            await client.answer(200, b"text/plain", b"ok\n")

    async def _serve(self, client: Client) -> None:
        """Answer or cut off a request, whatever happens, and count it."""
        scheduled, by, status = client.method == "POST" and client.path in ENDPOINTS, "none", 500
        try:
            client.check()
            by = await (self._schedule(client) if scheduled else self._pass(client))
            status = client.status or status
        except RefusedError as refused:
            status = refused.status
            if client.status is None:  # otherwise the server cuts the answer off
                await client.refuse(refused)
        except HungUpError:
            status = HUNG_UP
        finally:
            endpoint = client.path if scheduled else "other"
            self._meters.requests.labels(endpoint, str(status), by).inc()

    async def _pass(self, client: Client) -> str:
        body: Body = client.stream() if client.has_body else b""
        return await client.while_connected(self._forward(client, body, None))

    async def _schedule(self, client: Client) -> str:
        try:
            with self.gate.place() as place:
                body = await client.read(place.hold)
                return await client.while_connected(self._schedule_read(client, place, body))
        except BusyError:
            raise RefusedError(503, "overloaded_error", "the router is full: try again", RETRY_AFTER) from None

    async def _schedule_read(self, client: Client, place: Place, body: bytes) -> str:
        begin = time.perf_counter()
        prompt = await self._read_prompt(client.path, body)
        tokenised = time.perf_counter()
        await place.start()
        now = time.perf_counter()
        self._meters.queued.observe(now - tokenised)
        self._meters.added.observe(now - begin)
        return await self._forward(client, body, prompt)

    async def _read_prompt(self, path: str, body: bytes) -> Prompt:
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._threads, read_prompt, path, body, self._tokenizer)
        except Exception as error:  # scheduling must never fail a request
            self._count_failure(error)
            return UNKNOWN

    async def _forward(self, client: Client, body: Body, prompt: Prompt | None) -> str:
        """Send a request, to another backend if one cannot be reached; returns the backend's URL.

        prompt: None if the request is not to be scheduled.
        """
        unreachable: set[int] = set()
        while True:
            choice = await self._choose(client, prompt, unreachable)
            backend = self.fleet.backends[choice.backend]
            if unreachable:
                self._meters.retries.inc()
            try:
                with self._load(choice):
                    await self._exchange(client, backend, self._fields(client, choice, body), body)
                return backend.url
            except NOTHING_SENT as error:
                unreachable.add(choice.backend)
                self.fleet.mark(choice.backend, f"it cannot be connected to ({type(error).__name__})")

    async def _choose(self, client: Client, prompt: Prompt | None, unreachable: set[int]) -> Choice:
        running = self.fleet.running(unreachable)
        try:
            if prompt is None:
                return self.scheduler.spare(running)
            choice = await self._choose_rank(client, prompt, running, wait=not unreachable)
        except UnavailableError:
            raise RefusedError(503, "unavailable_error", "no backend can be reached", RETRY_AFTER) from None
        rank = "any" if choice.rank is None else str(choice.rank)
        self._meters.scheduled.labels(rank, choice.by).inc()
        if prompt.ids is not None:
            self._meters.prompt_tokens.inc(len(prompt.ids))
            self._meters.cached_tokens.inc(choice.cached_tokens)
        return choice

    async def _choose_rank(self, client: Client, prompt: Prompt, running: Running, wait: bool) -> Choice:
        """wait: whether the request may wait for others, to be assigned together with them."""
        by_header = named_rank(client.headers)
        named = prompt.rank if by_header is None else by_header
        unreadable = by_header is None and names_rank(client.headers)
        if unreadable or (named is not None and named >= self.scheduler.num_ranks):
            return self.scheduler.spare(running)  # not a rank of this plan, which the engine will refuse
        try:
            if wait and self._settings.window_ms > 0 and named is None and prompt.ids is not None:
                return await self._window.join(prompt)
            return self.scheduler.choose(prompt, named, running)
        except UnavailableError:
            raise
        except Exception as error:  # scheduling must never fail a request
            self._count_failure(error)
            return self.scheduler.spare(running)
        finally:
            self._meters.unknown_tokens.inc(self.scheduler.unknown_tokens - self._unknown)
            self._unknown = self.scheduler.unknown_tokens

    def _choose_together(self, prompts: list[Prompt]) -> list[Choice]:
        return self.scheduler.choose_together(prompts, self.fleet.running(set()))

    def _fields(self, client: Client, choice: Choice, body: Body) -> Headers:
        """The request's header fields, with the chosen rank unless each backend is one rank."""
        length = len(body) if isinstance(body, bytes) else None
        headers = to_backend(client.headers, self.fleet.backends[choice.backend].host, length)
        if self._settings.backend_ranks == "urls":
            return without_rank(headers) if choice.by == "named" else headers
        if choice.by == "plan" and choice.rank is not None:
            return with_rank(headers, choice.rank, client.path)
        return headers

    @contextmanager
    def _load(self, choice: Choice) -> Iterator[None]:
        """Count the request as in flight, for its backend and in the scheduler."""
        backend = self.fleet.backends[choice.backend]
        backend.running += 1
        try:
            yield
        finally:
            backend.running -= 1
            self.scheduler.finish(choice)

    async def _exchange(self, client: Client, backend: Backend, headers: Headers, body: Body) -> None:
        try:
            async with backend.send(client.method, client.target, headers, body) as response:
                await client.begin(response.status, end_to_end(response.headers))
                async for chunk in response.aiter_stream():
                    await client.write(chunk)
        except NOTHING_SENT:
            raise
        except FAILED as error:
            log.warning("semmoe: backend %s failed during a request: %s", backend.url, type(error).__name__)
            raise RefusedError(502, "backend_error", "the backend failed during the request") from None
        await client.end()

    def _count_failure(self, error: Exception) -> None:
        """Count and log the type of an error; its message may quote a prompt."""
        self._meters.schedule_failures.inc()
        level = logging.DEBUG if self._failed else logging.WARNING
        log.log(
            level,
            "semmoe: a request could not be scheduled: %s; further failures are only counted",
            type(error).__name__,
        )
        self._failed = True
