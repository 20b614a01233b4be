"""The counting sort of rank ids against torch's stable sort: numba, and Triton in its interpreter."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.runtime.kernels.on_cpu import order_of_real

TYPES = (np.int8, np.uint8, np.int16, np.int32, np.int64)
CASES = ((0, 4), (1, 1), (5, 2), (16, 3), (63, 64), (200, 256), (1000, 8), (1025, 17), (3000, 256), (5000, 1))


def random_ranks(rows: int, size: int, kind: type = np.int64) -> np.ndarray:
    """Every other case leaves most ranks without a row."""
    rng = np.random.default_rng(rows * 7 + size)
    return rng.integers(0, size if rows % 2 else max(size // 3, 1), rows).astype(kind)


def check(sort, ranks: np.ndarray, size: int) -> None:
    """With all rows, the last rows, and any rows real."""
    rows = np.arange(len(ranks))
    for real in (rows >= 0, rows < len(ranks) * 2 // 3, np.random.default_rng(size).random(len(ranks)) < 0.5):
        given = torch.from_numpy(ranks), torch.from_numpy(real), size
        for ours, theirs in zip(sort(*given), reference.order_of_real(*given), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_worked_example():
    ranks, real = torch.tensor([1, 0, 1, 1, 0, 0]), torch.arange(6) < 4
    for sort in (reference.order_of_real, order_of_real):
        assert [t.tolist() for t in sort(ranks, real, 2)] == [[1, -1, -1, 0, 2, 3], [3, 0, 4, 5, 1, 2], [1, 3]]


@pytest.mark.parametrize(("rows", "size"), CASES)
@pytest.mark.parametrize("kind", TYPES)
def test_numba_is_the_stable_sort(rows, size, kind):
    check(order_of_real, random_ranks(rows, min(size, np.iinfo(kind).max), kind), size)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=70))))
def test_any_ids(case):
    size, ids = case
    ranks = np.array(ids, np.int64)
    check(order_of_real, ranks, size)
    found = order_of_real(torch.from_numpy(ranks), torch.ones(len(ids), dtype=torch.bool), size)
    order, inverse, counts = (part.numpy() for part in found)
    assert (order[inverse] == np.arange(len(ids))).all()
    assert (np.diff(ranks[order]) >= 0).all()
    assert counts.sum() == len(ids)


@pytest.mark.slow
@pytest.mark.costly
def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    import semmoe.runtime.kernels.argsort as kernels

    check(kernels.order_of_real, random_ranks(1025, 20), 20)
    kernels.BLOCK = 32  # many blocks; large ones take long here
    for i, (rows, size) in enumerate(CASES[:-1]):
        check(kernels.order_of_real, random_ranks(min(rows, 200), min(size, 127), TYPES[i % 5]), size)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_triton_compiles(target):
    pytest.importorskip("triton", reason=NO_TRITON)
    import semmoe.runtime.kernels.argsort as kernels

    pointers = {"ranks": "*i16", "real": "*i1", "counts": "*i32", "order": "*i64", "inverse": "*i64"}
    compiles(target, kernels.order_kernel, pointers, ("rows", "size"), {"BLOCK": 1024, "BINS": 256})


if __name__ == "__main__":
    interpreted()
