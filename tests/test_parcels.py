"""Rows whose number heads their message: random numbers, none, more than there is room for, layer after layer."""

from collections import Counter

import numpy as np
import pytest
import torch
from ranks import on_ranks

from semmoe.runtime import parcels, reference
from semmoe.runtime.collectives import shuffle_handle, shuffled_all_gather, shuffled_reduce_scatter
from semmoe.runtime.dispatch import combine, dispatch

pytestmark = pytest.mark.dist

LAYERS, WIDTH, TOP_K = 40, 3, 2
ROW = WIDTH * 4 + TOP_K * 8
ROOM = 4  # rows, before any was sent


def case(size, layer):
    """Tokens of every rank, and who computes their experts; rank 1 has none, sizes go up and down."""
    rng = np.random.default_rng(100 * size + layer)
    most = rng.choice([0, 1, ROOM, ROOM + 1, 3 * ROOM, 60])
    counts = np.where(np.arange(size) == 1, 0, rng.integers(0, most + 1, size))
    hidden = [torch.from_numpy(rng.normal(size=(n, WIDTH)).astype(np.float32)) for n in counts]
    # all to one rank at times, none at others
    targets = [torch.from_numpy(rng.integers(-1, rng.choice([0, 1, size]), (n, TOP_K))) for n in counts]
    return hidden, targets


def layers(comm):
    parcels.FIRST_BYTES = ROOM * ROW
    out = []
    for layer in range(LAYERS):
        hidden, targets = (column[comm.rank] for column in case(comm.size, layer))
        before, weights = Counter(comm.messages), torch.ones(targets.shape)
        if layer % 3 == 0:  # other collectives of the same group between
            handle = shuffle_handle(torch.arange(comm.size), comm.size, comm.rank)
            mine = shuffled_reduce_scatter(comm, torch.eye(comm.size), handle)
            assert (shuffled_all_gather(comm, mine, handle) == torch.eye(comm.size) * comm.size).all()
        received, handle = dispatch(comm, hidden, targets, weights, targets)
        combined = combine(comm, received.hidden, handle)
        out.append((received.hidden.numpy(), combined.numpy(), comm.messages["dispatch"] - before["dispatch"]))
    return out, dict(comm.sent)


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_layers_of_all_sizes_one_after_another(size, tmp_path):
    results, sent, most = on_ranks(size, layers, tmp_path), np.zeros((size, size), int), np.ones((size, size), int)
    twice = 0
    for layer in range(LAYERS):
        hidden, targets = case(size, layer)
        expected = reference.dispatch(hidden, targets, targets, targets)
        answers = reference.combine([rows for rows, _, _ in expected], targets)
        rows_to = np.stack([(t[:, :, None] == torch.arange(size)).any(1).sum(0).numpy() for t in targets])
        np.fill_diagonal(rows_to, 0)
        room = parcels.room(most, ROW, ROOM * ROW)
        for rank, (found, _) in enumerate(results):
            rows, combined, messages = found[layer]
            assert np.array_equal(rows, expected[rank][0].numpy()), (layer, rank)
            assert np.array_equal(combined, answers[rank].numpy())
            assert messages == size - 1 + (rows_to > room)[rank].sum()
        twice, sent, most = twice + (rows_to > room).sum(), sent + rows_to, np.maximum(most, rows_to)
    assert size == 1 or 0 < twice < LAYERS * size  # in both directions
    for rank, (_, bytes_sent) in enumerate(results):
        assert bytes_sent.get("dispatch", 0) == sent[rank].sum() * ROW
        assert bytes_sent["counts"] == LAYERS * (size - 1) * parcels.HEAD


def test_room_is_a_power_of_two_that_held_all_before():
    assert parcels.room(np.array([1, 4, 5, 8, 9, 1000]), 10, 40).tolist() == [4, 4, 8, 8, 16, 1024]
    assert parcels.room(np.array([1]), 100, 40).tolist() == [1]


def test_places_of_the_docstring():
    assert parcels._places(np.array([8, 100]), np.array([2, 1]), 10).tolist() == [8, 18, 100]
