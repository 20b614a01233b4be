"""Rows of routing that no router makes, and rows that belong to a warm-up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.traces.routing import RoutingWarning, Tally, check_left_out, identical_tokens, impossible_tokens


def routing(tokens, layers=3, experts=32, top_k=4, seed=0):
    """(T, L, K) different experts of each token."""
    return np.random.default_rng(seed).random((tokens, layers, experts)).argsort(axis=2)[..., :top_k]


@given(st.integers(0, 999), st.integers(1, 3), st.integers(1, 4))
def test_tokens_that_name_an_expert_twice_agree_with_sets(seed, layers, top_k):
    ids = np.random.default_rng(seed).integers(0, 6, (40, layers, top_k)).astype(np.uint8)
    expected = [any(len(set(row)) < top_k for row in token) for token in ids.tolist()]
    assert impossible_tokens(ids).tolist() == expected


def test_blocks_do_not_shift_the_answer(monkeypatch):
    ids = routing(23)
    ids[[0, 7, 22], 1, 3] = ids[[0, 7, 22], 1, 0]
    monkeypatch.setattr("semmoe.traces.routing.BLOCK_TOKENS", 8)
    assert np.flatnonzero(impossible_tokens(ids)).tolist() == [0, 7, 22]
    assert identical_tokens(np.arange(23), ids) == 0


def test_rows_of_another_token_are_counted_and_those_of_the_same_token_are_not():
    ids, tokens = routing(100), np.arange(100)
    ids[10:15], ids[20:22] = ids[3], ids[5]
    assert identical_tokens(tokens, ids) == 6 + 3
    assert identical_tokens(np.zeros(100, np.int32), ids) == 0  # one token, always routed alike
    ids[10, 2, 3] = (set(range(32)) - set(ids[10, 2].tolist())).pop()  # differs in one place of one layer
    assert identical_tokens(tokens, ids) == 5 + 3


def test_short_rows_are_alike_by_chance():
    assert identical_tokens(np.arange(100), np.tile([[[0, 1, 2]]], (100, 3, 1))) == 0
    assert identical_tokens(np.arange(100), np.tile([[[0, 1, 2]]], (100, 4, 1))) == 100


def test_a_trace_without_tokens_has_none_of_either():
    assert identical_tokens(np.zeros(0, np.int32), np.zeros((0, 6, 4), np.uint8)) == 0
    assert impossible_tokens(np.zeros((0, 6, 4), np.uint8)).shape == (0,)


def test_one_percent_of_impossible_tokens_is_the_limit():
    check_left_out("t", 10, 1000)
    with pytest.raises(ValueError, match="t: 11 of 1,000 tokens name an expert twice in a layer"):
        check_left_out("t", 11, 1000)


def test_warnings_say_how_many(recwarn):
    Tally(tokens=100, identical=1).check("t")
    assert not recwarn
    with pytest.warns(RoutingWarning, match="1 tokens name an expert twice in a layer and are left out; 100 are"):
        Tally(tokens=100, left_out=1).check("t")
    with pytest.warns(RoutingWarning, match=r"t: 2 of 100 tokens \(2%\) have in every layer the experts of another"):
        Tally(tokens=100, identical=2).check("t")
    with pytest.raises(ValueError, match="2 of 102 tokens"):
        Tally(tokens=100, left_out=2).check("t")
