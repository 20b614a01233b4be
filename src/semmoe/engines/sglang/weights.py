"""Hooks on loading weights into SGLang's models, at the start and when they are loaded again."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

PLACING = (None, "flattened_bucket")  # formats of weights that go through the model's `load_weights`
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
log = logging.getLogger(__name__)


def load_tied(original: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Wraps Qwen3-MoE's `load_weights`: tied embeddings are passed a second time, as the output layer.

    SGLang 0.5.23 does not fill that layer on any device.
    """
    tied = bool(getattr(model.config, "tie_word_embeddings", False))
    return original(model, _with_head(weights) if tied else weights, *args, **kwargs)


def _with_head(weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights:
        yield name, tensor
        if name == EMBEDDINGS:
            log.debug("semmoe: filling the tied output layer, which SGLang leaves empty")
            yield HEAD, tensor


def placed_only(original: Any, updater: Any, named_tensors: Any, load_format: str | None = None) -> tuple[bool, str]:
    """Wraps `update_weights_from_tensor`: with a plan, refuse formats whose loaders do not place experts by it."""
    if load_format in PLACING:
        return original(updater, named_tensors, load_format)
    return False, (
        f"load_format {load_format!r} writes experts where a plan has others: give weights by the names of "
        "the checkpoint, without load_format"
    )
