"""The shuffle with static shapes in SGLang.

A pass begins at its first reduce-scatter, from the tensors of its ForwardBatch: in a graph these are buffers that every
replay fills anew, while the hook around the whole pass runs outside it. Slot 0 is also padding in SGLang.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.static import DeviceRows
from semmoe.engines.step import Step
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.fused import PeerBuffers
from semmoe.runtime.shuffler_device import DeviceShuffler


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
    ) -> None:
        super().__init__(shuffler, comm, layer_of_norm)
        self._rows = DeviceRows(shuffler, num_slots, buffers)
        self._decodes = False
        self._step: Step | None = None  # the step of a pass over prompts

    def begin_pass(self, forward_batch: Any, read: Callable[[], Step]) -> None:
        """Begin a pass; decode passes are not read here, since that would wait for the device."""
        self.end()
        self._decodes = forward_batch.forward_mode.is_decode()
        self._step = None if self._decodes else read()

    def use(self, shuffler: Any) -> None:
        """Shuffle by another plan's tables on the device, which hooks keep the object of."""
        self._rows.follow(shuffler)

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
        if not self._tokens:
            self._tokens = self._padded
            self.shuffled = self._shuffler.shuffles(self._padded) and self._begun(forward_batch)
        return self.shuffled

    def _begun(self, forward_batch: Any) -> bool:
        """Begin a pass at its first layer; False for a pass that has no tokens."""
        if self._step is not None and self._step.num_tokens > 0:
            self._rows.start_prompts(self._padded, self._step, forward_batch.input_ids.device)
        # SGLang may change the mode of a decode pass before this point; `begin_pass` is not called for a captured pass.
        elif self._step is None and (self._decodes or forward_batch.forward_mode.is_decode()):
            where = forward_batch.input_ids, forward_batch.req_pool_indices, forward_batch.positions
            self._rows.start_decoding(self._padded, *where)
        else:
            return False
        return True

    def _scatter_rows(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows.scatter(self.comm, partial, residual, self._handle)

    def _gather_rows(self, columns: list[Tensor]) -> list[Tensor]:
        return self._rows.gather(self.comm, columns, self._handle)
