"""Tensors that kernels read: a plan's score tables, the order of rows by rank, and a prompt's tokens by request."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from semmoe.tokens.slices import PathScores


class RankOrder(NamedTuple):
    """Rows sorted by rank, stable.

    Worked example, ranks [1, 0, 1, 1, 0, 0] of two, the last two rows padding: order = [1, -1, -1, 0, 2, 3],
    inverse = [3, 0, 4, 5, 1, 2], counts = [1, 3].
    """

    order: Tensor  # (N,) int64: the row in each place, -1 for padding
    inverse: Tensor  # (N,) int64: the place of each row, padding included
    counts: Tensor  # (S,) int32: real rows of each rank


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

        def tensor(array: np.ndarray) -> Tensor:
            return torch.tensor(array, device=device)

        return cls(
            token_rows=tensor(tables.token_rows),
            token_scores=tensor(tables.token_scores),
            token_shift=tensor(tables.token_shift.astype(np.int32)),
            path_scores=tensor(tables.path_scores),
            history_scores=tensor(tables.history_scores),
            lookback=tables.lookback,
            ordered=tables.ordered,
        )

    @property
    def num_experts(self) -> int:
        return (self.history_scores.shape[1] - 1) // 2
