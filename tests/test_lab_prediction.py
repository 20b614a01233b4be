"""How well held-out routing is predicted, by loops and on chains that cannot be missed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from lab.prediction import next_layer_hit_rate, prediction
from semmoe.traces.split import split


def test_prediction_is_perfect_where_routing_never_varies():
    tokens = [[0, 1, 2, 3]] * 8
    experts = np.array([[[t, (t + 1) % 4]] for t in range(4)] * 8)
    found = prediction(make_trace(tokens, experts, [[]] * 8))
    assert found["known_token_share"] == 1.0
    assert found["layers"] == [{"layer": 0, "precision": 1.0, "f1": 1.0}]


@given(st.integers(0, 999))
def test_prediction_agrees_with_loops(seed):
    trace = random_trace(seed, requests=12, layers=2, vocab=15)
    profile, rest = split(trace, 0.25, seed)
    if rest.num_tokens == 0 or profile.num_tokens == 0:
        return
    found = prediction(trace, seed=seed)
    known = set(profile.token_ids.tolist())
    for l in range(2):
        hits = predicted = 0
        for t, token in enumerate(rest.token_ids.tolist()):
            if token in known:
                counts = np.zeros(8, int)
                for row in np.flatnonzero(profile.token_ids == token):
                    counts[profile.expert_ids[row, l]] += 1
                top = sorted(range(8), key=lambda e: (-counts[e], e))[:2]
                hits += len(set(top) & set(rest.expert_ids[t, l].tolist()))
                predicted += 2
        precision, recall = hits / max(predicted, 1), hits / (2 * rest.num_tokens)
        assert found["layers"][l]["precision"] == pytest.approx(precision)
        assert found["layers"][l]["f1"] == pytest.approx(2 * precision * recall / max(precision + recall, 1e-12))
    assert found["known_token_share"] == pytest.approx(np.mean([t in known for t in rest.token_ids.tolist()]))


def chain(layers: int) -> np.ndarray:
    """(T, L, 1) where each layer's expert is the one before plus one, from each of four starts."""
    return ((np.arange(80) % 4)[:, None] + np.arange(layers))[..., None] % 4


def test_a_chain_of_experts_is_followed_without_fail():
    trace = make_trace([[0] * 4] * 20, chain(4), [[]] * 20)
    assert next_layer_hit_rate(trace, max_lookback=9) == [{"lookback": n, "hit_rate": 1.0} for n in (1, 2, 3)]


def test_looking_back_further_sees_what_one_layer_hides():
    """Layer 1 is always expert 0, so layer 2 can only be predicted from layer 0."""
    experts = np.repeat((np.arange(160) % 4)[:, None], 3, axis=1)
    experts[:, 1] = 0
    trace = make_trace([[0] * 4] * 40, experts[..., None], [[]] * 40)
    one, two = next_layer_hit_rate(trace)
    assert two == {"lookback": 2, "hit_rate": 1.0}
    assert one["hit_rate"] == pytest.approx((1 + 1 / 4) / 2)


def test_one_layer_has_none_before_it():
    assert next_layer_hit_rate(make_trace([[0]] * 8, np.zeros((8, 1, 1)), [[]] * 8)) == []
