"""The counting sort of rank ids against torch's stable sort: numba, and Triton in its interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_runs import NO_TRITON, TARGETS, compiles, interpret

from semmoe.runtime import reference
from semmoe.runtime.argsort import argsort_ranks

TYPES = (np.int8, np.uint8, np.int16, np.int32, np.int64)
CASES = ((0, 4), (1, 1), (5, 2), (16, 3), (63, 64), (200, 256), (1000, 8), (1025, 17), (3000, 256), (5000, 1))


def random_ranks(rows: int, size: int, kind: type = np.int64) -> np.ndarray:
    """Every other case leaves most ranks without a row."""
    rng = np.random.default_rng(rows * 7 + size)
    return rng.integers(0, size if rows % 2 else max(size // 3, 1), rows).astype(kind)


def check(sort, ranks: np.ndarray, size: int) -> None:
    """Without slices, with slices that just fit, and with slices that have room."""
    fullest = int(np.bincount(ranks.astype(np.int64), minlength=size).max())
    for slice_rows in (None, fullest, fullest + 3):
        expected = reference.argsort_ranks(torch.from_numpy(ranks), size, slice_rows)
        for ours, theirs in zip(sort(torch.from_numpy(ranks), size, slice_rows), expected, strict=True):
            assert torch.equal(ours, theirs)


def check_real(sort, ranks: np.ndarray, size: int) -> None:
    """With the last rows, and with any, not real."""
    for real in (np.arange(len(ranks)) < len(ranks) * 2 // 3, np.random.default_rng(size).random(len(ranks)) < 0.5):
        given = torch.from_numpy(ranks), torch.from_numpy(real), size
        for ours, theirs in zip(sort(*given), reference.order_of_real(*given), strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours, theirs)


def test_worked_example():
    ranks = torch.tensor([1, 0, 1, 1, 0])
    for sort in (reference.argsort_ranks, argsort_ranks):
        assert [t.tolist() for t in sort(ranks, 2)] == [[1, 4, 0, 2, 3], [2, 0, 3, 4, 1], [2, 3]]
        with_slices = [[1, 4, -1, -1, 0, 2, 3, -1], [4, 0, 5, 6, 1], [2, 3]]
        assert [t.tolist() for t in sort(ranks, 2, 4)] == with_slices


@pytest.mark.parametrize(("rows", "size"), CASES)
@pytest.mark.parametrize("kind", TYPES)
def test_numba_is_the_stable_sort(rows, size, kind):
    check(argsort_ranks, random_ranks(rows, min(size, np.iinfo(kind).max), kind), size)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.just(n), st.lists(st.integers(0, n - 1), max_size=70))))
def test_any_ids(case):
    size, ids = case
    ranks = np.array(ids, np.int64)
    check(argsort_ranks, ranks, size)
    order, inverse, counts = argsort_ranks(ranks, size)
    assert isinstance(order, np.ndarray)
    assert (order[inverse] == np.arange(len(ids))).all()
    assert (np.diff(ranks[order]) >= 0).all()
    assert counts.sum() == len(ids)


@pytest.mark.parametrize("wrong", [-1, 4, 1 << 40])
def test_an_id_that_is_no_rank_is_named(wrong):
    with pytest.raises(ValueError, match=f"rank {wrong} of row 2 is not one of 4 ranks"):
        argsort_ranks(torch.tensor([0, 3, wrong]), 4)


def test_a_slice_too_full_is_our_own_mistake():
    with pytest.raises(AssertionError, match="a slice of 3 rows exceeds its size of 2"):
        argsort_ranks(np.array([0, 0, 1, 0]), 2, 2)


@pytest.mark.slow
@pytest.mark.costly
def test_triton_interpreted():
    interpret(__file__)


def interpreted() -> None:
    import semmoe.runtime.kernels.argsort as kernels

    check(kernels.argsort_ranks, random_ranks(1025, 20), 20)
    kernels.BLOCK, kernels.SCAN_BLOCK = 32, 4  # many blocks, and several tiles of the scan; large ones take long here
    for i, (rows, size) in enumerate(CASES[:-1]):
        check(kernels.argsort_ranks, random_ranks(min(rows, 200), min(size, 127), TYPES[i % 5]), size)
        check_real(kernels.order_of_real, random_ranks(min(rows, 200), min(size, 127)), size)
    order = kernels.argsort_ranks(torch.tensor([0, 1, 1, 1]), 2, 2).order
    assert order.tolist() == [0, -1, 1, 2]  # a slice too full loses rows, not its neighbour's


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("alone", [False, True])
def test_triton_compiles(target, alone):
    pytest.importorskip("triton", reason=NO_TRITON)
    import semmoe.runtime.kernels.argsort as kernels

    table, sizes = {"BLOCK": 1024, "BINS": 256}, ("rows", "size", "blocks")
    outs = {"totals": "*i64", "counted": "*i32", "order": "*i64", "inverse": "*i64", "real": "*i1"}
    flags = {"ALONE": alone, "SLICES": alone, "REAL": not alone}
    pointers = {"ranks": "*i16", "before": "*i32"}
    compiles(target, kernels.scatter_kernel, {**pointers, **outs}, (*sizes, "slice_rows"), {**flags, **table})
    compiles(target, kernels.histogram_kernel, pointers, sizes, table)
    compiles(target, kernels.scan_kernel, {"before": "*i32", "counts": "*i64"}, ("blocks",), {"BLOCK": 1024})


if __name__ == "__main__":
    interpreted()
