"""The shuffle with static shapes, on the model's device: an engine may capture its decode passes in CUDA graphs.

Such a pass is begun from the engine's own tensors, which every replay fills anew at the same addresses; the host reads
none of them. Passes over prompts run outside graphs and are read on the host.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers, fused_all_gather, fused_reduce_scatter
from semmoe.runtime.shuffler_device import PADDING_SLOT, DeviceShuffler
from semmoe.runtime.static import StaticHandle, static_all_gather, static_reduce_scatter, take_rows


class DeviceSlotWatch:
    """`SlotWatch` on the device, for a fixed number of slots."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._next = torch.full((num_slots,), -1, dtype=torch.int64, device=device)

    def begun(self, slots: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """(R,): those of `slots` (R,) that begin a request, PADDING_SLOT in place of the others.

        first, last (R,): positions of each one's tokens in this pass.
        """
        new = torch.where(self._next[slots] == first, PADDING_SLOT, slots)
        self._next[slots] = last + 1
        return new


class DeviceRows:
    """How one rank's passes begin and its rows move; for the shuffles of engines, whose hooks differ.

    num_slots: of the engine's requests, PADDING_SLOT included, known when the first pass begins. buffers: for the fused
    pair.
    """

    def __init__(
        self, shuffler: DeviceShuffler, num_slots: Callable[[], int], buffers: PeerBuffers | None = None
    ) -> None:
        self._shuffler, self._num_slots, self._buffers = shuffler, num_slots, buffers
        self._watch: DeviceSlotWatch | None = None
        self._nobody = 0  # an additional slot, for tokens of which no history is kept

    def follow(self, shuffler: Any) -> None:
        """Shuffle by another plan's tables from the next pass on."""
        self._shuffler.follow(shuffler)

    def start_decoding(self, num_rows: int, token_ids: Tensor, slots: Tensor, positions: Tensor) -> None:
        """Begin a pass with at most one token (N,) per request, padded to `num_rows`."""
        watch = self._watched(token_ids.device)
        token_ids, slots, positions = (_fit(values, num_rows) for values in (token_ids, slots, positions))
        self._shuffler.start(token_ids, slots, None, watch.begun(slots, positions, positions))

    def start_prompts(self, num_rows: int, step: Step, device: torch.device) -> None:
        """Begin a pass in which requests may have several tokens, padded to `num_rows`."""
        watch = self._watched(device)
        known = (step.slots < self._nobody) & (not step.guesses)
        slots = np.where(known, step.slots, self._nobody)
        new = watch.begun(*(torch.from_numpy(values).to(device) for values in (slots, *step.ends)))
        token_ids, decoding = (
            _fit(torch.from_numpy(values), num_rows).to(device) for values in (step.token_ids, step.decoding)
        )
        of_row = np.pad(slots[step.rows], (0, num_rows - step.num_tokens), constant_values=PADDING_SLOT)
        self._shuffler.start(token_ids, of_row, decoding, new)

    def _watched(self, device: torch.device) -> DeviceSlotWatch:
        """The slot watch, made at the first pass; graphs are captured later, after warm-up passes."""
        if self._watch is None:
            self._nobody = self._num_slots()
            self._watch = DeviceSlotWatch(self._nobody + 1, device)
            self._shuffler.reserve(self._nobody + 1)
        return self._watch

    def scatter(
        self, comm: Communicator, partial: Tensor, residual: Tensor, handle: StaticHandle
    ) -> tuple[Tensor, Tensor]:
        """(N', H) partial sums and the residual of all rows -> those of this rank, zeros for padding."""
        if self._buffers is None:
            mine = static_reduce_scatter(comm, partial, handle)
        else:
            mine = fused_reduce_scatter(comm, self._buffers, partial, handle)
        return mine, take_rows(residual, handle.mine)

    def gather(self, comm: Communicator, columns: Sequence[Tensor], handle: StaticHandle) -> list[Tensor]:
        """Columns (n, ...) of this rank's rows -> (N', ...) of all rows, in order."""
        if self._buffers is None:
            return static_all_gather(comm, columns, handle)
        return fused_all_gather(comm, self._buffers, columns, handle)


def _fit(values: Tensor, num_rows: int) -> Tensor:
    """(N,) -> (num_rows,), with zeros for padding."""
    return nn.functional.pad(values, (0, num_rows - len(values)))
