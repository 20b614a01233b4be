"""Dispatch and combine against their specification: random shapes on 1 to 8 processes, 16 and 32 ranks in threads."""

import numpy as np
import pytest
import reference
import torch
from ranks import on_ranks, on_threads

from semmoe.runtime import collectives
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import combine, dispatch, rows_by_rank

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
        per_expert = torch.bincount(received.expert_ids[received.expert_ids >= 0], minlength=choice.shape[1]).numpy()
        rows = numbers(parts(received))
        out.append((rows, *numbers([combined, is_token_in_rank(handle)]), per_expert, sent_to))
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
            rows, combined, in_rank, per_expert, sent_to = result[seed]
            for ours, theirs in zip(rows, numbers(expected[rank]), strict=True):
                assert np.array_equal(ours, theirs)
            assert np.array_equal(combined, answers[rank].double().numpy())
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


def test_rows_of_the_docstring():
    tokens, counts = rows_by_rank(torch.tensor([[0, 1], [1, 1], [0, -1]]), 2)
    assert tokens.tolist() == [0, 2, 0, 1]
    assert counts.tolist() == [2, 2]


LAYERS, WIDTH, TOP_K = 40, 3, 2


def layer_case(size, layer):
    """Tokens of every rank, and who computes their experts; rank 1 has none, sizes go up and down."""
    rng = np.random.default_rng(100 * size + layer)
    counts = np.where(np.arange(size) == 1, 0, rng.integers(0, rng.choice([0, 1, 4, 12, 60]) + 1, size))
    hidden = [torch.from_numpy(rng.normal(size=(n, WIDTH)).astype(np.float32)) for n in counts]
    # all to one rank at times, none at others
    targets = [torch.from_numpy(rng.integers(-1, rng.choice([0, 1, size]), (n, TOP_K))) for n in counts]
    return hidden, targets


def layers(comm):
    """Other collectives of the same group come between, and buffers are used again."""
    out = []
    for layer in range(LAYERS):
        hidden, targets = (column[comm.rank] for column in layer_case(comm.size, layer))
        if layer % 3 == 0:
            mine = comm.reduce_scatter(torch.eye(comm.size))
            assert (comm.all_gather([mine])[0] == torch.eye(comm.size) * comm.size).all()
        received, handle = dispatch(comm, hidden, targets, torch.ones(targets.shape), targets)
        out.append((received.hidden.numpy(), combine(comm, received.hidden, handle).numpy()))
    return out, dict(comm.sent)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_layers_of_all_sizes_one_after_another(size, tmp_path):
    results, rows = on_ranks(size, layers, tmp_path), np.zeros((size, size), int)
    for layer in range(LAYERS):
        hidden, targets = layer_case(size, layer)
        expected = reference.dispatch(hidden, targets, targets, targets)
        answers = reference.combine([rows for rows, _, _ in expected], targets)
        rows += np.stack([(t[:, :, None] == torch.arange(size)).any(1).sum(0).numpy() for t in targets])
        for rank, (found, _) in enumerate(results):
            assert np.array_equal(found[layer][0], expected[rank][0].numpy()), (layer, rank)
            assert np.array_equal(found[layer][1], answers[rank].numpy())
    np.fill_diagonal(rows, 0)
    for rank, (_, sent) in enumerate(results):
        assert sent.get("dispatch", 0) == rows[rank].sum() * (WIDTH * 4 + TOP_K * 8)
        assert sent["counts"] == LAYERS * (size - 1) * 8


def test_more_rows_than_a_message_has_room_for_are_refused_before_any_is_sent(monkeypatch):
    monkeypatch.setattr(collectives, "MAX_ROWS", 4)
    monkeypatch.setattr(Communicator, "backend", "gloo")
    with pytest.raises(ValueError, match="5 rows for a rank at once, of at most 4: make batches smaller"):
        Communicator(None, 0, 2).exchange_rows("dispatch", [torch.zeros(n, 8, dtype=torch.uint8) for n in (0, 5)])
