"""SGLang's ForwardBatch, as the plug-in's parts need it."""

from typing import Any

import numpy as np

from semmoe.engines.step import Step


def read_step(batch: Any) -> Step:
    """From SGLang's ForwardBatch before padding."""
    mode, size = batch.forward_mode, 0 if batch.forward_mode.is_idle() else batch.batch_size
    tokens = 0 if size == 0 or batch.input_ids is None else len(batch.input_ids)
    if mode.is_extend() and size:
        lengths = np.asarray(batch.extend_seq_lens_cpu[:size], np.int64)
        # A mixed batch says nowhere which requests decode: they feed one token after others.
        decodes = (lengths == 1) & (np.asarray(batch.extend_prefix_lens_cpu[:size]) > 0)
    else:
        lengths, decodes = np.ones(size, np.int64), np.ones(size, bool)
    rows = np.repeat(np.arange(size), lengths)[:tokens]
    return Step(
        token_ids=_host(batch.input_ids, tokens), positions=_host(batch.positions, tokens), rows=rows,
        slots=_host(batch.req_pool_indices, size), requests=list(batch.rids or [])[:size], decoding=decodes[rows],
    )  # fmt: skip


def _host(tensor: Any, length: int) -> np.ndarray:
    return np.zeros(0, np.int64) if tensor is None or length == 0 else tensor[:length].cpu().numpy().astype(np.int64)
