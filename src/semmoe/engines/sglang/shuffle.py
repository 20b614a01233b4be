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
    """The hooks of one rank. `begin_pass` and `end` enclose a forward pass; without tokens the hooks do nothing.

    layer_of_norm: the MoE layer that each post-attention norm (by identity) leads to.
    """

    def __init__(self, shuffler: Shuffler, comm: Communicator, layer_of_norm: dict[int, int]) -> None:
        super().__init__(shuffler, comm)
        self._layers = layer_of_norm
        self._summed = False  # between the sum of a layer's attention and the end of the layer, with all rows here
        # the sum of (N', H) over the attention group, for passes in which every rank has all rows
        self.all_reduce: Callable[[torch.Tensor], torch.Tensor] = lambda rows: rows
        # called with the name of every hook that ran at a MoE layer
        self.ran: Callable[[str], None] = lambda hook: None

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """A forward pass begins."""
        self.begin_step(read)
        if self.whole:
            forward_batch.global_num_tokens_cpu = None  # with it SGLang pads rows to a multiple of the ranks

    def end(self) -> None:
        super().end()
        self._summed = False

    def bound(self, original: torch.Tensor | None) -> torch.Tensor | None:
        """The number of this rank's rows that are real, if some may be padding."""
        return None if self.active or self.whole else original

    def before_experts(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, norm: Any, **call: Any
    ) -> Any:
        """Before a layer's feed-forward: (N', H) partial sums and the whole residual stream -> this rank's rows."""
        self._padded, layer = len(hidden_states), self._layers.get(id(norm))
        if self.whole:
            mine, self._layer, self._summed = self.all_reduce(hidden_states), layer, True
        elif self._started(forward_batch):
            mine, residual = self.scatter(hidden_states, residual, layer)
        else:
            return original(hidden_states, residual, forward_batch, norm, **call)
        self._tell_ran("scatter")
        return call["read"].update_and_read(call["update"], mine, residual, norm)

    def _started(self, forward_batch: Any) -> bool:
        """Whether there are tokens to shuffle."""
        return self._tokens > 0

    def _tell_ran(self, hook: str) -> None:
        if self._layer is not None:
            self.ran(hook)

    def before_attention(
        self, original: Any, hidden_states: torch.Tensor, residual: torch.Tensor, forward_batch: Any, norm: Any, **call
    ) -> Any:
        """Before the next layer's attention: this rank's rows -> the whole stream, and its norm."""
        if not (self.active or self._summed):
            return original(hidden_states, residual, forward_batch, norm, **call)
        from sglang.srt.layers.layer_boundary.ops import GatheredInput

        assert call.get("post_residual_addition") is None, "not supported beside shuffling"
        read, quantised = call["read"], call.get("quant_format", "")
        if self._summed:
            self._end_layer()
            rows, residual = read.update_and_read(call["update"], hidden_states, residual, norm, quant_format=quantised)
        else:
            rows, residual = read.read(self._in_order(call["update"].update(hidden_states, residual)), norm, quantised)
        return GatheredInput(rows), residual

    def after_last(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, *args, **call
    ) -> Any:
        """After the last layer: gather the rows of all ranks."""
        if not (self.active or self._summed):
            return original(hidden_states, residual, forward_batch, *args, **call)
        update = args[0] if args else call["update"]
        return self._in_order(update.update(hidden_states, residual)), None

    def _in_order(self, rows: torch.Tensor) -> torch.Tensor:
        """This rank's rows, or all of them where it has all -> all rows in the tokens' order."""
        self._end_layer()
        return self.restore(rows) if self.active else rows

    def _end_layer(self) -> None:
        self._tell_ran("restore")
        self._summed = False
