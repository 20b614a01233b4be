"""The recording that a plan is solved on: begun when requests drift, or always on and cut where they began to."""

import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from semmoe.settings import AdaptSettings

POLL = 0.5  # seconds between two looks at how many requests were recorded
MORE = 4  # times as many requests as are needed make a better plan, where they are there
ROTATE = 10  # a recording that is always on begins anew after so many times the requests that are needed


class Recorder(Protocol):
    """The recorder of a running server."""

    def recorded(self) -> int:
        """Requests in the recording that is on."""

    def begin_recording(self) -> None: ...

    def end_recording(self, target: Path) -> None: ...


class Recording:
    """One server's recording. folder: where what is dropped lies until it is removed."""

    def __init__(
        self,
        server: Recorder,
        settings: AdaptSettings,
        folder: Path,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._server, self._settings, self._folder, self._clock, self._sleep = server, settings, folder, clock, sleep
        self._counts: deque[tuple[float, int]] = deque()  # requests that had been recorded by a time
        self._on = False

    def note(self) -> None:
        """Where it is always on: begin it, remember how many requests it has now, and bound what it holds."""
        s = self._settings
        if not s.keep_recording:
            return
        if self._on and self._server.recorded() > ROTATE * s.requests:
            self.close()
        if not self._on:
            self._begin()
        self._counts.append((self._clock(), self._server.recorded()))
        while len(self._counts) > 2 and self._counts[1][0] <= self._clock() - s.window:
            self._counts.popleft()

    def held(self) -> int:
        """Requests that it has."""
        return self._server.recorded() if self._on else 0

    def take(self, since: float | None, target: Path) -> int:
        """Write a trace to `target` once it has enough requests; returns how many of its first do not count.

        since: requests that ended before this time do not count; None: only the newest do, MORE times as many as are
        needed if there are so many.
        """
        s = self._settings
        if not self._on:
            self._begin()
        before = max(self._server.recorded() - MORE * s.requests, 0)
        if since is not None:
            before = max((count for time, count in self._counts if time <= since), default=0)
        begun = self._clock()
        try:
            while self._server.recorded() - before < s.requests and self._clock() - begun < s.patience:
                self._sleep(POLL)
        finally:
            self._end(target)
        return before

    def close(self) -> None:
        """End it, if it is on, and remove what it holds."""
        if self._on:
            with tempfile.TemporaryDirectory(prefix="adapt-", dir=self._folder) as scratch:
                try:
                    self._end(Path(scratch) / "trace")
                except ValueError:
                    return  # nothing was recorded

    def _begin(self) -> None:
        self._server.begin_recording()
        self._on = True

    def _end(self, target: Path) -> None:
        self._on = False
        self._counts.clear()
        self._server.end_recording(target)
