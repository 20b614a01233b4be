"""Hooks on loading weights into SGLang's models, at the start and when they are loaded again."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
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


class Again:
    """A model's weights, read from their files each time that they are iterated over."""

    def __init__(self, read: Callable[[], Iterable[Any]]) -> None:
        self._read = read

    def __iter__(self) -> Iterator[Any]:
        return iter(self._read())


def again(original: Any, *args: Any, **kwargs: Any) -> Again:
    """Wraps SGLang's generator of a model's weights."""
    return Again(lambda: original(*args, **kwargs))


@contextmanager
def without_plan() -> Iterator[None]:
    """Load weights as SGLang does without a plan: every logical expert to the slot of its number."""
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata
    from sglang.srt.runtime_context import get_parallel, get_resources, process_model_config

    resources, rank = get_resources(), get_parallel().moe_ep_rank
    planned = resources.expert_location_metadata
    resources.expert_location_metadata = ExpertLocationMetadata.init_trivial(process_model_config(), rank)
    yield
    resources.expert_location_metadata = planned
