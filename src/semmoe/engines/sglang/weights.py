"""Weights on their way into SGLang's models, at the start and when they are loaded again."""

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch

PLACING = (None, "flattened_bucket")  # formats of weights that go through the model's `load_weights`
EMBEDDINGS, HEAD = "model.embed_tokens.weight", "lm_head.weight"
log = logging.getLogger(__name__)


def load_tied(original: Any, model: Any, weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **kwargs: Any) -> Any:
    """Around Qwen3-MoE's `load_weights`: embeddings are given once more, as the output layer that they are if tied.

    A gap of SGLang 0.5.23 on every device: nothing else fills that layer.
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
    """Around `update_weights_from_tensor` where a plan places experts: loaders of the caller's know nothing of it."""
    if load_format in PLACING:
        return original(updater, named_tensors, load_format)
    return False, (
        f"load_format {load_format!r} writes experts where a plan has others: give weights by the names of "
        "the checkpoint, without load_format"
    )
