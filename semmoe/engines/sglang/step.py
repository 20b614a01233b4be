"""The tokens of one forward pass, as the plug-in's parts need them."""

from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Step:
    """One forward pass of this rank's attention group: N real tokens, no padding, in the order of their rows."""

    token_ids: np.ndarray  # (N,) int64
    positions: np.ndarray  # (N,) int64, in their requests
    rows: np.ndarray  # (N,) int64: the request of each token, an index into `requests` and `slots`
    slots: np.ndarray  # (R,) int64: the engine's small number of each request, free again when it ends
    requests: list[str]  # (R,) ids
    decoding: np.ndarray  # (N,) bool: tokens that the model itself chose

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """(R,) each: the positions of every request's first and last token."""
        requests = np.arange(len(self.slots))
        first, last = np.searchsorted(self.rows, requests), np.searchsorted(self.rows, requests, side="right") - 1
        return self.positions[first], self.positions[last]


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


class SlotWatch:
    """Which slots begin a request: those whose first token does not follow the last one seen there."""

    def __init__(self) -> None:
        self._next = np.zeros(0, np.int64)  # by slot: the position after the last one seen

    def begun(self, step: Step) -> np.ndarray:
        """(n,) slots, for each pass once and in order."""
        if len(step.slots) == 0:
            return step.slots
        missing = int(step.slots.max()) + 1 - len(self._next)
        if missing > 0:
            self._next = np.concatenate([self._next, np.full(missing, -1)])
        first, last = step.ends
        new = step.slots[self._next[step.slots] != first]
        self._next[step.slots] = last + 1
        return new
