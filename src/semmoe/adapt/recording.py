"""The recording that a plan is solved on: begun when requests drift, or always on and cut where they began to."""

import shutil
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semmoe.settings import AdaptSettings
from semmoe.streams import merge

POLL = 0.5  # seconds between two looks at how many requests were recorded
MORE = 4  # times as many requests as are needed make a better plan, where they are there
PARTS = "adapt-recorded"  # in the control folder: what was recorded before and still counts


class Recorder(Protocol):
    """The recorder of a running server."""

    def recorded(self) -> int: ...  # requests in the recording that is on
    def begin_recording(self) -> None: ...
    def end_recording(self, target: Path) -> int:
        """Write it to `target`; returns how many requests it has. Raises ValueError if it has none."""


@dataclass
class Recording:
    """One server's recording, of which the newest requests are kept."""

    server: Recorder
    settings: AdaptSettings
    folder: Path  # the control folder
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self._parts_at = self.folder / PARTS
        self._counts: deque[tuple[float, int]] = deque()  # requests that had been recorded by a time, in all
        self._parts: deque[tuple[Path, int]] = deque()  # recordings that ended, oldest first, and their requests
        self._dropped = self._made = 0  # requests that are no longer held; parts that were made
        self._on = False
        shutil.rmtree(self._parts_at, ignore_errors=True)  # users' text that a loop left that was killed

    def note(self) -> None:
        """Where it is always on: begin it, remember how many requests there are now, and bound what is held."""
        if not self.settings.keep_recording:
            return
        if self._on and self.server.recorded() > MORE * self.settings.requests:
            self._cut()
        if not self._on:
            self._begin()
        total = self._total()
        if not self._counts or self._counts[-1][1] < total:
            self._counts.append((self.clock(), total))
        while len(self._counts) > 1 and self._counts[1][1] <= self._dropped:
            self._counts.popleft()

    def since(self, begun: float) -> int:
        """Requests that were recorded after a time, of those that are held."""
        return self._total() - self._before(begun)

    def take(self, begun: float, target: Path) -> int:
        """Write a trace to `target` once it has enough requests; returns how many of its first do not count.

        begun: requests that ended before this time do not count. Of the others the newest do, MORE times as many as are
        needed if there are so many.
        """
        s = self.settings
        if not self._on:
            self._begin()
        started = self.clock()
        try:
            while self.since(begun) < s.requests and self.clock() - started < s.patience:
                self.sleep(POLL)
        finally:
            if self.server.recorded() or not self._parts:
                self._cut()
        if s.keep_recording and not self._on:
            self._begin()
        merge([path for path, _ in self._parts], target, in_turn=True)
        older = max(self._before(begun) - self._dropped, self._held() - MORE * s.requests, 0)
        while self._parts and not s.keep_recording:
            self._drop()
        return older

    def close(self) -> None:
        """End it, if it is on, and remove what is held."""
        try:
            if self._on:
                self._cut()
        except ValueError:
            pass  # nothing was recorded
        finally:
            while self._parts:
                self._drop()

    def _held(self) -> int:
        """Requests of recordings that ended."""
        return sum(count for _, count in self._parts)

    def _total(self) -> int:
        return self._dropped + self._held() + (self.server.recorded() if self._on else 0)

    def _before(self, begun: float) -> int:
        """Requests that do not count: those until the last look before `begun`, and those that are dropped."""
        return max((count for time, count in self._counts if time <= begun), default=self._dropped)

    def _begin(self) -> None:
        self.server.begin_recording()
        self._on = True

    def _cut(self) -> None:
        """End the recording that is on and keep it as a part; older parts go where newer ones have enough requests."""
        path, self._on, self._made = self._parts_at / str(self._made), False, self._made + 1
        self._parts_at.mkdir(mode=0o700, exist_ok=True)
        self._parts.append((path, self.server.end_recording(path)))
        while self._held() - self._parts[0][1] >= MORE * self.settings.requests:
            self._drop()

    def _drop(self) -> None:
        path, count = self._parts.popleft()
        self._dropped += count
        shutil.rmtree(path, ignore_errors=True)
