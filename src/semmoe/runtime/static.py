"""The shuffled pair with static shapes: nothing waits for the device, so that a forward pass fits in a CUDA graph.

`collectives.shuffle_handle` sends each rank exactly its tokens, which the host must count first. Here every rank gets
one slice of N / S rows, of which the first are real and the rest padding; the number of real rows is a tensor.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from torch import Tensor

from semmoe.runtime import reference
from semmoe.runtime.collectives import Communicator


@dataclass(frozen=True)
class StaticHandle:
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


def static_handle(ranks: Tensor, real: Tensor, size: int, rank: int) -> StaticHandle:
    """Make the handle from the rank (N,) of each row, equally many rows per rank, and which rows are real (N,) bool.

    Padding must be the last rows, so that a stable sort by rank puts it last in every slice.
    """
    rows = slice_rows(len(ranks), size)
    order, inverse, counts = (triton_kernels("argsort", ranks) or reference).order_of_real(ranks, real, size)
    return StaticHandle(order, inverse, counts, rows, rank)


def slice_rows(rows: int, size: int) -> int:
    """Rows per slice. Raises ValueError unless the batch is padded to equal slices, as reduce-scatter needs."""
    if rows % size != 0:
        raise ValueError(f"{rows} rows are no equal slices for {size} ranks: pad the batch")
    return rows // size


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows (N, H), index (M,) -> (M, H), zeros where the index is -1."""
    if (kernels := triton_kernels("shuffle", rows)) is not None:
        return kernels.gather_rows(rows, index)
    return rows[index.clamp(min=0)].masked_fill((index < 0)[:, None], 0)


def static_reduce_scatter(comm: Communicator, partial: Tensor, handle: StaticHandle) -> Tensor:
    """SRS: sum `partial` (N, H) over ranks -> (n, H), this rank's tokens and zeros for padding."""
    return comm.reduce_scatter(take_rows(partial, handle.order))


def static_all_gather(comm: Communicator, columns: Sequence[Tensor], handle: StaticHandle) -> list[Tensor]:
    """SAG of tensors (n, ...) of the same rows -> (N, ...) in the original order; padding rows keep their values."""
    return [comm.all_gather(rows)[handle.inverse] for rows in columns]


def triton_kernels(name: str, tensor: Tensor) -> Any:
    """A module of `semmoe.runtime.kernels` if `tensor` is on a GPU and Triton is installed, else None."""
    if tensor.is_cpu:
        return None
    try:
        return import_module(f"semmoe.runtime.kernels.{name}")
    except ImportError:  # builds of torch for other devices come without Triton
        return None
