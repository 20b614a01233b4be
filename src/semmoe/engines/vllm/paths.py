"""Measure vLLM's passes on every path, before it serves: see `semmoe.engines.paths`."""

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.distributed import get_tp_group
from vllm.model_executor.layers.attention import Attention, MLAAttention

from semmoe.engines.paths import PathChoice, check_path, dummy_step, measured_choice, only, text_ids
from semmoe.engines.vllm.routing import RealRows
from semmoe.engines.vllm.shuffle import LayerShuffle


def choice_for(runner: Any, shuffle: LayerShuffle, real: RealRows, asked: str, can_whole: bool) -> PathChoice:
    """The choice of a pass's path that SEMMOE_PATH asks for; every rank of the attention group must call it."""
    path = check_path(asked, can_whole)
    if path != "auto":
        return only(path)
    run = functools.partial(run_dummy, runner, shuffle, real)
    return measured_choice(run, runner.max_num_tokens, get_tp_group().cpu_group, runner.device)


def run_dummy(runner: Any, shuffle: LayerShuffle, real: RealRows, path: str, num_tokens: int) -> None:
    """A pass over so many tokens of text, on one path, that leaves the engine's cache alone."""
    config = runner.model_config
    ids = text_ids(str(config.tokenizer), config.get_vocab_size())[:num_tokens]
    step = dummy_step(ids, min(num_tokens, runner.max_num_reqs))
    runner.input_ids.gpu[:num_tokens].copy_(torch.from_numpy(step.token_ids))
    shuffle.choice = only(path)
    shuffle.begin_step(lambda: step)
    real.begin(num_tokens, num_tokens)
    try:
        with _no_memory(runner):
            runner._dummy_run(num_tokens, skip_eplb=True)
    finally:
        real.end()
        shuffle.end()


@contextmanager
def _no_memory(runner: Any) -> Iterator[None]:
    """Attention without the memory that a dummy pass has not: every token attends to itself alone, its own value.

    What attention returns leads tokens to experts. With zeros in its place they went as at random, twice as many left
    their rank as do in served text, and shuffled passes seemed to cost as much as an all-reduce.
    """
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    attention = [layer for layer in layers if isinstance(layer, Attention | MLAAttention)]
    hooks = [layer.register_forward_hook(_own_values) for layer in attention]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _own_values(layer: Attention | MLAAttention, given: tuple[Any, ...], rows: torch.Tensor) -> torch.Tensor:
    """(N, heads * width) every token's own value, or zeros where a model names the arguments of attention."""
    if len(given) < 3:
        return torch.zeros_like(rows)
    if isinstance(layer, MLAAttention):  # given the query, the latent of keys and values, and the rotated key
        own = layer.kv_b_proj(given[1])[0].view(len(rows), layer.num_heads, -1)[..., -layer.v_head_dim :]
    else:
        own = given[2].reshape(len(rows), layer.num_kv_heads, -1)
    return own.repeat_interleave(layer.num_heads // own.shape[1], dim=1).reshape(rows.shape)
