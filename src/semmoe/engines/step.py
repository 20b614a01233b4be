"""The tokens of one forward pass, in the form that the parts of a plug-in use."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Step:
    """One forward pass of this rank's attention group: N real tokens, no padding, in the order of their rows."""

    token_ids: np.ndarray  # (N,) int64
    positions: np.ndarray  # (N,) int64, position of each token in its request
    rows: np.ndarray  # (N,) int64: the request of each token, an index into `requests` and `slots`
    slots: np.ndarray  # (R,) int64: the engine's small number of each request, reused after it ends
    requests: list[str]  # (R,) ids
    decoding: np.ndarray  # (N,) bool: tokens that the model generated
    guesses: bool = False  # the tokens are drafts that may be rejected, all in one slot that no request has

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def ends(self) -> tuple[np.ndarray, np.ndarray]:
        """Two arrays (R,): the positions of every request's first and last token."""
        requests = np.arange(len(self.slots))
        first, last = np.searchsorted(self.rows, requests), np.searchsorted(self.rows, requests, side="right") - 1
        return self.positions[first], self.positions[last]


class SlotWatch:
    """Detects slots in which a new request begins: its first token does not follow the last token seen in the slot.

    drafts: number of draft tokens per request that a pass may run and that may be rejected and run again.
    """

    def __init__(self, drafts: int = 0) -> None:
        self._drafts = drafts
        self._next = np.zeros(0, np.int64)  # by slot: the position after the last one seen

    def begun(self, step: Step) -> np.ndarray:
        """(n,) the slots in which a request begins. Call it once per pass, in order."""
        if len(step.slots) == 0:
            return step.slots
        missing = int(step.slots.max()) + 1 - len(self._next)
        if missing > 0:
            self._next = np.concatenate([self._next, np.full(missing, -1)])
        first, last = step.ends
        again = self._next[step.slots] - first
        new = step.slots[(again < 0) | (again > np.minimum(self._drafts, first))]
        self._next[step.slots] = last + 1
        return new
