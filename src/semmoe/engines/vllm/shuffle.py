"""Split tokens over an attention-TP group around vLLM's experts, by the plan or by position.

No code of a decoder layer is copied. Its attention returns a partial sum, the norm after it gets only the rows of this
rank, its experts compute these, and the layer's output is gathered: the residual stream, passed on with a residual of
zeros. Everything else in the layer, such as DeepSeek-V2's scaling in float16, is unchanged.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from vllm.distributed import tensor_model_parallel_all_gather, tensor_model_parallel_all_reduce
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.linear import RowParallelLinear
from vllm.model_executor.models.utils import sequence_parallel_chunk

from semmoe.engines.layer import TokenRows
from semmoe.engines.step import SlotWatch
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.routing import RealRows
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.shuffler import Shuffler

# Attributes by which layers and expert blocks state that they split rows themselves; they are read in `forward` only.
OWN_SPLITS = ("use_sequence_parallel_moe", "use_attn_reduce_scatter_for_moe", "is_sequence_parallel")


class LayerShuffle(TokenRows):
    """Splits rows into the plan's slices in the decoder layers given to `hook`, in passes that are shuffled.

    In other passes, such as those with few rows, for warm-up and of idle ranks, rows are split by position.
    """

    def __init__(self, shuffler: Shuffler, comm: Communicator, real: RealRows, drafts: int) -> None:
        super().__init__(shuffler, comm)
        self._real, self._watch = real, SlotWatch(drafts)
        self.num_rows = 0  # rows of this rank at the current layer, without padding
        self.ran: Callable[[], None] = lambda: None  # called after every layer that was shuffled

    def hook(self, layer: nn.Module, place: int) -> None:
        """Hook a decoder layer, which is the MoE layer `place` of the model."""
        block, norm = expert_block(layer), layer.post_attention_layernorm
        keep_partial(layer, block)
        stop_own_splits(layer, block)
        norm.forward = functools.partial(self._normalise, norm.forward, place)
        block.forward = functools.partial(self._experts, block.forward)
        layer.forward = functools.partial(self._whole, layer.forward)

    def _normalise(self, normalise: Callable[..., Any], place: int, partial: Tensor, residual: Tensor) -> Any:
        """(N', H) partial sums and residual -> this rank's rows, or all rows if they are not shuffled, normalized."""
        if not self.shuffled:
            partial = tensor_model_parallel_all_reduce(partial)
        else:
            partial, residual = self.scatter(partial, residual, place)
            self.num_rows = len(partial)
            self._real.count.fill_(self.num_rows)
        return normalise(partial, residual)

    def _experts(self, compute: Callable[[Tensor], Tensor], rows: Tensor) -> Tensor:
        if not self.active:
            return by_position(compute, rows)
        # Pad to as many rows as vLLM's own split has, as some of its all-to-alls require.
        width = -(-self._padded // self.comm.size)
        return compute(nn.functional.pad(rows, (0, 0, 0, width - len(rows))))[: self.num_rows]

    def _whole(self, compute: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        out, residual = compute(*args, **kwargs)
        self.ran()
        if not self.active:
            return out, residual
        stream = self.restore(out + residual)
        return stream, torch.zeros_like(stream)


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
