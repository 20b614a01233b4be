"""Load a model and find its MoE layers."""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

from semmoe.engines.lookahead import Ask, Lookahead, asking_for, gate_of, lookahead_over
from semmoe.engines.transformers.config import load_config
from semmoe.engines.transformers.tokenizer import LOCAL_AND_INERT, one_line


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal LM with MoE layers from a local directory, for inference; no code of the directory is run.

    Raises ValueError for a model that transformers does not know as one, and for one without MoE layers.
    """
    config = load_config(path)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{path}: transformers has no text-only form of models of type {config.model_type!r}")
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **LOCAL_AND_INERT).eval()
        found = moe_layers(model)
    except Exception as error:  # weights from elsewhere can make transformers raise almost anything
        raise ValueError(f"{path}: transformers cannot load the model: {one_line(error)}") from None
    if not found:
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
