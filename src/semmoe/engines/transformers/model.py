"""Load a model and find its MoE layers."""

import torch
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

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
