"""Load a model and find its MoE layers."""

import inspect

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
)
from transformers.utils import logging

from semmoe.engines.transformers.config import load_config
from semmoe.engines.transformers.tokenizer import LOCAL_AND_INERT, one_line


def load_model(path: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Load a causal LM with MoE layers from a local directory, for inference; no code of the directory is run.

    A model with images is loaded whole, and given text. Raises ValueError for a model that transformers does not know
    as either, for weights that the directory lacks, and for a model without MoE layers.
    """
    config = load_config(path)
    if type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:  # first, since its text-only form may lack weights
        loader = AutoModelForImageTextToText
    elif type(config) in MODEL_FOR_CAUSAL_LM_MAPPING:
        loader = AutoModelForCausalLM
    else:
        raise ValueError(f"{path}: transformers generates no text with models of type {config.model_type!r}")
    logging.disable_progress_bar()
    try:
        loaded = loader.from_pretrained(path, config=config, dtype=dtype, output_loading_info=True, **LOCAL_AND_INERT)
        model, absent = loaded[0].eval(), sorted(loaded[1]["missing_keys"])
        found = moe_layers(model)
    except Exception as error:  # weights from elsewhere can make transformers raise almost anything
        raise ValueError(f"{path}: transformers cannot load the model: {one_line(error)}") from None
    if absent:  # transformers would fill it with random numbers
        raise ValueError(f"{path}: {len(absent)} tensors are missing, such as {absent[0]}")
    if not found:
        raise ValueError(f"{path} ({model.config.model_type}) has no MoE layer that semmoe knows")
    return model.requires_grad_(False)


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """The configuration of the language part."""
    return model.config.get_text_config(decoder=True)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of layers that has experts; the first stack if none has. `get_decoder` does not find every one."""
    stacks = [m.layers for m in model.modules() if isinstance(getattr(m, "layers", None), nn.ModuleList)]
    return next((stack for stack in stacks if any(map(moe_block, stack))), stacks[0])


def moe_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The MoE blocks in layer order."""
    return [block for block in map(moe_block, decoder_layers(model)) if block is not None]


def moe_block(layer: nn.Module) -> nn.Module | None:
    """A decoder layer's MoE block, whose `experts` are called with (hidden, expert ids, weights); None: it has none."""
    for block in layer.children():
        experts = getattr(block, "experts", None)
        if isinstance(experts, nn.Module) and len(inspect.signature(experts.forward).parameters) >= 3:
            return block
    return None
