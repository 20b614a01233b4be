"""Load a model and find its MoE layers."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.utils import logging

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
