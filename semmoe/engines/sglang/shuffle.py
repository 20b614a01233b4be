"""Tokens to the ranks of an attention-TP group, inside the reduce-scatter and all-gather at SGLang's layer boundaries.

SGLang with an expert all-to-all keeps each rank's slice of the rows between attention layers: it reduce-scatters the
attention's output, and gathers the normalised rows before the next attention. Here the slices are the plan's and change
from layer to layer. The residual must then be known for every token, so the residual stream itself is gathered, and
normalised on every rank: the same bytes. SGLang's first layer has the whole stream anyhow.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from semmoe.engines.sglang.step import SlotWatch, Step
from semmoe.runtime.collectives import Communicator, shuffled_all_gathers, shuffled_reduce_scatter
from semmoe.runtime.tp import TokenShuffler
from semmoe.runtime.tp_device import DeviceShuffler


class BoundaryShuffle:
    """One rank's shuffling. `begin` and `end` enclose a forward pass; the hooks in between do nothing without tokens.

    layer_of_norm: the MoE layer that each post-attention norm (by identity) leads to.
    """

    def __init__(
        self, shuffler: TokenShuffler | DeviceShuffler, comm: Communicator, layer_of_norm: dict[int, int]
    ) -> None:
        self._shuffler: Any = shuffler
        self.comm, self._layers = comm, layer_of_norm
        self._watch = SlotWatch()
        self._tokens, self._padded = 0, 0  # rows of this pass to shuffle, and rows with other padding
        self._handle: Any = None  # between the two collectives of a layer
        self._layer: int | None = None
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        # Called with (layer, logical ids (N, K)) of all rows in their order: by the recorder, which must not make the
        # ids travel as other ranks do not know of it, and for the engine's own capture, which all ranks do alike.
        self.routed: Any = None
        self.captured: Any = None

    def begin(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        step = read()
        self._tokens, self._handle = step.num_tokens, None
        if step.num_tokens:
            slots = step.slots[step.rows]
            self._shuffler.start(step.token_ids, slots, step.decoding, self._watch.begun(step))

    def end(self) -> None:
        self._tokens, self._handle = 0, None

    @property
    def active(self) -> bool:
        """Whether rows are on the plan's slices now."""
        return self._handle is not None

    def bound(self, original: torch.Tensor | None) -> torch.Tensor | None:
        """How many of this rank's rows are real, where some may not be."""
        return None

    def observe(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """What this rank's rows were routed to: logical ids (n, K)."""
        self._routing = expert_ids, weights

    def scatter(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, norm: Any, **call: Any
    ) -> Any:
        """Before a layer's feed-forward: (N', H) partial sums and the whole residual stream -> this rank's rows."""
        self._padded = len(hidden_states)
        if not self._started(forward_batch):
            return original(hidden_states, residual, forward_batch, norm, **call)
        self._layer = self._layers.get(id(norm))
        self._handle = self._shuffler.slices(self._layer)
        mine, residual = self._scatter_rows(hidden_states, residual)
        return call["read"].update_and_read(call["update"], mine, residual, norm)

    def _started(self, forward_batch: Any) -> bool:
        """Whether there are tokens to shuffle."""
        return self._tokens > 0

    def _scatter_rows(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shuffled_reduce_scatter(self.comm, partial[: self._tokens], self._handle)
        return mine, residual[self._handle.mine]

    def gather(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, norm: Any, **call: Any
    ) -> Any:
        """Before the next layer's attention: this rank's rows -> the whole stream, and its norm."""
        if not self.active:
            return original(hidden_states, residual, forward_batch, norm, **call)
        from sglang.srt.layers.layer_boundary.ops import GatheredInput

        assert call.get("post_residual_addition") is None, "not supported beside shuffling"
        stream = self._restore(call["update"].update(hidden_states, residual))
        read, residual = call["read"].read(stream, norm, call.get("quant_format", ""))
        return GatheredInput(read), residual

    def gather_last(
        self, original: Any, hidden_states: torch.Tensor, residual: Any, forward_batch: Any, *args, **call
    ) -> Any:
        """After the last layer."""
        if not self.active:
            return original(hidden_states, residual, forward_batch, *args, **call)
        update = args[0] if args else call["update"]
        return self._restore(update.update(hidden_states, residual)), None

    def _restore(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, H) of every rank -> (N', H) in the tokens' order, zeros for padding; the routing travels along."""
        columns, travels = [rows], self._layer is not None and (self._shuffler.uses_history or self.captured)
        if travels:
            assert self._routing is not None
            columns.append(self._shuffler.by_weight(*self._routing))
        whole = self._gather_rows(columns)
        self._handle = None
        if travels:
            self._tell(whole[1])
        if self._padded == self._tokens:
            return whole[0]
        return nn.functional.pad(whole[0], (0, 0, 0, self._padded - self._tokens))

    def _gather_rows(self, columns: list[torch.Tensor]) -> list[torch.Tensor]:
        return shuffled_all_gathers(self.comm, columns, self._handle)

    def _tell(self, expert_ids: torch.Tensor) -> None:
        assert self._layer is not None
        if self._shuffler.uses_history:
            self._shuffler.observe(self._layer, expert_ids)
        for listener in (self.routed, self.captured):
            if listener is not None:
                listener(self._layer, expert_ids)
