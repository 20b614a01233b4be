"""Hold requests for a bounded wait, so that those which arrive close together are assigned together.

A window opens when a request arrives while none waits. It ends `seconds` later, or at once when `most` requests are in
it. All of them then leave, in order of arrival, so that none waits longer and none is overtaken by another of them.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

MOST = 64  # requests of a window
Item = TypeVar("Item")
Result = TypeVar("Result")


class Window(Generic[Item]):
    """For a loop that asks again and again whether the window is `due`. Not thread-safe."""

    def __init__(self, seconds: float, most: int = MOST, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._most, self._clock = seconds, most, clock
        self._items: list[Item] = []
        self._end = 0.0

    def add(self, item: Item) -> None:
        """Let an item wait."""
        if not self._items:
            self._end = self._clock() + self._seconds
        self._items.append(item)

    @property
    def due(self) -> bool:
        """Whether items wait that should leave now."""
        return len(self._items) >= self._most or (bool(self._items) and self._clock() >= self._end)

    def take(self) -> list[Item]:
        """All items that wait, in order of arrival; the window is empty afterwards."""
        items, self._items = self._items, []
        return items


class AsyncWindow(Generic[Item, Result]):
    """For coroutines of one event loop: each waits in `join` until its window has been decided."""

    def __init__(
        self,
        seconds: float,
        decide: Callable[[list[Item]], Sequence[Result]],
        undo: Callable[[Result], None],
        most: int = MOST,
    ) -> None:
        """decide: the results of all items of a window, in their order; undo: one that nobody takes any more."""
        self._seconds, self._decide, self._undo, self._most = seconds, decide, undo, most
        self._waiting: list[tuple[Item, asyncio.Future[Result]]] = []
        self._timer: asyncio.TimerHandle | None = None

    async def join(self, item: Item) -> Result:
        """Wait for the end of the window and return what was decided for `item`; raises what `decide` raises."""
        loop = asyncio.get_running_loop()
        decided: asyncio.Future[Result] = loop.create_future()
        self._waiting.append((item, decided))
        if len(self._waiting) >= self._most:
            self._end()
        elif self._timer is None:
            self._timer = loop.call_later(self._seconds, self._end)
        try:
            return await decided
        except asyncio.CancelledError:  # perhaps after the decision, before this coroutine could take it
            if not decided.cancelled() and decided.exception() is None:
                self._undo(decided.result())
            raise

    def _end(self) -> None:
        """Close the window; the loop's next turn decides, lest the request that filled it overtake the others."""
        if self._timer is not None:
            self._timer.cancel()
        waiting, self._waiting, self._timer = self._waiting, [], None
        asyncio.get_running_loop().call_soon(self._settle, waiting)

    def _settle(self, waiting: list[tuple[Item, asyncio.Future[Result]]]) -> None:
        """Decide for all that still wait."""
        waiting = [(item, decided) for item, decided in waiting if not decided.done()]
        if not waiting:
            return
        try:
            results = self._decide([item for item, _ in waiting])
        except Exception as error:
            for _, decided in waiting:
                decided.set_exception(error)
            return
        for (_, decided), result in zip(waiting, results, strict=True):
            decided.set_result(result)
