"""The tokens of a forward pass, in the form that the parts of a plug-in use."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from semmoe.runtime.shuffler import PADDING_SLOT


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


class Pass:
    """A forward pass over real tokens. A part reads its step only if it needs it, since that waits for the device.

    decodes: each request feeds one token, as in the passes that graphs replay.
    """

    def __init__(self, read: Callable[[], Step], decodes: bool) -> None:
        self._read = read
        self.decodes = decodes

    @cached_property
    def step(self) -> Step:
        return self._read()


class SlotWatch:
    """Detects slots in which a new request begins: its first token does not follow the last token seen in the slot.

    It works on the device, for a fixed number of slots. drafts: number of draft tokens per request that a pass may run
    and that may be rejected and run again.
    """

    def __init__(self, num_slots: int, device: torch.device, drafts: int = 0) -> None:
        self._drafts = drafts
        self._next = torch.full((num_slots,), -1, dtype=torch.int64, device=device)  # the position after the last seen

    def begun(self, slots: Tensor, first: Tensor, last: Tensor) -> Tensor:
        """(R,): those of `slots` (R,) that begin a request, PADDING_SLOT in place of the others.

        first, last (R,): positions of each one's tokens in this pass. Call it once per pass, in order.
        """
        again = self._next[slots] - first  # tokens that run again
        follows = (again >= 0) & (again <= first.clamp(max=self._drafts))
        self._next[slots] = last + 1
        return torch.where(follows, PADDING_SLOT, slots)
