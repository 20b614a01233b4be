"""Back-pressure: limits on requests at the backends, on requests that wait, and on the bytes of both."""

import asyncio
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


class BusyError(Exception):
    """There is no room for the request, or it has waited too long."""


class Gate:
    """Admits requests in order of arrival. Used from one event loop."""

    def __init__(self, limit: int, queue: int, seconds: float, max_bytes: int) -> None:
        self._limit, self._room, self._seconds, self.max_bytes = limit, limit + queue, seconds, max_bytes
        self._turns: deque[asyncio.Future[bool]] = deque()
        self.running, self.inside = 0, 0  # requests at the backends; these and all that wait or send their body
        self.held = 0  # bytes of body of all requests inside

    @contextmanager
    def place(self) -> Iterator["Place"]:
        """A place for one request. Raises BusyError if there is no room."""
        if self.inside >= self._room:
            raise BusyError
        self.inside += 1
        place = Place(self)
        try:
            yield place
        finally:
            self.inside -= 1
            self.held -= place.held
            if place.started:
                self._stop()

    async def start(self) -> None:
        """Take a place at the backends, or wait for one. Raises BusyError after too long a wait."""
        if self.running < self._limit and not self._turns:
            self.running += 1
            return
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[bool] = loop.create_future()
        self._turns.append(turn)
        late = loop.call_later(self._seconds, _give_up, turn)
        try:
            begun = await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.result():
                self._stop()  # its turn had come in the meantime
            raise
        finally:
            late.cancel()
        if not begun:
            raise BusyError

    def _stop(self) -> None:
        """Give the place at the backends to the next request in the queue."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.running -= 1


@dataclass
class Place:
    """The place of one request in a gate."""

    gate: Gate
    started: bool = False
    held: int = 0  # bytes of the request's body

    def hold(self, size: int) -> None:
        """Count `size` more bytes of the request's body until it leaves. Raises BusyError."""
        if self.gate.held + size > self.gate.max_bytes:
            raise BusyError
        self.gate.held += size
        self.held += size

    async def start(self) -> None:
        """Wait until the request may go to a backend. Raises BusyError."""
        await self.gate.start()
        self.started = True


def _give_up(turn: asyncio.Future[bool]) -> None:
    if not turn.done():
        turn.set_result(False)
