"""Read SGLang's ForwardBatch into a `Step`."""

from typing import Any

import numpy as np

from semmoe.engines.step import Step

RESERVED_SLOT = 0  # SGLang gives this slot to no request


def read_step(batch: Any) -> Step:
    """The step of SGLang's ForwardBatch, before padding."""
    size = 0 if batch.forward_mode.is_idle() else batch.batch_size
    tokens = 0 if size == 0 or batch.input_ids is None else len(batch.input_ids)
    lengths, decodes = _requests(batch, size)
    if lengths is None or lengths.sum() != tokens:
        return _guesses(batch, tokens)
    rows = np.repeat(np.arange(size), lengths)
    return Step(
        token_ids=_host(batch.input_ids, tokens),
        positions=_host(batch.positions, tokens),
        rows=rows,
        slots=_host(batch.req_pool_indices, size),
        requests=list(batch.rids or [])[:size],
        decoding=decodes[rows],
    )


def _requests(batch: Any, size: int) -> tuple[np.ndarray | None, np.ndarray]:
    """(R,): tokens that each request feeds, None if the pass does not state it; (R,) bool: whether it decodes."""
    mode = batch.forward_mode
    if mode.is_decode_or_idle():
        return np.ones(size, np.int64), np.ones(size, bool)
    if not mode.is_extend_or_draft_extend_or_mixed() or batch.extend_seq_lens_cpu is None:
        return None, np.zeros(size, bool)
    lengths = np.asarray(batch.extend_seq_lens_cpu[:size], np.int64)
    # A mixed batch does not state which requests decode: those feed one token that follows earlier ones.
    return lengths, (lengths == 1) & (np.asarray(batch.extend_prefix_lens_cpu[:size]) > 0)


def _guesses(batch: Any, tokens: int) -> Step:
    """The step of a pass whose accepted tokens are not yet known, for example one that verifies a draft."""
    return Step(
        token_ids=_host(batch.input_ids, tokens),
        positions=_host(batch.positions, tokens),
        rows=np.zeros(tokens, np.int64),
        slots=np.array([RESERVED_SLOT] * min(tokens, 1), np.int64),
        requests=[],
        decoding=np.zeros(tokens, bool),
        guesses=True,
    )


def _host(tensor: Any, length: int) -> np.ndarray:
    return np.zeros(0, np.int64) if tensor is None or length == 0 else tensor[:length].cpu().numpy().astype(np.int64)
