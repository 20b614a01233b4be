"""Tokens to the ranks of an attention-TP group, inside the reduce-scatter and all-gather around a layer's feed-forward.

Engines that split tokens over the ranks of an attention group keep each rank's slice of the rows between two attention
layers. Here the slices are the plan's and change from layer to layer. The residual must then be known for every token,
so the residual stream itself is gathered, and normalised on every rank: the same bytes as gathering normalised rows.
"""

from typing import Any

import torch
from torch import nn

from semmoe.engines.step import SlotWatch, Step
from semmoe.runtime.collectives import Communicator, shuffled_all_gathers, shuffled_reduce_scatter
from semmoe.runtime.shuffler import TokenShuffler
from semmoe.runtime.shuffler_device import DeviceShuffler


class TokenRows:
    """One rank's rows. `start` and `end` enclose a forward pass, `scatter` and `restore` a layer's feed-forward.

    An adaptor's hooks call them; without tokens to shuffle they must not be called.
    """

    def __init__(self, shuffler: TokenShuffler | DeviceShuffler, comm: Communicator) -> None:
        self._shuffler: Any = shuffler
        self.comm = comm
        self._watch = SlotWatch()
        self._tokens, self._padded = 0, 0  # rows of this pass to shuffle, and rows with other padding
        self._handle: Any = None  # between the two collectives of a layer
        self._layer: int | None = None
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        # Called with (layer, logical ids (N, K)) of all rows in their order: by the recorder, which must not make the
        # ids travel as other ranks do not know of it, and for the engine's own capture, which all ranks do alike.
        self.routed: Any = None
        self.captured: Any = None

    def start(self, step: Step) -> None:
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

    def observe(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """What this rank's rows were routed to: logical ids (n, K)."""
        self._routing = expert_ids, weights

    def scatter(
        self, partial: torch.Tensor, residual: torch.Tensor, layer: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N', H) partial sums and the residual stream of all rows -> sums and residual of this rank's rows.

        layer: among the MoE layers, None for a dense one.
        """
        self._padded, self._layer = len(partial), layer
        self._handle = self._shuffler.slices(layer)
        return self._scatter_rows(partial, residual)

    def _scatter_rows(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shuffled_reduce_scatter(self.comm, partial[: self._tokens], self._handle)
        return mine, residual[self._handle.mine]

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
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
