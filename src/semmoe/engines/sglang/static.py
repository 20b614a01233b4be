"""The shuffle with static shapes, on the model's device: decode passes can be captured in CUDA graphs.

A pass begins at its first reduce-scatter, from the tensors of its ForwardBatch: in a graph these are buffers that every
replay fills anew, while the hook around the whole pass runs outside it. Slot 0 is also padding in SGLang. Passes over
prompts run outside graphs and are read on the host.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semmoe.engines.lookahead import NO_LOOKAHEAD, Lookahead
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers, fused_all_gather, fused_reduce_scatter
from semmoe.runtime.shuffler_device import PADDING_SLOT, DeviceShuffler
from semmoe.runtime.static import static_all_gather, static_reduce_scatter, take_rows


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


class StaticBoundaryShuffle(BoundaryShuffle):
    """Shuffles all padded rows: each rank's slice is as long as SGLang's own, with its tokens first.

    num_slots: of SGLang's request pool, which is made after the model is loaded. buffers: for the fused pair.
    """

    def __init__(
        self,
        shuffler: DeviceShuffler,
        comm: Communicator,
        layer_of_norm: dict[int, int],
        num_slots: Callable[[], int],
        buffers: PeerBuffers | None = None,
        lookahead: Lookahead = NO_LOOKAHEAD,
    ) -> None:
        super().__init__(shuffler, comm, layer_of_norm, lookahead)
        self._device_shuffler = shuffler
        self._num_slots, self._buffers = num_slots, buffers
        self._slots: DeviceSlotWatch | None = None
        self._decodes = False
        self._step: Step | None = None  # the step of a pass over prompts
        self._nobody = 0  # an additional slot for tokens that may be rejected

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """Begin a pass; decode passes are not read here, since that would wait for the device."""
        self.end()
        self._decodes = forward_batch.forward_mode.is_decode()
        self._step = None if self._decodes else read()

    def use(self, shuffler: Any) -> None:
        """Shuffle by another plan's tables on the device, which hooks keep the object of."""
        self._device_shuffler.follow(shuffler)

    def end(self) -> None:
        super().end()
        self._decodes, self._step = False, None

    def bound(self, original: Tensor | None) -> Tensor | None:
        if not self.active:
            return original
        count = self._handle.counts[self._handle.rank]
        return count if original is None else count.to(original.dtype).view(original.shape)

    def after_last(self, *args: Any, **call: Any) -> Any:
        out = super().after_last(*args, **call)
        self._tokens = 0  # while graphs are captured, no hook signals the end of the pass
        return out

    def _started(self, forward_batch: Any) -> bool:
        if self._tokens:
            return True
        if self._step is not None:
            return self._step.num_tokens > 0 and self._start_prompts(self._step, forward_batch.input_ids.device)
        # SGLang may change the mode of a decode pass before this point; `begin_pass` is not called for a captured pass.
        return (self._decodes or forward_batch.forward_mode.is_decode()) and self._start_decode(forward_batch)

    def _watched(self, device: torch.device) -> DeviceSlotWatch:
        """The slot watch, made at the first pass; graphs are captured later, after warm-up passes."""
        if self._slots is None:
            self._nobody = self._num_slots()
            self._slots = DeviceSlotWatch(self._nobody + 1, device)
            self._device_shuffler.reserve(self._nobody + 1)
        self._tokens = self._padded
        return self._slots

    def _start_decode(self, batch: Any) -> bool:
        watch = self._watched(batch.input_ids.device)
        token_ids, slots, positions = map(self._fit, (batch.input_ids, batch.req_pool_indices, batch.positions))
        self._shuffler.start(token_ids, slots, None, watch.begun(slots, positions, positions))
        return True

    def _start_prompts(self, step: Step, device: torch.device) -> bool:
        watch = self._watched(device)
        slots = np.full_like(step.slots, self._nobody) if step.guesses else step.slots
        requests = slots, *step.ends
        new = watch.begun(*(torch.from_numpy(a).to(device) for a in requests))
        token_ids, of_request, decoding = (
            self._fit(torch.from_numpy(a)).to(device) for a in (step.token_ids, slots[step.rows], step.decoding)
        )
        self._shuffler.start(token_ids, of_request, decoding, new)
        return True

    def _fit(self, values: Tensor) -> Tensor:
        """(N,) -> (N'), with zeros for padding."""
        return nn.functional.pad(values, (0, self._padded - len(values)))

    def _scatter_rows(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        if self._buffers is None:
            mine = static_reduce_scatter(self.comm, partial, self._handle)
        else:
            mine = fused_reduce_scatter(self.comm, self._buffers, partial, self._handle)
        return mine, take_rows(residual, self._handle.mine)

    def _gather_rows(self, columns: list[Tensor]) -> list[Tensor]:
        if self._buffers is None:
            return static_all_gather(self.comm, columns, self._handle)
        return fused_all_gather(self.comm, self._buffers, columns, self._handle)
