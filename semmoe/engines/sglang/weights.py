"""A gap of SGLang 0.5.23 on every device: Qwen3-MoE with tied embeddings gets an output layer that nothing has filled."""

import logging

import torch
from torch import nn

from semmoe.core import require

log = logging.getLogger(__name__)


def tie_output_layer(model: nn.Module, tied: bool) -> bool:
    """Give a model whose configuration ties them the embeddings as its output layer; True if that was needed."""
    head, embedding = getattr(model, "lm_head", None), getattr(getattr(model, "model", None), "embed_tokens", None)
    if not tied or head is None or embedding is None or _shared(head.weight, embedding.weight):
        return False
    same = head.weight.shape == embedding.weight.shape
    require(same, f"{type(model).__name__} ties its output layer, which SGLang splits otherwise than its embeddings")
    head.weight = embedding.weight
    log.info("semmoe: tied %s's output layer to its embeddings, which SGLang had not", type(model).__name__)
    return True


def _shared(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.data_ptr() == b.data_ptr()
