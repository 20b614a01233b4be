"""Collectives and the expert all-to-all over real processes, against what one process computes."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from ranks import on_ranks

from semmoe.runtime.dispatch import combine, dispatch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from prove_tokens import StagedCommunicator

pytestmark = pytest.mark.dist


def nothing_at_all(comm):
    empty = torch.zeros(0, 6)
    return comm.all_gather([empty])[0].shape, comm.reduce_scatter(empty).shape, dict(comm.sent)


def test_a_batch_without_rows_is_gathered_and_scattered(tmp_path):
    assert on_ranks(2, nothing_at_all, tmp_path) == [((0, 6), (0, 6), {})] * 2


EXPERTS, TOP_K, WIDTH = 6, 3, 5


def routed(rank, tokens):
    generator = torch.Generator().manual_seed(rank)
    hidden = torch.randn(tokens, WIDTH, generator=generator)
    ids = torch.rand(tokens, EXPERTS, generator=generator).argsort(dim=1)[:, :TOP_K]
    return hidden, ids, torch.rand(tokens, TOP_K, generator=generator)


def expert_matrices():
    return torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(99))


def choice_of(size):
    return torch.arange(EXPERTS) % size


def exchange(comm):
    """Tokens through their experts; rank 1 has no token of its own. Returns results, bytes sent, rows received."""
    hidden, ids, weights = routed(comm.rank, 0 if comm.rank == 1 else 7)
    received, handle = dispatch(comm, hidden, ids, weights, choice_of(comm.size)[ids])
    matrices, out = expert_matrices(), torch.zeros_like(received.hidden)
    for k in range(TOP_K):
        here = received.expert_ids[:, k] >= 0
        assert (choice_of(comm.size)[received.expert_ids[here, k]] == comm.rank).all()
        products = torch.einsum("mh,mhw->mw", received.hidden[here], matrices[received.expert_ids[here, k]])
        out[here] += received.weights[here, k, None] * products
    return combine(comm, out, handle).numpy(), dict(comm.sent), handle.num_tokens_per_rank


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_experts_reached_by_all_to_all_give_the_dense_result(size, tmp_path):
    results = on_ranks(size, exchange, tmp_path)
    for rank, (combined, sent, rows) in enumerate(results):
        hidden, ids, weights = routed(rank, 0 if rank == 1 else 7)
        dense = torch.einsum("nk,nkw->nw", weights, torch.einsum("nh,nkhw->nkw", hidden, expert_matrices()[ids]))
        assert np.allclose(combined, dense.numpy(), atol=1e-5)
        targets = [set(row.tolist()) for row in choice_of(size)[ids]]
        assert rows == [sum(j in t for t in targets) for j in range(size)]  # one row per destination rank
        remote = sum(len(t - {rank}) for t in targets)
        assert sent.get("dispatch", 0) == remote * (WIDTH * 4 + TOP_K * 8)


def reductions(comm):
    value = torch.full((4, 3), float(comm.rank + 1))
    total, gathered = comm.all_reduce(value).numpy(), comm.all_gather([value[:1]])[0].numpy()
    return total, gathered, dict(comm.sent), dict(comm.messages), dict(comm.rounds)


def test_all_reduce_and_all_gather_count_what_must_be_sent(tmp_path):
    for total, gathered, sent, messages, rounds in on_ranks(3, reductions, tmp_path):
        assert messages == {"all_reduce": 4, "all_gather": 2}
        assert rounds == {"all_reduce": 1, "all_gather": 1}
        assert (total == 6.0).all()
        assert gathered[:, 0].tolist() == [1.0, 2.0, 3.0]
        assert sent == {"all_reduce": 2 * 2 * 12 * 4 // 3, "all_gather": 2 * 3 * 4}


class Elsewhere(torch.Tensor):
    """Tensors that deny to be on the CPU, as those of a GPU, so that their rows are staged on the host."""

    is_cpu = False


def all_collectives(comm, kind):
    """Results of every collective on tensors of a kind, and the bytes sent."""
    hidden, ids, weights = (values.as_subclass(kind) for values in routed(comm.rank, 0 if comm.rank == 1 else 7))
    received, handle = dispatch(comm, hidden, ids, weights, choice_of(comm.size).as_subclass(kind)[ids])
    back = combine(comm, 2 * received.hidden, handle)
    sums = torch.randn(2 * comm.size, WIDTH, generator=torch.Generator().manual_seed(comm.rank)).as_subclass(kind)
    found = [back, received.expert_ids, comm.reduce_scatter(sums), *comm.all_gather([sums, sums[:, :1].long()])]
    return [values.tolist() for values in found], dict(comm.sent), dict(comm.rounds)


def staged_and_not(comm):
    staged = StagedCommunicator(comm.group, comm.rank, comm.size)
    return all_collectives(comm, torch.Tensor), all_collectives(staged, Elsewhere)


@pytest.mark.parametrize("size", [2, 3])
def test_rows_that_are_staged_on_the_host_arrive_as_others_do(size, tmp_path):
    for plain, staged in on_ranks(size, staged_and_not, tmp_path):
        assert plain == staged
