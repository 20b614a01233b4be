"""Parts that do nothing, used where a part is not attached to a rank's model, so that hooks need not test for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from semmoe.engines.counters import Reading
from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.copies import RankCopies


def _nothing(part: object, *arguments: object, **named: object) -> None:
    """Do nothing, as a method of a part."""


class NoShuffle:
    """In place of a shuffle: tokens stay where the engine puts them."""

    active = False
    comms: Sequence[Communicator] = ()
    begin = end = listen = observe = prepare = switch = _nothing

    def readings(self, labels: Mapping[str, str]) -> Iterator[Reading]:
        """Yield nothing: no pass is shuffled."""
        yield from ()

    def bound(self, original: torch.Tensor | None) -> torch.Tensor | None:
        """Return the engine's own number of real rows."""
        return original

    def leave(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the engine's own function, in place of every hook at the start or end of a layer."""
        return original(*args, **kwargs)

    before_experts = before_attention = after_last = leave


class NoRecorder:
    """In place of a recorder: no routing is recorded."""

    recording = hooked = False
    waiting: Step | None = None
    begin = observe = put = end = tell = finish = _nothing


class NoTraffic:
    """In place of a traffic counter: no all-to-all sends rows, so none are counted."""

    counts = False
    count = _nothing

    def place(self, copies: RankCopies, expert_ids: torch.Tensor, *counted: object) -> torch.Tensor:
        """Choose copies, uncounted."""
        return copies.to_physical(expert_ids)
