"""The shuffle with static shapes in vLLM, whose decode passes may then be captured in CUDA graphs.

The hook around a pass runs before a graph is replayed, and writes the slots of its requests to a buffer; what is
captured reads this buffer, and vLLM's own of token ids and positions. Slot 0 is padding, so slots count from 1.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group

from semmoe.core import Plan
from semmoe.engines.static import DeviceRows
from semmoe.engines.step import Step
from semmoe.engines.vllm.model import graphs
from semmoe.engines.vllm.routing import RealRows
from semmoe.engines.vllm.settings import VllmSettings
from semmoe.engines.vllm.shuffle import LayerShuffle
from semmoe.engines.vllm.step import Slots, decoding_slots, on_device
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import TokenShuffler
from semmoe.runtime.shuffler_device import DeviceShuffler

GRAPHS_HOLD_TABLES = "captured graphs hold the token tables: serve with --enforce-eager"


class StaticLayerShuffle(LayerShuffle):
    """Splits the rows of every pass: those of warm-up passes, of idle ranks and of captured ones are begun by no hook.

    Without a hook all rows are padding. runner: vLLM's. slots: of its requests.
    """

    def __init__(self, shuffler: DeviceShuffler, comm: Communicator, real: RealRows, runner: Any, slots: Slots) -> None:
        super().__init__(shuffler, comm, real, 0)
        slots.most = runner.max_num_reqs
        self._rows = DeviceRows(shuffler, lambda: runner.max_num_reqs + 1)
        self._runner, self._of_requests = runner, slots
        self._slots = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=real.count.device)  # by row
        self._step: Step | None = None  # of a pass in which a request has several tokens
        self._unpadded = 0  # rows that the model has

    def begin_step(self, read: Callable[[], Step]) -> None:
        """Begin a pass; one with a token per request is not read, since that would wait for the device."""
        self.end()
        slots = decoding_slots(self._runner, self._of_requests)
        if slots is None:
            step = read()
            self._step = replace(step, slots=step.slots + 1)
        else:
            self._slots[: len(slots)].copy_(torch.from_numpy(slots + 1), non_blocking=True)

    def end(self) -> None:
        super().end()
        self._step = None
        self._slots.zero_()

    def use(self, shuffler: Any) -> None:
        """Shuffle by another plan's tables on the device, which hooks keep the object of."""
        self._rows.follow(shuffler)

    def _normalise(self, normalise: Callable[..., Any], place: int, partial: Tensor, residual: Tensor) -> Any:
        """(N', H) partial sums and the residual of all rows -> those of this rank, padded, and normalised."""
        self._unpadded, missing = len(partial), -len(partial) % self.comm.size
        if place == 0:
            self.shuffled = self._shuffler.shuffles(len(partial) + missing)
            if self.shuffled:
                self._start(len(partial) + missing)
        if not self.shuffled:
            return super()._normalise(normalise, place, partial, residual)
        partial, residual = (nn.functional.pad(rows, (0, 0, 0, missing)) for rows in (partial, residual))
        partial, residual = self.scatter(partial, residual, place)
        self.num_rows = len(partial)
        self._real.count.copy_(self._handle.counts[self.comm.rank])
        return normalise(partial, residual)

    def _start(self, num_rows: int) -> None:
        if self._step is not None:
            self._rows.start_prompts(num_rows, self._step, self._slots.device)
        else:
            buffers = self._runner.input_ids, self._slots, self._runner.positions
            self._rows.start_decoding(num_rows, *(on_device(buffer, self._unpadded) for buffer in buffers))
        self._tokens = num_rows

    def restore(self, rows: Tensor) -> Tensor:
        return super().restore(rows)[: self._unpadded]

    def _scatter_rows(self, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        return self._rows.scatter(self.comm, partial, residual, self._handle)

    def _gather_rows(self, columns: list[Tensor]) -> list[Tensor]:
        return self._rows.gather(self.comm, columns, self._handle)


def new_shuffler(plan: Plan, runner: Any, settings: VllmSettings) -> DeviceShuffler | TokenShuffler:
    """The shuffler of this rank by a plan, on the device or on the host."""
    group = runner.vllm_config.parallel_config.data_parallel_rank
    where = settings.served(plan), group, get_tp_group().rank_in_group, settings.shuffle
    return DeviceShuffler(*where, runner.device) if is_static(settings, runner) else TokenShuffler(*where)


def new_shuffle(
    plan: Plan, runner: Any, settings: VllmSettings, real: RealRows, layers: list[nn.Module], slots: Slots
) -> LayerShuffle:
    """The shuffle around the model's layers with experts. Raises ValueError in a mode in which rows would be lost."""
    group, speculation = get_tp_group(), runner.vllm_config.speculative_config
    shuffler = new_shuffler(plan, runner, settings)
    comm = Communicator(group.device_group, group.rank_in_group, group.world_size)
    check_graphs(graphs(runner), isinstance(shuffler, DeviceShuffler))
    if isinstance(shuffler, DeviceShuffler):
        return StaticLayerShuffle(shuffler, comm, real, runner, slots)
    drafts = speculation.num_speculative_tokens if speculation is not None else 0
    return LayerShuffle(shuffler, comm, real, drafts)


def is_static(settings: VllmSettings, runner: Any) -> bool:
    """Whether tokens are shuffled on the device. Raises ValueError if that is asked for with drafts."""
    speculates = runner.vllm_config.speculative_config is not None
    if speculates and settings.static == "1":
        raise ValueError("SEMMOE_STATIC=1: drafts are several tokens of a request, which the host must read: omit it")
    return settings.static == "1" or (not settings.static and not speculates and str(runner.device) != "cpu")


def check_graphs(mode: CUDAGraphMode, static: bool) -> None:
    """Raise ValueError if tokens that vLLM captures in graphs of this mode could not be shuffled."""
    if mode == CUDAGraphMode.NONE or (static and mode == CUDAGraphMode.FULL_DECODE_ONLY):
        return
    how = "give --enforce-eager" if not static else "of vLLM's modes of CUDA graphs give FULL_DECODE_ONLY"
    raise ValueError(f"tokens are not shuffled in CUDA graphs of mode {mode.name}: {how}, or SEMMOE_SHUFFLE=off")
