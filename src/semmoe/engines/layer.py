"""The layer protocol: tokens are shuffled over an attention-TP group in the collectives around a feed-forward layer.

    slices -> shuffled reduce-scatter -> norm and experts (the engine's own)
           -> shuffled all-gather, with expert ids -> observe

A pass with fewer rows than the plan's `shuffle_from` keeps contiguous slices: nothing is looked up, no ids are sent,
and no history is updated.

Every engine runs it through `TokenRows`, from its own hooks. The slices are the plan's and change from layer to layer,
so that every rank needs the residual of every token. Therefore the residual stream itself is gathered, and normalised
on every rank; this sends as many bytes as gathering normalised rows.

A decode pass is begun from the engine's own tensors. They may belong to a CUDA graph, which every replay fills again,
and the host does not read them. A pass over prompts is read on the host.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semmoe.core import Plan
from semmoe.engines.counters import Reading
from semmoe.engines.step import SlotWatch, Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffle import ShuffleHandle, shuffled_all_gather, shuffled_reduce_scatter
from semmoe.runtime.shuffler import PADDING_SLOT, Shuffler


class TokenRows:
    """Shuffles one rank's rows. A pass begins with `begin_step` or one of the `start` methods, and `end` ends it.

    `scatter` and `restore` enclose a feed-forward layer. An adaptor's hooks call them.

    num_slots: the number of the engine's request slots, PADDING_SLOT included, known when the first pass begins.
    drafts: draft tokens per request that a pass may run and that may be rejected and run again.
    """

    def __init__(
        self,
        shuffler: Shuffler,
        comm: Communicator,
        num_slots: Callable[[], int],
        drafts: int = 0,
    ) -> None:
        self.comm = comm
        self._shuffler = self._next = shuffler
        self.make: Any = None  # Callable[[Plan], Shuffler]: the same rank's of another plan, where plans can be swapped
        self._num_slots = num_slots
        self._drafts = drafts
        self._nobody = 0  # an additional slot, for tokens of which no history is kept
        self._watch = SlotWatch(0, torch.device("cpu"))  # replaced at the first pass, before graphs are captured
        self.shuffled = False  # whether this pass is shuffled by the plan
        self.passes: Counter[str] = Counter()  # forward passes by their slices, shuffled or contiguous
        self._handle: ShuffleHandle | None = None  # between the two collectives of a layer
        self._layer: int | None = None
        self._given_rows = 0  # at the start of a layer
        self._routing: tuple[Tensor, Tensor, Tensor | None] | None = None
        # Functions called with (layer, logical ids (N, K)) of all rows in order. They do not decide whether ids are
        # sent: a recorder is attached to one rank only, and all ranks must send the same.
        self.routed: Any = None
        self.captured: Any = None

    def begin_step(self, step: Step, device: torch.device) -> None:
        """Begin a pass over these tokens, in contiguous slices if it has too few to shuffle."""
        self.end()
        num_rows = self.padded(step.num_tokens)
        if self.decide(num_rows):
            self.start_prompts(num_rows, step, device)
        else:
            self._shuffler.start_unshuffled(torch.arange(num_rows, device=device) < step.num_tokens)
        self.count_pass()

    def start_decoding(self, num_rows: int, token_ids: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Begin a shuffled pass with at most one token (N,) per request, padded to `num_rows`."""
        watch = self._watched(token_ids.device)
        token_ids, slots, positions = (fit_rows(values, num_rows) for values in (token_ids, slots, positions))
        self._shuffler.start(token_ids, slots, None, watch.begun(slots, positions, positions))

    def start_prompts(self, num_rows: int, step: Step, device: torch.device) -> None:
        """Begin a shuffled pass in which requests may have several tokens, padded to `num_rows`."""
        watch = self._watched(device)
        known = (step.slots < self._nobody) & (not step.guesses)
        slots = np.where(known, step.slots, self._nobody)
        new = watch.begun(*(torch.from_numpy(values).to(device) for values in (slots, *step.ends)))
        token_ids, decoding = (
            fit_rows(torch.from_numpy(values), num_rows).to(device) for values in (step.token_ids, step.decoding)
        )
        of_row = np.pad(slots[step.rows], (0, num_rows - step.num_tokens), constant_values=PADDING_SLOT)
        self._shuffler.start(token_ids, of_row, decoding, new)

    def _watched(self, device: torch.device) -> SlotWatch:
        """Return the slot watch; where the engine has more slots than before, all requests begin again."""
        slots = self._num_slots()
        if slots > self._nobody:
            self._nobody = slots
            self._watch = SlotWatch(slots + 1, device, self._drafts)
            self._shuffler.reserve(slots + 1)
        return self._watch

    def padded(self, num_rows: int) -> int:
        """Rows of a pass once it is padded to equal slices."""
        return -(-num_rows // self.comm.size) * self.comm.size

    def decide(self, num_rows: int) -> bool:
        """Decide whether a pass over `num_rows` rows, padding included, is shuffled."""
        self.shuffled = self._shuffler.shuffles(num_rows)
        return self.shuffled

    def count_pass(self) -> None:
        """Count this pass of real tokens by its slices."""
        self.passes["shuffled" if self.shuffled else "contiguous"] += 1

    def end(self) -> None:
        """End a forward pass."""
        self._handle, self.shuffled = None, False

    def prepare(self, plan: Plan) -> None:
        """Make another plan's tables, beside the passes that run; `switch` installs them."""
        self._next = self.make(plan)

    def switch(self) -> None:
        """Shuffle by the prepared plan from the next pass on, which knows no history of the requests that run.

        Not for graphs that are captured, which hold the addresses of today's tables.
        """
        self._shuffler = self._next
        self._shuffler.reserve(self._nobody + 1)

    def readings(self, labels: Mapping[str, str]) -> Iterator[Reading]:
        """Yield the numbers of shuffled and of contiguous passes."""
        for slices, count in list(self.passes.items()):
            yield "passes", {**labels, "slices": slices}, count

    @property
    def comms(self) -> list[Communicator]:
        """The communicators that send this rank's rows."""
        return [self.comm]

    def listen(self, routed: Callable[[int, Tensor], None]) -> None:
        """Call `routed` with (layer, logical ids (N, K)) of all rows in order, after every MoE layer."""
        self.routed = routed

    @property
    def active(self) -> bool:
        """Whether rows are currently divided into the plan's slices."""
        return self._handle is not None

    @property
    def num_real(self) -> Tensor:
        """() int32: the number of this rank's rows that are tokens, which are its first rows; inside a layer."""
        assert self._handle is not None
        return self._handle.counts[self._handle.rank]

    def observe(self, expert_ids: Tensor, weights: Tensor, logical: Tensor | None = None) -> None:
        """Observe the routing of this rank's rows: ids (n, K) and weights (n, K).

        logical (P,): the expert of each physical one, if ids are physical.
        """
        self._routing = expert_ids, weights, logical

    def scatter(self, partial: Tensor, residual: Tensor, layer: int | None) -> tuple[Tensor, Tensor]:
        """(N', H) partial sums and the residual stream of all rows -> (n, H) sums and residual of this rank's rows.

        Rows of padding are last and zero. layer: index among the MoE layers, None for a dense layer.
        """
        self._given_rows, self._layer = len(partial), layer
        self._handle = handle = self._shuffler.slices(layer)
        return shuffled_reduce_scatter(self.comm, partial, residual, handle)

    def restore(self, rows: Tensor) -> Tensor:
        """(n, H) of every rank -> (N', H) in the tokens' order; the routing is sent along.

        Rows of padding may be left out.
        """
        handle, layer = self._handle, self._layer
        assert handle is not None
        self._handle = None
        rows = fit_rows(rows, handle.slice_rows)
        if not self.shuffled or layer is None or not (self._shuffler.uses_history or self.captured):
            return shuffled_all_gather(self.comm, [rows], handle)[0][: self._given_rows]
        assert self._routing is not None
        expert_ids = fit_rows(self._shuffler.by_weight(*self._routing), handle.slice_rows)
        whole, expert_ids = self._shuffler.gather(self.comm, rows, expert_ids, handle, layer)
        for listener in (self.routed, self.captured):
            if listener is not None:
                listener(layer, expert_ids)
        return whole[: self._given_rows]


def fit_rows(values: Tensor, num_rows: int) -> Tensor:
    """(N, ...) -> (num_rows, ...), with zeros for padding."""
    missing = num_rows - len(values)
    return nn.functional.pad(values, (0, 0) * (values.dim() - 1) + (0, missing)) if missing else values
