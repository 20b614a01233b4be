"""Tensors that kernels read: a plan's score tables, and a prompt's tokens by request."""

from dataclasses import dataclass

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

    @property
    def num_experts(self) -> int:
        return (self.history_scores.shape[1] - 1) // 2
