"""The layer protocol: tokens are shuffled over an attention-TP group in the collectives around a feed-forward layer.

    slices -> shuffled reduce-scatter -> norm and experts (the engine's own)
           -> shuffled all-gather, with expert ids -> observe

A pass with fewer rows than the plan's `shuffle_from` keeps contiguous slices: nothing is looked up, no ids are sent,
and no history is updated.

Every engine runs it through `TokenRows`, from its own hooks. The slices are the plan's and change from layer to layer,
so that every rank needs the residual of every token. Therefore the residual stream itself is gathered, and normalised
on every rank; this sends as many bytes as gathering normalised rows.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from semmoe.engines.counters import Reading
from semmoe.engines.step import SlotWatch, Step
from semmoe.runtime.collectives import Communicator, shuffled_all_gathers, shuffled_reduce_scatter
from semmoe.runtime.shuffler import Shuffler


class TokenRows:
    """Shuffles one rank's rows. `begin` and `end` enclose a forward pass, `scatter` and `restore` a feed-forward layer.

    An adaptor's hooks call them; without tokens to shuffle they must not be called.
    """

    def __init__(self, shuffler: Shuffler, comm: Communicator) -> None:
        self._shuffler = shuffler
        self.comm = comm
        self._watch = SlotWatch()
        self.shuffled = False  # whether this pass is shuffled by the plan
        self.passes: Counter[str] = Counter()  # forward passes by their slices, shuffled or contiguous
        # slots whose request began in passes that were not shuffled, or by another plan
        self._unseen = np.zeros(0, np.int64)
        self._used_slots = 0  # that were used so far
        self._tokens, self._padded = 0, 0  # rows of this pass to shuffle, without and with padding
        self._handle: Any = None  # handle between the two collectives of a layer
        self._layer: int | None = None
        self._routing: tuple[torch.Tensor, torch.Tensor] | None = None
        # Functions called with (layer, logical ids (N, K)) of all rows in order. They do not decide whether ids are
        # sent: a recorder is attached to one rank only, and all ranks must send the same.
        self.routed: Any = None
        self.captured: Any = None

    def begin(self, token_ids: Any, slots: Any, decoding: Any, new_slots: Any) -> None:
        """Begin a forward pass over these tokens; arguments same as in `Shuffler.start`."""
        self._tokens, self._handle = len(token_ids), None
        self.shuffled = self._shuffler.shuffles(self._tokens)
        self.passes["shuffled" if self.shuffled else "contiguous"] += 1
        if len(new_slots):
            self._unseen = np.union1d(self._unseen, new_slots)
        self._used_slots = max(self._used_slots, int(slots.max(initial=-1)) + 1)
        self._shuffler.start(token_ids, slots, decoding, self._unseen)
        if self.shuffled:
            self._unseen = self._unseen[:0]

    def begin_step(self, read: Callable[[], Step]) -> None:
        """Begin a pass that is read from an engine's batch; one without tokens is not shuffled."""
        step = read()
        self.end()
        if step.num_tokens:
            # A request that has tokens in a pass that is not shuffled begins its history anew afterwards.
            new = self._watch.begun(step) if self._shuffler.shuffles(step.num_tokens) else step.slots[:0]
            self.begin(step.token_ids, step.slots[step.rows], step.decoding, new)

    def end(self) -> None:
        self._tokens, self._handle, self.shuffled = 0, None, False

    def use(self, shuffler: Shuffler) -> None:
        """Shuffle by another plan from the next pass on, which knows no history of the requests that run."""
        self._shuffler = shuffler
        self._unseen = np.union1d(self._unseen, np.arange(self._used_slots))

    def readings(self, labels: Mapping[str, str]) -> Iterator[Reading]:
        """Yield the number of passes that were shuffled, and of those that were not."""
        for slices, count in list(self.passes.items()):
            yield "passes", {**labels, "slices": slices}, count

    @property
    def comms(self) -> list[Communicator]:
        """The communicators that send this rank's rows."""
        return [self.comm]

    def listen(self, routed: Callable[[int, torch.Tensor], None]) -> None:
        """Call `routed` with (layer, logical ids (N, K)) of all rows in order, after every MoE layer."""
        self.routed = routed

    @property
    def active(self) -> bool:
        """Whether rows are currently divided into the plan's slices."""
        return self._handle is not None

    def observe(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> None:
        """Observe the routing of this rank's rows: logical ids (n, K) and weights (n, K)."""
        self._routing = expert_ids, weights

    def scatter(
        self, partial: torch.Tensor, residual: torch.Tensor, layer: int | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N', H) partial sums and the residual stream of all rows -> sums and residual of this rank's rows.

        layer: index among the MoE layers, None for a dense layer.
        """
        self._padded, self._layer = len(partial), layer
        self._handle = self._shuffler.slices(layer)
        return self._scatter_rows(partial, residual)

    def _scatter_rows(self, partial: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mine = shuffled_reduce_scatter(self.comm, partial[: self._tokens], self._handle)
        return mine, residual[self._handle.mine]

    def restore(self, rows: torch.Tensor) -> torch.Tensor:
        """(n, H) of every rank -> (N', H) in the tokens' order, zeros for padding; the routing is sent along."""
        columns, listened = [rows], self._shuffler.uses_history or self.captured
        travels = self.shuffled and self._layer is not None and listened
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
