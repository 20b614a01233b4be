"""Load a model and find its MoE layers."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from semmoe.engines.lookahead import Ask, Lookahead, asking_for, gate_of, lookahead_over
from semmoe.engines.transformers.tokenizer import require_local


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A causal LM with MoE layers from a local directory, for inference. Raises ValueError if it has none."""
    require_local(path)
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True).eval()
    if not moe_layers(model):
        raise ValueError(f"{path} ({model.config.model_type}) has no MoE layer that semmoe knows")
    return model.requires_grad_(False)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    return model.get_decoder().layers


def moe_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The MoE blocks in layer order: modules whose `experts` are called with (hidden, expert ids, weights)."""
    blocks = [getattr(layer, "mlp", None) for layer in decoder_layers(model)]
    return [block for block in blocks if isinstance(getattr(block, "experts", None), nn.Module)]


def layers_of(model: PreTrainedModel, blocks: Sequence[nn.Module]) -> list[nn.Module]:
    """The decoder layers of MoE blocks, in layer order."""
    wanted = set(map(id, blocks))
    return [layer for layer in decoder_layers(model) if id(layer.mlp) in wanted]


def router_lookahead(model: PreTrainedModel, planes: int) -> Lookahead:
    """The norms and routers of the MoE layers but the first. Raises ValueError for a layer that has another router."""
    layers = layers_of(model, moe_layers(model))
    return lookahead_over(layers, planes, model.config.num_experts_per_tok, _ask)


def _ask(layer: nn.Module, width: int) -> Ask:
    router = gate_of(layer.mlp)
    if not hasattr(router, "top_k"):
        raise ValueError(f"the router of {type(layer).__name__} cannot be asked ahead of time: omit --lookahead")
    norm, asked = layer.post_attention_layernorm, asking_for(router, width)

    def ask(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        _, weights, ids = asked(norm(rows))
        return ids, weights

    return ask
