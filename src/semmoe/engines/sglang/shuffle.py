"""Shuffle tokens at SGLang's layer boundaries.

With an expert all-to-all SGLang reduce-scatters the attention's output, and gathers the normalised rows before the next
attention. Its first layer has the whole residual stream in any case.

A pass begins at its first reduce-scatter, from the tensors of its ForwardBatch: in a graph these are buffers that every
replay fills again, while the hook around the whole pass runs outside it. Slot 0 is also padding in SGLang.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from semmoe.engines.layer import TokenRows
from semmoe.engines.step import Pass, Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler


class BoundaryShuffle(TokenRows):
    """The hooks of a rank. `begin` and `end` enclose a forward pass.

    All padded rows are shuffled: each rank's slice is as long as SGLang's own, with its tokens first. In a pass that is
    not shuffled SGLang's own code runs, whose slices are contiguous.

    layer_of_norm: the MoE layer that each post-attention norm (by identity) leads to. num_slots: of SGLang's request
    pool, which is made after the model is loaded.
    """

    def __init__(
        self,
        shuffler: Shuffler,
        comm: Communicator,
        layer_of_norm: dict[int, int],
        num_slots: Callable[[], int],
    ) -> None:
        super().__init__(shuffler, comm, num_slots)
        self._layers = layer_of_norm
        self._inside = False  # between the two hooks of a feed-forward layer
        self._announced = False  # whether `begin` was called, not while a graph is captured
        self._step: Step | None = None  # of an announced pass, except one that only decodes
        self._started = False  # whether this pass has reached its first layer
        # called with the name of every hook that ran at a MoE layer
        self.ran: Callable[[str], None] = lambda hook: None

    def begin(self, this: Pass) -> None:
        """Begin a pass; one that decodes is not read here."""
        self.end()
        self._announced = True
        self._step = None if this.decodes else this.step

    def end(self) -> None:
        super().end()
        self._inside = self._announced = self._started = False
        self._step = None

    def bound(self, original: Tensor | None) -> Tensor | None:
        """The number of this rank's rows that are real, if some may be padding."""
        if not self.active:
            return original
        return self.num_real if original is None else self.num_real.to(original.dtype).view(original.shape)

    def before_experts(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, norm: Any, **call: Any
    ) -> Any:
        """Before a layer's feed-forward: (N', H) partial sums and the whole residual stream -> this rank's rows."""
        self._layer, self._inside = self._layers.get(id(norm)), True
        self._tell_ran("scatter")
        if not self._started:
            self._started = True
            self._start(len(hidden_states), forward_batch)
        if not self.shuffled:
            return original(hidden_states, residual, forward_batch, norm, **call)
        mine, residual = self.scatter(hidden_states, residual, self._layer)
        return call["read"].update_and_read(call["update"], mine, residual, norm)

    def _start(self, num_rows: int, forward_batch: Any) -> None:
        """Begin a pass at its first layer, if it has tokens to shuffle."""
        self.shuffled = False  # the pass before may have been captured, which no hook ends
        # SGLang may change the mode of an announced decode pass before this point.
        decodes = self._step is None and (self._announced or forward_batch.forward_mode.is_decode())
        if not decodes and (self._step is None or self._step.num_tokens == 0):
            return
        if self.decide(num_rows):
            if self._step is not None:
                self.start_prompts(num_rows, self._step, forward_batch.input_ids.device)
            else:
                where = forward_batch.input_ids, forward_batch.req_pool_indices, forward_batch.positions
                self.start_decoding(num_rows, *where)
        if self._announced:
            self.count_pass()

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
        self._started = False  # while graphs are captured, no hook signals the end of the pass
        if not self.active:
            return original(hidden_states, residual, forward_batch, *args, **call)
        update = args[0] if args else call["update"]
        return self.restore(update.update(hidden_states, residual)), None

    def _end_layer(self) -> None:
        if self._inside:
            self._tell_ran("restore")
        self._inside = False
