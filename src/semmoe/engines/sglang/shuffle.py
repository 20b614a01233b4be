"""Shuffle tokens at SGLang's layer boundaries.

With an expert all-to-all SGLang reduce-scatters the attention's output, and gathers the normalised rows before the next
attention. Its first layer has the whole residual stream in any case.
"""

from collections.abc import Callable
from typing import Any

import torch

from semmoe.engines.layer import TokenRows
from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler


class BoundaryShuffle(TokenRows):
    """The hooks of one rank. `begin_pass` and `end` enclose a forward pass.

    In a pass that is not shuffled SGLang's own code runs, whose slices are contiguous.

    layer_of_norm: the MoE layer that each post-attention norm (by identity) leads to.
    """

    def __init__(self, shuffler: Shuffler, comm: Communicator, layer_of_norm: dict[int, int]) -> None:
        super().__init__(shuffler, comm)
        self._layers = layer_of_norm
        self._inside = False  # between the two hooks of a feed-forward layer
        # called with the name of every hook that ran at a MoE layer
        self.ran: Callable[[str], None] = lambda hook: None

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """A forward pass begins."""
        self.begin_step(read)

    def end(self) -> None:
        super().end()
        self._inside = False

    def bound(self, original: torch.Tensor | None) -> torch.Tensor | None:
        """The number of this rank's rows that are real, if some may be padding."""
        return None if self.active else original

    def before_experts(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, norm: Any, **call: Any
    ) -> Any:
        """Before a layer's feed-forward: (N', H) partial sums and the whole residual stream -> this rank's rows."""
        self._padded, self._layer, self._inside = len(hidden_states), self._layers.get(id(norm)), True
        self._tell_ran("scatter")
        if not self._started(forward_batch):
            return original(hidden_states, residual, forward_batch, norm, **call)
        mine, residual = self.scatter(hidden_states, residual, self._layer)
        return call["read"].update_and_read(call["update"], mine, residual, norm)

    def _started(self, forward_batch: Any) -> bool:
        """Whether this pass is shuffled."""
        return self.shuffled

    def _tell_ran(self, hook: str) -> None:
        if self._layer is not None:
            self.ran(hook)

    def before_attention(
        self, original: Any, hidden_states: torch.Tensor, residual: torch.Tensor, forward_batch: Any, norm: Any, **call
    ) -> Any:
        """Before the next layer's attention: this rank's rows -> the whole stream, and its norm."""
        self._end_layer()
        if not self.active:
            return original(hidden_states, residual, forward_batch, norm, **call)
        from sglang.srt.layers.layer_boundary.ops import GatheredInput

        assert call.get("post_residual_addition") is None, "not supported beside shuffling"
        stream = self.restore(call["update"].update(hidden_states, residual))
        rows, residual = call["read"].read(stream, norm, call.get("quant_format", ""))
        return GatheredInput(rows), residual

    def after_last(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, *args, **call
    ) -> Any:
        """After the last layer: gather the rows of all ranks."""
        self._end_layer()
        if not self.active:
            return original(hidden_states, residual, forward_batch, *args, **call)
        update = args[0] if args else call["update"]
        return self.restore(update.update(hidden_states, residual)), None

    def _end_layer(self) -> None:
        if self._inside:
            self._tell_ran("restore")
        self._inside = False
