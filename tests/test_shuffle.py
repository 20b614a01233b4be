"""The shuffled pair against its specification: random shapes on 1 to 8 processes, 16 and 32 ranks in threads."""

import numpy as np
import pytest
import torch
from ranks import on_ranks, on_threads

from semmoe.runtime import collectives, reference
from semmoe.runtime.collectives import (
    shuffle_handle,
    shuffled_all_gather,
    shuffled_all_gathers,
    shuffled_reduce_scatter,
)
from semmoe.tokens.slices import slice_size

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
CASES = 24


def case(size: int, seed: int):
    """Partial sums of every rank (size, N, H), and ranks (N,) that fill equal slices, some of them not at all."""
    generator = torch.Generator().manual_seed(seed)
    tokens, width = (int(torch.randint(0, bound, (), generator=generator)) for bound in (70, 40))
    tokens, width = (tokens // size * size if seed % 3 == 0 else tokens), width + 1
    rows = slice_size(tokens, size)
    used = max(-(-tokens // rows), 1) if seed % 2 else size  # as few ranks as can hold the tokens
    slots = torch.randperm(size, generator=generator)[:used].repeat_interleave(rows)
    ranks = slots[torch.randperm(len(slots), generator=generator)[:tokens]]
    partials = torch.randn(size, tokens, width, generator=generator).to(DTYPES[seed % len(DTYPES)])
    return partials, ranks.to(torch.int64 if seed % 4 else torch.int16)


def bits(tensor: torch.Tensor) -> np.ndarray:
    return tensor.contiguous().view(torch.uint8).numpy() if tensor.numel() else np.zeros(tensor.shape, np.uint8)


def scatter_then_gather(comm):
    out = []
    for seed in range(CASES):
        partials, ranks = case(comm.size, seed)
        handle = shuffle_handle(ranks.numpy() if seed % 5 == 0 else ranks, comm.size, comm.rank)
        mine = shuffled_reduce_scatter(comm, partials[comm.rank], handle)
        before = comm.sent["all_gather"]
        ids = handle.mine.to(torch.uint8)[:, None].expand(-1, 3)
        whole, routed = shuffled_all_gathers(comm, [mine, ids], handle)
        again = shuffled_all_gather(comm, mine, handle)
        sent = comm.sent["all_gather"] - before
        out.append((handle.mine.numpy(), bits(mine), bits(whole), bits(again), routed.numpy(), sent))
    return out, dict(comm.sent)


def check(results, size):
    expected_sent = np.zeros(size, np.int64)
    for seed in range(CASES):
        partials, ranks = case(size, seed)
        slices = reference.shuffled_reduce_scatter(list(partials), ranks)
        total = bits(reference.shuffled_all_gather(slices, ranks))
        for rank, (out, _) in enumerate(results):
            mine, rows, whole, again, routed, sent = out[seed]
            assert mine.tolist() == np.flatnonzero(ranks.numpy() == rank).tolist()
            assert np.array_equal(rows, bits(slices[rank])), (seed, rank)
            assert np.array_equal(whole, total)
            assert np.array_equal(again, total)
            assert (routed == np.arange(len(ranks))[:, None]).all()
            row_bytes = partials.shape[2] * partials.element_size()
            assert sent == (size - 1) * len(mine) * (2 * row_bytes + 3)
            expected_sent[rank] += (len(ranks) - len(mine)) * row_bytes
    assert [sent["reduce_scatter"] for _, sent in results] == expected_sent.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_processes(size, tmp_path):
    check(on_ranks(size, scatter_then_gather, tmp_path), size)


@pytest.mark.parametrize("size", [16, 32])
def test_threads(size):
    check(on_threads(size, scatter_then_gather), size)


def on_equal_slices(comm):
    """What NCCL runs: one collective of padded slices."""
    ranks = torch.tensor([1, 0, 1, 0, 2])
    handle = shuffle_handle(ranks, comm.size, comm.rank)
    rows = torch.arange(5.0)[handle.mine, None].expand(-1, 3)
    return collectives._all_gather_padded(comm, rows, handle).numpy()


def test_gather_on_equal_slices(tmp_path):
    for whole in on_ranks(3, on_equal_slices, tmp_path):
        assert (whole == np.arange(5)[:, None]).all()


def plain(comm):
    parts = case(comm.size, 3)[0][:, : 4 * comm.size].contiguous()
    return bits(comm.reduce_scatter(parts[comm.rank])), bits(comm.all_gather(parts[comm.rank]))


def test_the_plain_pair(tmp_path):
    parts = case(3, 3)[0][:, :12]
    total = reference.sum_in_order(list(parts)).chunk(3)
    for rank, (rows, whole) in enumerate(on_ranks(3, plain, tmp_path)):
        assert np.array_equal(rows, bits(total[rank]))
        assert np.array_equal(whole, bits(torch.cat(list(parts))))


def test_the_order_of_the_sum_is_the_ranks():
    """Where order shows: 1 + 2**24 + 1 - 2**24 in float32."""
    parts = torch.tensor([1.0, 2.0**24, 1.0, -(2.0**24)])

    def job(comm):
        handle = shuffle_handle(torch.arange(4), 4, comm.rank)
        return shuffled_reduce_scatter(comm, parts[comm.rank].expand(4, 8).contiguous(), handle)

    in_order = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert all((rows == in_order).all() for rows in on_threads(4, job))
