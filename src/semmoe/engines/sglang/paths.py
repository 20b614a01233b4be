"""Measure SGLang's passes on every path, at its first pass: see `semmoe.engines.paths`."""

import functools
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_schedule

from semmoe.engines.paths import SIZES, PathChoice, dummy_step, measured_choice, only
from semmoe.engines.sglang.shuffle import BoundaryShuffle


def measured(runner: Any, shuffle: BoundaryShuffle) -> PathChoice:
    """Every rank of the attention group must call it, once SGLang has its cache."""
    largest = get_schedule().chunked_prefill_size or 0
    most = largest if largest > 0 else SIZES[-1]
    group = get_parallel().attn_tp_group.cpu_group
    return measured_choice(functools.partial(run_dummy, runner, shuffle), most, group, torch.device(runner.device))


def run_dummy(runner: Any, shuffle: BoundaryShuffle, path: str, num_tokens: int) -> None:
    """A prompt of so many random tokens, on one path, whose keys and values go to the slot of padding."""
    step, own = dummy_step(num_tokens, 1, runner.model_config.vocab_size), runner.eager_runner
    buffers = own._alloc_dummy_decode_buffers(1, num_tokens_per_req=num_tokens, allocate_logits_buffer=False)
    buffers.input_ids.copy_(torch.from_numpy(step.token_ids))
    shuffle.choice = only(path)
    shuffle.begin_step(lambda: step)
    try:
        own._dummy_run(
            1, forward_mode_override=ForwardMode.EXTEND, buffers=buffers, extend_num_tokens_per_req=num_tokens
        )
    finally:
        shuffle.end()
