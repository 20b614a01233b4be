"""Hold requests for a bounded wait, so that those which arrive close together are assigned together.

A window opens when a request arrives while none waits. It ends `seconds` later, or at once when `most` requests are in
it. All of them then leave, in order of arrival, so that none waits longer and none is overtaken by another of them.
"""

import time
from collections.abc import Callable
from typing import Generic, TypeVar

MOST = 64  # requests of a window
Item = TypeVar("Item")


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
