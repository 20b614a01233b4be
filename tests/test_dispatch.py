"""Dispatch and combine against their specification: random shapes on 1 to 8 processes, 16 and 32 ranks in threads."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks, on_threads

from semmoe.runtime import reference
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import (
    Dispatch,
    Levels,
    combine,
    combine_parts,
    combine_two_level,
    dispatch,
    dispatch_two_level,
    rows_by_rank,
)

pytestmark = pytest.mark.dist

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def cases(size: int) -> range:
    return range(16 if size < 16 else 4)  # wide groups take long


def case(size: int, seed: int):
    """hidden, expert_ids, weights of every rank, and choice (size, E): who serves an expert to each rank."""
    generator = torch.Generator().manual_seed(seed + 1000)
    experts, top_k, width = (int(torch.randint(1, b, (), generator=generator)) for b in (20, 5, 40))
    top_k, dtype = min(top_k, experts), DTYPES[seed % 4]
    counts = torch.randint(0, 12, (size,), generator=generator) * (torch.rand(size, generator=generator) < 0.8)
    hidden = [torch.randn(int(n), width, generator=generator).to(dtype) for n in counts]
    ids = [torch.rand(int(n), experts, generator=generator).argsort(dim=1)[:, :top_k] for n in counts]
    weights = [torch.rand(int(n), top_k, generator=generator).to(DTYPES[(seed // 2) % 4]) for n in counts]
    choice = torch.randint(0, max(size // (1 + seed % 3), 1), (size, experts), generator=generator)
    return hidden, ids, weights, choice


def experts_of(rows):
    """Stands for a rank's experts: every row by itself, so that results do not depend on the batch."""
    hidden, ids, weights = rows
    scale = torch.where(ids >= 0, (ids + 1) * weights.float(), 0).sum(dim=1, keepdim=True)
    return (hidden.float() * scale).to(hidden.dtype)


def parts(received):
    return received.hidden, received.expert_ids, received.weights


def numbers(tensors):
    return [tensor.double().numpy() for tensor in tensors]


def is_token_in_rank(handle):
    """(n, R) whether the token has a row for the rank."""
    out = torch.zeros(handle.num_tokens, len(handle.num_tokens_per_rank))
    for j, tokens in enumerate(handle.tokens.split(handle.num_tokens_per_rank)):
        out[tokens, j] = 1
    return out


def one_level(comm):
    out = []
    for seed in cases(comm.size):
        hidden, ids, weights, choice = case(comm.size, seed)
        arguments = hidden[comm.rank], ids[comm.rank], weights[comm.rank]
        comm.sent_to.clear()
        received, handle = dispatch(comm, *arguments, choice[comm.rank][ids[comm.rank]])
        combined = combine(comm, experts_of(parts(received)), handle)
        sent_to = [comm.sent_to[j] for j in range(comm.size)]
        flight = Dispatch(comm, *arguments, choice[comm.rank][ids[comm.rank]])
        local = experts_of(parts(flight.local()))
        overlapped = combine_parts(comm, local, experts_of(parts(flight.remote())), flight.handle)
        per_expert = torch.bincount(received.expert_ids[received.expert_ids >= 0], minlength=choice.shape[1]).numpy()
        rows = numbers(parts(received))
        out.append((rows, *numbers([combined, overlapped, is_token_in_rank(handle)]), per_expert, sent_to))
    return out


def check(results, size):
    for seed in cases(size):
        hidden, ids, weights, choice = case(size, seed)
        targets = [choice[r][ids[r]] for r in range(size)]
        expected = reference.dispatch(hidden, ids, weights, targets)
        answers = reference.combine([experts_of(rows) for rows in expected], targets)
        rows_to = torch.stack([(t[:, :, None] == torch.arange(size)).any(1).sum(0) for t in targets])
        back = hidden[0].shape[1] * hidden[0].element_size()
        there = back + ids[0].shape[1] * (4 + weights[0].element_size())
        for rank, result in enumerate(results):
            rows, combined, overlapped, in_rank, per_expert, sent_to = result[seed]
            for ours, theirs in zip(rows, numbers(expected[rank]), strict=True):
                assert np.array_equal(ours, theirs)
            assert np.array_equal(combined, answers[rank].double().numpy())
            assert np.array_equal(overlapped, combined)
            assert np.array_equal(in_rank.sum(axis=0), rows_to[rank].numpy())
            assert per_expert.sum() == (expected[rank][1] >= 0).sum()
            forth = rows_to[rank] * there + rows_to[:, rank] * back
            assert sent_to == [0 if j == rank else int(forth[j]) for j in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_processes(size, tmp_path):
    check(on_ranks(size, one_level, tmp_path), size)


@pytest.mark.parametrize("size", [16, 32])
def test_threads(size):
    check(on_threads(size, one_level), size)


def levels_of(comm, nodes: int) -> Levels:
    """Every rank creates every group, in one order."""
    width = comm.size // nodes
    across = [dist.new_group([n * width + i for n in range(nodes)]) for i in range(width)]
    inside = [dist.new_group([n * width + i for i in range(width)]) for n in range(nodes)]
    node, place = divmod(comm.rank, width)
    return Levels(Communicator(across[place], node, nodes), Communicator(inside[node], place, width))


def two_level(comm, nodes):
    out, levels = [], levels_of(comm, nodes)
    for seed in cases(comm.size):
        hidden, ids, weights, choice = case(comm.size, seed)
        levels.inter.reset_counts()
        levels.intra.reset_counts()
        arguments = hidden[comm.rank], ids[comm.rank], weights[comm.rank]
        received, handle = dispatch_two_level(levels, *arguments, choice[comm.rank][ids[comm.rank]])
        combined = combine_two_level(levels, experts_of(parts(received)), handle)
        rows = [row.tolist() for row in torch.cat([t.double() for t in parts(received)], dim=1)]
        out.append((sorted(rows), combined.double().numpy(), levels.inter.sent["dispatch"], levels.sent_bytes()))
    return out


def two_nodes(comm):
    return two_level(comm, 2)


def check_two_level(results, size, nodes):
    for seed in cases(size):
        hidden, ids, weights, choice = case(size, seed)
        targets = [choice[r][ids[r]] for r in range(size)]
        expected = reference.dispatch(hidden, ids, weights, targets)
        answers = reference.combine([experts_of(rows) for rows in expected], targets)
        row_bytes = hidden[0].shape[1] * hidden[0].element_size() + ids[0].shape[1] * (4 + weights[0].element_size())
        tolerance = 1e-5 if hidden[0].dtype in (torch.float32, torch.float64) else 3e-2
        for rank, result in enumerate(results):
            rows, combined, across, by_tier = result[seed]
            assert rows == sorted(row.tolist() for row in torch.cat([t.double() for t in expected[rank]], dim=1))
            np.testing.assert_allclose(combined, answers[rank].double().numpy(), rtol=tolerance, atol=tolerance * 40)
            node = targets[rank] // (size // nodes)
            away = [len(set(row.tolist()) - {rank // (size // nodes)}) for row in node]
            assert across == sum(away) * row_bytes  # once per destination node
            assert by_tier["inter"] >= across


def test_two_nodes_of_processes(tmp_path):
    check_two_level(on_ranks(4, two_nodes, tmp_path), 4, 2)


@pytest.mark.parametrize(("size", "nodes"), [(6, 3), (16, 4), (4, 1), (4, 4)])
def test_nodes_of_threads(size, nodes):
    check_two_level(on_threads(size, partial(two_level, nodes=nodes)), size, nodes)


def test_rows_of_the_docstring():
    tokens, counts = rows_by_rank(torch.tensor([[0, 1], [1, 1], [0, -1]]), 2)
    assert tokens.tolist() == [0, 2, 0, 1]
    assert counts.tolist() == [2, 2]
