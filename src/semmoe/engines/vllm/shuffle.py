"""Split tokens over an attention-TP group around vLLM's experts, by the plan or by position.

No code of a decoder layer is copied. Its attention returns a partial sum, the norm after it gets only the rows of this
rank, its experts compute these, and the layer's output is gathered: the residual stream, passed on with a residual of
zeros. Everything else in the layer, such as DeepSeek-V2's scaling in float16, is unchanged.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import CUDAGraphMode
from vllm.distributed import get_tp_group, tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.utils import sequence_parallel_chunk

from semmoe.core import Plan
from semmoe.engines.layer import TokenRows
from semmoe.engines.settings import PluginSettings
from semmoe.engines.step import Pass, Step
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.model import check_split, graphs
from semmoe.engines.vllm.routing import RealRows
from semmoe.engines.vllm.step import Slots, on_device
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler

GRAPHS_HOLD_TABLES = "captured graphs hold the token tables: serve with --enforce-eager"

# Attributes by which layers and expert blocks state that they split rows themselves; they are read in `forward` only.
OWN_SPLITS = ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe", "is_sequence_parallel")


class LayerShuffle(TokenRows):
    """Splits rows into the plan's slices in the decoder layers given to `hook`, in passes that are shuffled.

    Other passes, such as those with few rows, are split by position. The passes of idle ranks, for warm-up, and those
    that are captured are begun by no hook: all their rows are padding. runner: vLLM's. slots: of its requests.
    """

    def __init__(
        self, shuffler: Shuffler, comm: Communicator, real: RealRows, runner: Any, slots: Slots, drafts: int
    ) -> None:
        super().__init__(shuffler, comm, lambda: runner.max_num_reqs + 1, drafts)
        slots.most = runner.max_num_reqs
        self._real = real
        self._runner = runner
        self._of_requests = slots
        self._slots = torch.zeros(runner.max_num_tokens, dtype=torch.int64, device=real.count.device)  # by row
        self._step: Step | None = None  # of a pass in which a request has several tokens
        self._announced = False  # whether `begin` was called
        self.ran: Callable[[], None] = lambda: None  # called after every layer that was shuffled

    def hook(self, layer: nn.Module, place: int) -> None:
        """Hook a decoder layer, which is the MoE layer `place` of the model."""
        block, norm = expert_block(layer), layer.post_attention_layernorm
        keep_partial(layer, block)
        stop_own_splits(layer, block)
        norm.forward = functools.partial(self._normalise, norm.forward, place)
        block.forward = functools.partial(self._experts, block.forward)
        layer.forward = functools.partial(self._whole, layer.forward)

    def begin(self, this: Pass) -> None:
        """Begin a pass. Tokens of a pass over prompts are known here; a decoding pass reads its own on the device.

        For a decoding pass, the slots of its requests are copied to a buffer beside vLLM's buffers of token ids and
        positions, which a captured graph reads too. Slot 0 is padding, so slots count from 1.
        """
        self.end()
        self._announced = True
        if this.decodes:
            slots = self._of_requests.take(list(self._runner.input_batch.req_ids))
            self._slots[: len(slots)].copy_(torch.from_numpy(slots + 1), non_blocking=True)
        else:
            self._step = replace(this.step, slots=this.step.slots + 1)

    def end(self) -> None:
        super().end()
        self._step, self._announced = None, False
        self._slots.zero_()

    def _normalise(self, normalise: Callable[..., Any], place: int, partial: Tensor, residual: Tensor) -> Any:
        """(N', H) partial sums and residual -> this rank's rows, or all rows if they are not shuffled, normalized."""
        if place == 0:
            self._start(len(partial))
        if not self.shuffled:
            partial = tensor_model_parallel_all_reduce(partial)
        else:
            partial, residual = self.scatter(partial, residual, place)
            self._real.count.copy_(self.num_real)
        return normalise(partial, residual)

    def _start(self, num_rows: int) -> None:
        """Begin a pass over `num_rows` rows, which the shuffle pads to equal slices."""
        padded = self.padded(num_rows)
        if self.decide(padded):
            if self._step is not None:
                self.start_prompts(padded, self._step, self._slots.device)
            else:
                buffers = self._runner.input_ids, self._slots, self._runner.positions
                self.start_decoding(padded, *(on_device(buffer, num_rows) for buffer in buffers))
        if self._announced:
            self.count_pass()

    def _experts(self, compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        return compute(rows) if self.active else by_position(compute, rows)

    def _whole(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, residual = compute(*args, **kwargs)
        self.ran()
        if not self.active:
            return out, residual
        stream = self.restore(out + residual)
        return stream, torch.zeros_like(stream)


def new_shuffler(plan: Plan, runner: Any, settings: PluginSettings) -> Shuffler:
    """The shuffler of this rank by a plan."""
    group = runner.vllm_config.parallel_config.data_parallel_rank
    return Shuffler(settings.served(plan), group, get_tp_group().rank_in_group, runner.device)


def new_shuffle(plan: Plan, runner: Any, settings: PluginSettings, real: RealRows, slots: Slots) -> LayerShuffle:
    """The shuffle around the model's layers with experts. Raises ValueError in a mode in which rows would be lost."""
    group, speculation = get_tp_group(), runner.vllm_config.speculative_config
    drafts = speculation.num_speculative_tokens if speculation is not None else 0
    check_graphs(graphs(runner), drafts)
    comm = Communicator(group.device_group, group.rank_in_group, group.world_size)
    shuffle = LayerShuffle(new_shuffler(plan, runner, settings), comm, real, runner, slots, drafts)
    shuffle.make = functools.partial(new_shuffler, runner=runner, settings=settings)
    return shuffle


def check_graphs(mode: CUDAGraphMode, drafts: int) -> None:
    """Raise ValueError if tokens that vLLM captures in graphs of this mode could not be shuffled.

    drafts: draft tokens per request, of which the host must read a pass.
    """
    if mode == CUDAGraphMode.NONE or (drafts == 0 and mode == CUDAGraphMode.FULL_DECODE_ONLY):
        return
    how = "give --enforce-eager" if drafts else "of vLLM's modes of CUDA graphs give FULL_DECODE_ONLY"
    raise ValueError(f"tokens are not shuffled in CUDA graphs of mode {mode.name}: {how}, or SEMMOE_SHUFFLE=off")


def layers_to_split(runner: Any, layers: list[int]) -> list[nn.Module]:
    """The decoder layers around whose experts tokens are split, in order; layers: those with experts, sorted.

    Raises ValueError if some layers cannot be split.
    """
    found, name = moe_layers(runner.model), type(runner.model).__name__
    if sorted(found) != layers:
        raise ValueError(
            f"{name}: tokens can be split at {len(found)} of its {len(layers)} MoE layers only; set SEMMOE_SHUFFLE=off"
        )
    check_split(runner)
    return [found[layer] for layer in layers]


def split_by_position(layer: nn.Module) -> None:
    """Split rows by position, as vLLM does for some families: each rank computes the experts of its share."""
    block = expert_block(layer)
    if not any(getattr(module, name, False) for module in (layer, block) for name in OWN_SPLITS):
        block.forward = functools.partial(by_position, block.forward)


def by_position(compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
    """Run `compute` on this rank's share of the rows (N, H), and gather the results (N, H) of all ranks."""
    out = compute(sequence_parallel_chunk(rows)).contiguous()
    return tensor_model_parallel_all_gather(out, 0)[: len(rows)]


def moe_layers(model: nn.Module) -> dict[int, nn.Module]:
    """Decoder layers with experts that can be split, by their index in the model."""
    known = {hook.target.removesuffix(".forward") for hook in targets.LAYERS}
    layers = [m for m in model.modules() if f"{type(m).__module__}.{type(m).__name__}" in known]
    blocks = [(expert_block(layer), layer) for layer in layers]
    return {block.experts.layer_id: layer for block, layer in blocks if block is not None}


def expert_block(layer: nn.Module) -> Any:
    """The layer's module that contains its experts; None for a dense layer."""
    blocks = [child for child in layer.children() if isinstance(getattr(child, "experts", None), MoERunner)]
    return blocks[0] if blocks else None


def keep_partial(layer: nn.Module, block: nn.Module) -> None:
    """Make the layer's attention return its partial sum, for the shuffled reduce-scatter."""
    inside = set(block.modules())
    sums = [m for m in layer.modules() if isinstance(m, RowParallelLinear) and m not in inside]
    if len(sums) != 1:
        raise ValueError(
            f"{type(layer).__name__} sums over its ranks {len(sums)} times before its experts: "
            "tokens cannot be shuffled; set SEMMOE_SHUFFLE=off"
        )
    sums[0].reduce_results = False


def stop_own_splits(*modules: nn.Module) -> None:
    for module in modules:
        for name in OWN_SPLITS:
            if hasattr(module, name):
                setattr(module, name, False)
