"""DeepEP's events, where there are no streams: everything has happened when a call returns."""

from collections.abc import Callable
from typing import Any


class EventHandle:
    def current_stream_wait(self) -> None:
        """Nothing to wait for."""


class EventOverlap:
    """event: None where DeepEP gives none, which callers look at before they wait."""

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None) -> None:
        self.event, self.extra_tensors = event, extra_tensors

    def current_stream_wait(self) -> None:
        assert self.event is not None, "this event was not recorded: the call was not asynchronous"

    def __enter__(self) -> "EventOverlap":
        return self

    def __exit__(self, *exc: object) -> None:
        if self.event is not None:
            self.current_stream_wait()


def recorded(asynchronous: bool) -> EventOverlap:
    return EventOverlap(EventHandle() if asynchronous else None)


def hook_of(receive: Callable[[], object], wanted: bool) -> Callable[[], object] | None:
    """Receive now, or give the caller a hook that does."""
    if wanted:
        return receive
    receive()
    return None
