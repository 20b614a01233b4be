"""Back-pressure: limits on requests at the backends, on requests that wait, and on the bytes of both."""

import asyncio
from collections import deque


class BusyError(Exception):
    """There is no room for the request, or it has waited too long."""


class Gate:
    """Admits requests in order of arrival. Used from one event loop."""

    def __init__(self, limit: int, queue: int, seconds: float, max_bytes: int) -> None:
        self._limit, self._room, self._seconds, self._max_bytes = limit, limit + queue, seconds, max_bytes
        self._turns: deque[asyncio.Future[bool]] = deque()
        self.running, self.inside = 0, 0  # requests at the backends; these and all that wait or send their body
        self.held = 0  # bytes of body of all requests inside

    def place(self) -> "Place":
        """A context manager for one request; entering it raises BusyError if there is no room."""
        return Place(self)

    def _enter(self) -> None:
        if self.inside >= self._room:
            raise BusyError
        self.inside += 1

    def _hold(self, size: int) -> None:
        if self.held + size > self._max_bytes:
            raise BusyError
        self.held += size

    async def _start(self) -> None:
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


class Place:
    """The place of one request in a gate."""

    def __init__(self, gate: Gate) -> None:
        self._gate, self._started, self._held = gate, False, 0

    def __enter__(self) -> "Place":
        self._gate._enter()
        return self

    def hold(self, size: int) -> None:
        """Count `size` more bytes of the request's body until it leaves. Raises BusyError."""
        self._gate._hold(size)
        self._held += size

    async def start(self) -> None:
        """Wait until the request may go to a backend. Raises BusyError."""
        await self._gate._start()
        self._started = True

    def __exit__(self, *exception: object) -> None:
        self._gate.inside -= 1
        self._gate.held -= self._held
        if self._started:
            self._gate._stop()


def _give_up(turn: asyncio.Future[bool]) -> None:
    if not turn.done():
        turn.set_result(False)
