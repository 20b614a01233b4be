"""Parts that do nothing, used where a part is not attached to a rank's model, so that hooks need not test for it."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from semmoe.engines.counters import Reading
from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator


class NoShuffle:
    """In place of a shuffle: tokens stay where the engine puts them."""

    active = False
    comms: Sequence[Communicator] = ()

    def readings(self, labels: Mapping[str, str]) -> Iterator[Reading]:
        """Yield nothing: no pass is shuffled."""
        yield from ()

    def begin_step(self, read: Callable[[], Step]) -> None:
        """Do nothing: no token of the pass is shuffled."""

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """Do nothing: no token of the pass is shuffled."""

    def end(self) -> None:
        """Do nothing: no token of the pass was shuffled."""

    def listen(self, routed: Callable[[int, torch.Tensor], None]) -> None:
        """Do nothing: only shuffled rows carry the routing of other ranks."""

    def observe(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Do nothing; this is never called, since the shuffle is never active."""

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

    def begin(self, read: Callable[[], Step]) -> None:
        """Do nothing: the pass is not read."""

    def observe(self, layer: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Do nothing: routing is not kept."""

    def put(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Do nothing: routing is not kept."""

    def end(self) -> None:
        """Do nothing: the pass was not recorded."""

    def close(self) -> None:
        """Do nothing: the pass was not recorded."""

    def tell(self, kept: np.ndarray | slice) -> None:
        """Do nothing: there are no recorded rows to pass on."""

    def finish(self, request: str, prompt_ids: Sequence[int], length: int) -> None:
        """Do nothing: the request was not recorded."""


class NoTraffic:
    """In place of a traffic counter: no all-to-all sends rows, so none are counted."""

    counts = False

    def count(self, expert_ids: torch.Tensor, per_rank: int = 1, real: torch.Tensor | None = None) -> None:
        """Do nothing: no rows are sent."""

    def reset_counts(self) -> None:
        """Do nothing: nothing was counted."""
