"""The shuffled pair SRS / SAG (paper, section 3.4) on equal slices: nothing waits for the device, as graphs need.

Each rank gets one slice of N / S rows, of which the first are tokens and the rest is padding; the number of tokens is a
tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from semmoe.runtime import kernels
from semmoe.runtime.collectives import Communicator


@dataclass(frozen=True)
class ShuffleHandle:
    """The permutation of a group's N = S * n rows to S slices of n rows. All fields but `rank` are equal on all ranks.

    Worked example, two ranks and six rows, of which the last two are padding, assigned to ranks [1, 0, 1, 1, 0, 0]:
    rank 0 gets token 1 and both rows of padding, rank 1 tokens 0, 2, 3: order = [1, -1, -1, 0, 2, 3],
    inverse = [3, 0, 4, 5, 1, 2], counts = [1, 3].
    """

    order: Tensor  # (S * n,) int64: the token in each place, -1 for padding
    inverse: Tensor  # (N,) int64: the place of each row, padding included
    counts: Tensor  # (S,) int32: number of tokens in each slice, which are its first rows
    slice_rows: int  # n
    rank: int

    @property
    def mine(self) -> Tensor:
        """(n,) the tokens in this rank's slice, -1 for padding."""
        return self.order[self.rank * self.slice_rows : (self.rank + 1) * self.slice_rows]


def shuffle_handle(ranks: Tensor, real: Tensor, size: int, rank: int) -> ShuffleHandle:
    """Make the handle from the rank (N,) of each row, equally many rows per rank, and which rows are real (N,) bool.

    Padding must be the last rows, so that a stable sort by rank puts it last in every slice.
    """
    rows = slice_rows(len(ranks), size)
    order, inverse, counts = kernels.of(ranks.device).order_of_real(ranks, real, size)
    return ShuffleHandle(order, inverse, counts, rows, rank)


def slice_rows(rows: int, size: int) -> int:
    """Rows per slice. Raises ValueError unless the batch is padded to equal slices, as reduce-scatter needs."""
    if rows % size != 0:
        raise ValueError(f"{rows} rows are no equal slices for {size} ranks: pad the batch")
    return rows // size


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H), zeros where the index is -1."""
    return kernels.of(rows.device).gather_rows(rows, index)


def shuffled_reduce_scatter(
    comm: Communicator, partial: Tensor, residual: Tensor, handle: ShuffleHandle
) -> tuple[Tensor, Tensor]:
    """SRS: sum `partial` over ranks -> (n, H), this rank's tokens and zeros for padding; and its rows of `residual`.

    Both (at least as many rows as tokens, H). Sums are in rank order, except over NCCL.
    """
    number = handle.slice_rows
    rows, mine = kernels.of(partial.device).gather_both(partial, residual, handle.order, handle.rank * number, number)
    return comm.reduce_scatter(rows), mine


def shuffled_all_gather(comm: Communicator, columns: Sequence[Tensor], handle: ShuffleHandle) -> list[Tensor]:
    """SAG of tensors (n, H) of the same rows -> (N, H) in the original order; padding rows keep their values."""
    return [take_rows(rows, handle.inverse) for rows in comm.all_gather(columns)]
