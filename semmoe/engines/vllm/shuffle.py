"""Tokens shuffled inside vLLM's decoder layers, whose attention ends in a sum over the ranks.

vLLM's Qwen3-MoE sums the attention's output on every rank, keeps a slice of it for the experts, and gathers their
results; DeepSeek-V2 and V3 reduce-scatter in place of sum and slice. Here both reduce-scatter to the plan's slices and
gather the residual stream, which a layer hands on with a residual of zeros.
"""

from typing import Any

import torch
from torch import Tensor, nn

from semmoe.engines.shuffle import TokenRows
from semmoe.engines.vllm.routing import RealRows
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.tp import TokenShuffler


class LayerShuffle(TokenRows):
    """layers: the MoE layer that each decoder layer is, by identity of the module."""

    def __init__(self, shuffler: TokenShuffler, comm: Communicator, layers: dict[int, int], real: RealRows) -> None:
        super().__init__(shuffler, comm)
        self._layers, self._real = layers, real
        self.num_rows = 0  # of this rank at the layer under way, without padding

    def takes(self, layer: Any) -> bool:
        """Whether rows are to be shuffled at this decoder layer, now."""
        return self._tokens > 0 and id(layer) in self._layers

    def feed_forward(self, layer: Any, partial: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """The second half of a decoder layer: (N', H) partial sums of attention -> the stream (N', H), and zeros."""
        rows, residual = self.scatter(partial, residual, self._layers[id(layer)])
        rows, residual = layer.post_attention_layernorm(rows, residual)
        self.num_rows = len(rows)
        self._real.count.fill_(self.num_rows)
        # As many rows as vLLM's own split has, on which some of its all-to-alls count; and the experts without the
        # block around them, which would split and gather by position.
        rows = nn.functional.pad(rows, (0, 0, 0, -(-self._padded // self.comm.size) - len(rows)))
        out = layer.mlp.experts(hidden_states=rows, router_logits=rows)[: self.num_rows]
        stream = self.restore(out + residual)
        return stream, torch.zeros_like(stream)


def attention_input(layer: Any, hidden_states: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The normalised rows, and the stream before them."""
    if residual is None:
        return layer.input_layernorm(hidden_states), hidden_states
    return layer.input_layernorm(hidden_states, residual)


def qwen3_layer(
    shuffle: LayerShuffle, layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Qwen3MoeDecoderLayer.forward, whose `o_proj` must not sum (`keep_partial`)."""
    rows, residual = attention_input(layer, hidden_states, residual)
    partial = layer.self_attn(positions=positions, hidden_states=rows)
    return shuffle.feed_forward(layer, partial, residual)


def deepseek_layer(
    shuffle: LayerShuffle, layer: Any, positions: Tensor, hidden_states: Tensor, residual: Tensor | None,
    llama_4_scaling: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """DeepseekV2DecoderLayer.forward; its attention does not sum where tokens are split."""
    rows, residual = attention_input(layer, hidden_states, residual)
    scaling = () if layer.use_mha else (llama_4_scaling,)
    partial = layer.self_attn(positions, rows, *scaling)
    return shuffle.feed_forward(layer, partial, residual)
