"""Stable argsort of rank ids: one counting sort gives the permutation, its inverse and the counts.

A comparison sort would not use that there are only a few ranks. On the CPU this takes two passes over the ids (numba),
on a GPU a histogram, a scan and a scatter (`kernels/argsort.py`), which never wait for the device.
"""

from typing import Any

import numpy as np
import torch

from semmoe.jit import njit
from semmoe.runtime import reference
from semmoe.runtime.reference import RankOrder


def argsort_ranks(ranks: Any, size: int, slice_rows: int | None = None) -> RankOrder:
    """Same as `reference.argsort_ranks`, for an array or a tensor (N,) of any integer type; returns the same kind.

    Raises ValueError for an id outside 0 to size - 1 (ids on a GPU are not checked, which would wait for the device).
    """
    if isinstance(ranks, np.ndarray):
        return _on_arrays(ranks, size, slice_rows)
    if ranks.is_cpu:
        return RankOrder(*map(torch.from_numpy, _on_arrays(ranks.numpy(), size, slice_rows)))
    kernels = _kernels()
    return (
        kernels.argsort_ranks(ranks, size, slice_rows) if kernels else reference.argsort_ranks(ranks, size, slice_rows)
    )


def _kernels() -> Any:
    try:
        import semmoe.runtime.kernels.argsort as kernels
    except ImportError:  # builds of torch for other devices come without Triton
        return None
    return kernels


def _on_arrays(ranks: np.ndarray, size: int, slice_rows: int | None) -> RankOrder:
    places = len(ranks) if slice_rows is None else size * slice_rows
    # one allocation: glibc returns two of 8 MB to the system, whose pages must then be mapped again
    both = np.empty(places + len(ranks), np.int64)
    order, inverse = both[:places], both[places:]
    counts = np.zeros(size, np.int64)
    fullest = _sort(ranks, order, inverse, counts, -1 if slice_rows is None else slice_rows)
    if fullest < 0:
        raise ValueError(f"rank {ranks[-1 - fullest]} of row {-1 - fullest} is not one of {size} ranks")
    assert slice_rows is None or fullest <= slice_rows, f"a slice of {fullest} rows exceeds its size of {slice_rows}"
    return RankOrder(order, inverse, counts)


@njit(nogil=True)
def _sort(ranks, order, inverse, counts, slice_rows):
    """Fill order, inverse and counts (zero before). Returns the largest count, or -1 - i if ranks[i] is not a rank."""
    size, bound = counts.shape[0], np.uint64(counts.shape[0])
    for i in range(ranks.shape[0]):
        r = np.uint64(ranks[i])  # a negative id becomes a large one, and numba adds no test for negative indices
        if r >= bound:
            return -1 - i
        counts[r] += 1
    place, first, fullest = np.empty(size, np.int64), 0, 0
    for r in range(size):
        place[r] = first
        first += counts[r] if slice_rows < 0 else slice_rows
        fullest = max(fullest, counts[r])
    if 0 <= slice_rows < fullest:
        return fullest
    for i in range(ranks.shape[0]):
        r = np.uint64(ranks[i])
        to = np.uint64(place[r])
        place[r] += 1
        order[to] = i
        inverse[i] = to
    if slice_rows >= 0:
        for r in range(size):
            order[place[r] : (r + 1) * slice_rows] = -1
    return fullest
