"""Measure SGLang's passes on every path, at its first pass: see `semmoe.engines.paths`."""

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel, get_schedule

from semmoe.engines.paths import SHUFFLED, SIZES, PathChoice, dummy_step, measured_choice, only, text_ids
from semmoe.engines.sglang.shuffle import BoundaryShuffle

log = logging.getLogger(__name__)


def measured(runner: Any, shuffle: BoundaryShuffle) -> PathChoice:
    """Every rank of the attention group must call it, once SGLang has its cache."""
    chunk, room = get_schedule().chunked_prefill_size or 0, runner.token_to_kv_pool_allocator.available_size()
    most = min(chunk, SIZES[-1]) if chunk > 0 else SIZES[-1]
    if room < most:
        log.warning("semmoe: every pass is shuffled: to time the paths needs room for %d tokens in the cache", most)
        return only(SHUFFLED)
    group = get_parallel().attn_tp_group.cpu_group
    return measured_choice(functools.partial(run_dummy, runner, shuffle), most, group, torch.device(runner.device))


def run_dummy(runner: Any, shuffle: BoundaryShuffle, path: str, num_tokens: int) -> None:
    """A prompt of so many tokens of text, on one path, in slots of the cache that no request has."""
    config, own = runner.model_config, runner.eager_runner
    step = dummy_step(text_ids(str(config.model_path), config.vocab_size)[:num_tokens], 1)
    buffers = own._alloc_dummy_decode_buffers(1, num_tokens_per_req=num_tokens, allocate_logits_buffer=False)
    buffers.input_ids.copy_(torch.from_numpy(step.token_ids))
    buffers.positions.copy_(torch.from_numpy(step.positions))
    shuffle.choice = only(path)
    with _slots(runner, num_tokens) as slots:
        buffers.out_cache_loc.copy_(slots)
        shuffle.begin_step(lambda: step)
        try:
            own._dummy_run(
                1, forward_mode_override=ForwardMode.EXTEND, buffers=buffers, extend_num_tokens_per_req=num_tokens
            )
        finally:
            shuffle.end()


@contextmanager
def _slots(runner: Any, num_tokens: int) -> Iterator[torch.Tensor]:
    """Free slots of the cache, (num_tokens,), as those of the request that stands for padding.

    In the one slot of padding all tokens would attend to the last, and choose the same experts.
    """
    allocator, row = runner.token_to_kv_pool_allocator, runner.req_to_token_pool.req_to_token[0]
    taken = allocator.alloc(-(-num_tokens // allocator.page_size) * allocator.page_size)
    row[:num_tokens] = taken[:num_tokens]
    try:
        yield taken[:num_tokens]
    finally:
        row[:num_tokens] = 0
        allocator.free(taken)
