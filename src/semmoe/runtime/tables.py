"""Tensors that kernels read: a plan's score tables, the histories of requests, and the rows of a pass."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semmoe.tokens.slices import PathScores


@dataclass(frozen=True)
class Turns:
    """The tokens of a pass in which slots have several, by slot and in their order; without padding."""

    slots: Tensor  # (R,) int64, distinct
    first: Tensor  # (R + 1,) int64: where each slot's tokens begin in `rows`
    rows: Tensor  # (M,) int64

    @classmethod
    def of(cls, slots: np.ndarray, device: torch.device) -> "Turns":
        """slots (N,): that of each row, 0 for padding."""
        order = np.argsort(slots, kind="stable")[np.count_nonzero(slots == 0) :]
        touched, first = np.unique(slots[order], return_index=True)
        return cls(*(torch.tensor(part, device=device) for part in (touched, np.append(first, len(order)), order)))


@dataclass(frozen=True)
class Rows:
    """The rows of a forward pass, in the order in which the group shares them, padding last."""

    token_ids: Tensor  # (N,)
    slots: Tensor  # (N,): the slot of each row's request
    real: Tensor  # (N,) bool: rows that are not padding
    decoding: Tensor  # (N,) bool: tokens that the model generated
    turns: Turns | None  # if a slot may have several tokens; else it has one at most


class States(NamedTuple):
    """The histories of requests by layer and slot, at addresses that do not change; they predict a next token.

    running: the mean of the projected rows of the chosen experts, weighted towards recent tokens, in units of
    1 / 2**FRACTION table units. previous: the rows of the previous token. seen: the number of tokens.
    """

    running: Tensor  # (L, slots, G) int32
    previous: Tensor  # (L, slots, G) int32
    seen: Tensor  # (L, slots) int64


@dataclass(frozen=True, kw_only=True)
class ScoreTables:
    """`PathScores` as tensors of the same shapes."""

    policy: PathScores
    token_rows: Tensor
    token_scores: Tensor
    token_shift: Tensor  # (L,) int32
    path_scores: Tensor
    history_scores: Tensor
    lookback: int
    ordered: int

    @classmethod
    def of(cls, tables: PathScores, device: str | torch.device = "cpu") -> "ScoreTables":
        """Copy the tables to `device`."""
        names = "token_rows", "token_scores", "path_scores", "history_scores"
        arrays = {name: getattr(tables, name) for name in names}
        arrays["token_shift"] = tables.token_shift.astype(np.int32)
        copied = {name: torch.tensor(array, device=device) for name, array in arrays.items()}
        return cls(policy=tables, **copied, lookback=tables.lookback, ordered=tables.ordered)

    def states(self, num_slots: int) -> States:
        """Return histories in which no token was seen, in any of the slots."""
        layers, _, ranks = self.history_scores.shape
        shape, device = (layers, num_slots, ranks), self.history_scores.device
        running, previous = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        states = States(running, previous, torch.zeros(shape[:2], dtype=torch.int64, device=device))
        self.reset(states, torch.arange(num_slots, device=device))
        return states

    def reset(self, states: States, slots: Tensor) -> None:
        """Forget the requests in `slots`: new ones begin there."""
        for state in (states.running, states.seen):
            state.index_fill_(1, slots, 0)  # a number that is assigned by index is copied from the host on a GPU
        states.previous[:, slots] = self.history_scores[:, -1:].int()

    @property
    def num_experts(self) -> int:
        return (self.history_scores.shape[1] - 1) // 2
