"""Back-pressure: so many requests at the backends, so many that wait for them, so many bytes of both."""

import asyncio
from collections import deque


class BusyError(Exception):
    """There is no room, or there was none for too long."""


class Gate:
    """First come, first served. One event loop uses it."""

    def __init__(self, limit: int, queue: int, seconds: float, max_bytes: int) -> None:
        self._limit, self._room, self._seconds, self._max_bytes = limit, limit + queue, seconds, max_bytes
        self._turns: deque[asyncio.Future[bool]] = deque()
        self.running, self.inside = 0, 0  # at the backends, and these with all that wait or still send their body
        self.held = 0  # bytes of the bodies of all that are inside

    def place(self) -> "Place":
        """A place for one request, in `with`. Raises BusyError on entering it."""
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
                self._stop()  # its turn had just come
            raise
        finally:
            late.cancel()
        if not begun:
            raise BusyError

    def _stop(self) -> None:
        """Hand the place at the backends to the next in the queue."""
        while self._turns:
            turn = self._turns.popleft()
            if not turn.done():
                turn.set_result(True)
                return
        self.running -= 1


class Place:
    def __init__(self, gate: Gate) -> None:
        self._gate, self._started, self._held = gate, False, 0

    def __enter__(self) -> "Place":
        self._gate._enter()
        return self

    def hold(self, size: int) -> None:
        """So many more bytes of the request's body are held until it leaves. Raises BusyError."""
        self._gate._hold(size)
        self._held += size

    async def start(self) -> None:
        """Wait for a turn at the backends. Raises BusyError."""
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
