"""Handles of equal slices, and the shuffled pair against its specification: on processes, and ranks in threads."""

import numpy as np
import pytest
import reference
import torch
from ranks import on_ranks, on_threads

from semmoe.runtime.rows import sum_in_order
from semmoe.runtime.shuffle import shuffle_handle, shuffled_all_gather, shuffled_reduce_scatter, take_rows

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASES = 24


def test_a_handle_by_hand():
    handle = shuffle_handle(torch.tensor([1, 0, 1, 1, 0, 0]), torch.arange(6) < 4, 2, 1)
    assert handle.order.tolist() == [1, -1, -1, 0, 2, 3]
    assert handle.inverse.tolist() == [3, 0, 4, 5, 1, 2]
    assert handle.counts.tolist() == [1, 3]
    assert handle.mine.tolist() == [0, 2, 3]


def test_rows_that_are_no_equal_slices_are_refused():
    with pytest.raises(ValueError, match="5 rows are no equal slices for 2 ranks"):
        shuffle_handle(torch.tensor([1, 0, 1, 1, 0]), torch.ones(5, dtype=torch.bool), 2, 0)


def test_places_of_padding_are_taken_as_zeros():
    rows = torch.arange(6.0).view(3, 2)
    assert take_rows(rows, torch.tensor([2, -1, 0])).tolist() == [[4, 5], [0, 0], [0, 1]]
    assert rows[0].tolist() == [0, 1]


def pair_case(size, seed):
    """Partial sums of every rank (size, N, H), and a handle of every rank; the last rows are padding."""
    generator = torch.Generator().manual_seed(seed)
    rows, padding = 5 * size, seed % 4
    ranks = torch.arange(size).repeat_interleave(5)[torch.randperm(rows, generator=generator)]
    partials = torch.randn(size, rows, 7, generator=generator).to((torch.float32, torch.bfloat16)[seed % 2])
    return partials, ranks, torch.arange(rows) < rows - padding


def case(size: int, seed: int):
    """Partial sums of every rank (size, N, H), the rank of each row in equal slices, and real rows, all or fewer."""
    generator = torch.Generator().manual_seed(seed)
    rows, width = (int(torch.randint(0, bound, (), generator=generator)) for bound in (70 // size + 2, 40))
    ranks = torch.arange(size).repeat_interleave(rows)[torch.randperm(size * rows, generator=generator)]
    padding = (0, 1, size * rows // 2)[seed % 3]
    partials = torch.randn(size, size * rows, width + 1, generator=generator).to(DTYPES[seed % len(DTYPES)])
    return (
        partials,
        ranks.to(torch.int64 if seed % 4 else torch.int16),
        torch.arange(size * rows) < size * rows - padding,
    )


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy()


def scatter_then_gather(comm):
    out = []
    for seed in range(CASES):
        partials, ranks, real = case(comm.size, seed)
        handle = shuffle_handle(ranks, real, comm.size, comm.rank)
        partial = partials[comm.rank][: max(int(real.sum()), 1)]
        mine, own = shuffled_reduce_scatter(comm, partial, partial, handle)
        assert torch.equal(own, take_rows(partial, handle.mine))
        before = comm.sent["all_gather"]
        ids = handle.mine.clamp(min=0).to(torch.uint8)[:, None].expand(-1, 3)
        whole, routed = shuffled_all_gather(comm, [mine, ids], handle)
        sent = comm.sent["all_gather"] - before
        out.append((handle.mine.numpy(), bits(mine), bits(whole[real]), routed[real].numpy(), sent))
    return out, dict(comm.sent)


def check(results, size):
    expected_sent = 0
    for seed in range(CASES):
        partials, ranks, real = case(size, seed)
        rows = len(ranks) // size
        slices = reference.shuffled_reduce_scatter(list(partials[:, real]), ranks[real])
        total = bits(reference.shuffled_all_gather(slices, ranks[real]))
        row_bytes = partials.shape[2] * partials.element_size()
        for rank, (out, _) in enumerate(results):
            mine, sums, whole, routed, sent = out[seed]
            number = len(slices[rank])
            assert mine[:number].tolist() == np.flatnonzero((ranks == rank) & real).tolist()
            assert (mine[number:] == -1).all()
            assert len(mine) == rows
            assert np.array_equal(sums[: len(bits(slices[rank]))], bits(slices[rank])), (seed, rank)
            assert not sums[len(bits(slices[rank])) :].any()
            assert np.array_equal(whole, total)
            assert (routed == np.arange(len(routed))[:, None]).all()
            assert sent == (size - 1) * rows * (row_bytes + 3)
        expected_sent += (size - 1) * rows * row_bytes
    assert {sent.get("reduce_scatter", 0) for _, sent in results} == {expected_sent}


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_processes(size, tmp_path):
    check(on_ranks(size, scatter_then_gather, tmp_path), size)


@pytest.mark.parametrize("size", [16, 32])
def test_threads(size):
    check(on_threads(size, scatter_then_gather), size)


def plain(comm):
    parts = case(comm.size, 3)[0][:, : 4 * comm.size].contiguous()
    return bits(comm.reduce_scatter(parts[comm.rank])), bits(comm.all_gather([parts[comm.rank]])[0])


@pytest.mark.dist
def test_the_plain_pair(tmp_path):
    parts = case(3, 3)[0][:, :12]
    assert parts.shape[1] == 12
    total = sum_in_order(list(parts)).chunk(3)
    for rank, (rows, whole) in enumerate(on_ranks(3, plain, tmp_path)):
        assert np.array_equal(rows, bits(total[rank]))
        assert np.array_equal(whole, bits(torch.cat(list(parts))))


def test_the_order_of_the_sum_is_the_ranks():
    """Where order shows: 1 + 2**24 + 1 - 2**24 in float32."""
    parts = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)])

    def job(comm):
        handle = shuffle_handle(torch.arange(4), torch.ones(4, dtype=torch.bool), 4, comm.rank)
        rows = parts[comm.rank].expand(4, 8).contiguous()
        return shuffled_reduce_scatter(comm, rows, rows, handle)[0]

    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert all((rows == in_order).all() for rows in on_threads(4, job))
