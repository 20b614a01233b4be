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
        with _no_attention(runner):
            runner._dummy_run(num_tokens, skip_eplb=True)
    finally:
        real.end()
        shuffle.end()


@contextmanager
def _no_attention(runner: Any) -> Iterator[None]:
    """Zeros in place of the memory, never written, that attention returns in a dummy pass: experts are chosen by it."""
    layers = runner.vllm_config.compilation_config.static_forward_context.values()
    hooks = [
        layer.register_forward_hook(lambda module, given, rows: torch.zeros_like(rows))
        for layer in layers
        if isinstance(layer, Attention | MLAAttention)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
