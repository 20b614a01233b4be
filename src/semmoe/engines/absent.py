"""What stands where a part is not attached to a rank's model: it does nothing, so that hooks ask no questions."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator


class NoShuffle:
    """Tokens stay where the engine puts them."""

    active = False
    comms: Sequence[Communicator] = ()

    def begin_step(self, read: Callable[[], Step]) -> None:
        """Nothing is to be shuffled."""

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """Nothing is to be shuffled."""

    def end(self) -> None:
        """Nothing was shuffled."""

    def listen(self, routed: Callable[[int, torch.Tensor], None]) -> None:
        """Routing travels with shuffled rows alone: elsewhere each rank sees its own."""

    def observe(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Not called, as it is never active."""

    def bound(self, original: torch.Tensor | None) -> torch.Tensor | None:
        """The engine's own."""
        return original

    def leave(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In place of every hook at a layer's ends: what the engine does."""
        return original(*args, **kwargs)

    before_experts = before_attention = after_last = leave


class NoRecorder:
    """Nobody listens."""

    recording = False
    waiting: Step | None = None

    def begin(self, read: Callable[[], Step]) -> None:
        """The pass is not read."""

    def observe(self, layer: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Nothing is kept."""

    def put(self, layer: int, expert_ids: torch.Tensor) -> None:
        """Nothing is kept."""

    def end(self) -> None:
        """Nothing was recorded."""

    def close(self) -> None:
        """Nothing was recorded."""

    def tell(self, kept: np.ndarray | slice) -> None:
        """There is nothing to tell."""

    def finish(self, request: str, prompt_ids: Sequence[int], length: int) -> None:
        """Nothing was recorded of it."""


class NoTraffic:
    """No all-to-all sends rows, so none are counted."""

    counts = False

    def count(self, targets: torch.Tensor) -> None:
        """Nothing is counted."""
