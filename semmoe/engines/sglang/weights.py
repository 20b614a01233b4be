"""A gap of SGLang 0.5.23 on every device: Qwen3-MoE with tied embeddings has an output layer that nothing fills."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
log = logging.getLogger(__name__)


def load_tied(original: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Around the model's `load_weights`: the embeddings are given once more, as the output layer that they are."""
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return original(model, _with_head(weights) if tied else weights, *args, **kwargs)


def _with_head(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor
        if name == EMBEDDINGS:
            log.debug("semmoe: filling the tied output layer, which SGLang leaves empty")
            yield HEAD, tensor
