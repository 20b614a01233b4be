"""Counts of what was routed where."""

import numpy as np
import oracles
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from lab.concentration import token_counts
from lab.methods.grouping import paths_of
from semmoe.traces.affinity import expert_load, nearest_profiled, request_counts


def hand_trace():
    """Token 5 twice and token 0 once, in two requests, through two layers of four experts."""
    return make_trace([[5, 0], [5]], [[[0, 1], [2, 3]], [[1, 2], [3, 0]], [[0, 3], [2, 1]]])


def test_counts_of_a_hand_made_trace():
    tokens = token_counts(hand_trace())
    assert tokens[0].toarray()[5].tolist() == [2, 1, 0, 1]
    assert tokens[1].toarray()[0].tolist() == [1, 0, 0, 1]
    assert request_counts(hand_trace())[0].toarray().tolist() == [[1, 2, 1, 0], [1, 0, 0, 1]]
    assert paths_of(hand_trace())[0, 0].tolist() == [0, 1, 2, 1]
    assert expert_load(hand_trace()).tolist() == [[2, 2, 1, 1], [1, 1, 2, 2]]


@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 3))
def test_counts_agree_with_loops(seed, layers, top_k):
    trace = random_trace(seed, requests=5, layers=layers, top_k=top_k)
    tokens, requests, paths = oracles.affinity_counts(trace)
    np.testing.assert_array_equal([m.toarray() for m in token_counts(trace)], tokens)
    np.testing.assert_array_equal([m.toarray() for m in request_counts(trace)], requests)
    np.testing.assert_array_equal(paths_of(trace), paths)
    np.testing.assert_array_equal(expert_load(trace), tokens.sum(axis=1))


def test_an_unprofiled_token_finds_the_neighbour_of_the_same_direction():
    embeddings = np.array([[1.0, 0.0], [0.0, 1.0], [9.0, 1.0], [0.1, 0.5], [0.0, 0.0]])
    profiled = np.array([True, True, False, False, True])
    assert nearest_profiled(embeddings, profiled).tolist() == [0, 1, 0, 1, 4]


@given(st.integers(0, 999), st.integers(1, 7))
def test_neighbours_agree_with_loops_whatever_the_block(seed, block):
    rng = np.random.default_rng(seed)
    embeddings, profiled = rng.normal(size=(20, 3)), rng.random(20) < 0.4
    profiled[rng.integers(20)] = True
    found = nearest_profiled(embeddings, profiled, block)

    def cosine(v, w):
        return embeddings[v] @ embeddings[w] / np.linalg.norm(embeddings[v]) / np.linalg.norm(embeddings[w])

    for v in range(20):
        expected = v if profiled[v] else max(np.flatnonzero(profiled), key=lambda w: cosine(v, w))
        assert found[v] == expected
