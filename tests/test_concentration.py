"""How concentrated routing is, by hand, by loops and on chains that cannot be missed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from semmoe.affinity import build_affinity
from semmoe.concentration import concentration, next_layer_hit_rate, prediction, quantiles, token_statistics
from semmoe.splitter import split


def test_hotness_of_the_docstring_s_example():
    found = token_statistics(np.array([[3, 2, 1, 0]]), 2)
    assert found["cumulative_hotness"] == pytest.approx([5 / 6])
    assert found["max_other_hotness"] == pytest.approx([1 / 6])
    deviations = np.array([3, 2, 1, 0]) - 1.5
    assert found["kurtosis"] == pytest.approx([(deviations**4).mean() / (deviations**2).mean() ** 2])


def test_a_token_seen_once_is_as_hot_as_can_be():
    found = token_statistics(np.array([[0, 1, 0, 1]]), 2)
    assert (found["cumulative_hotness"], found["max_other_hotness"]) == ([1.0], [0.0])


def test_every_expert_chosen_leaves_no_other():
    assert token_statistics(np.array([[2, 1]]), 2)["max_other_hotness"].tolist() == [0.0]


@pytest.mark.filterwarnings("error")
def test_equal_counts_have_the_least_kurtosis_and_no_warning():
    found = token_statistics(np.array([[1, 1, 1, 1], [3, 2, 1, 0], [7, 7, 7, 7]]), 4)["kurtosis"]
    assert found.tolist() == [1.0, token_statistics(np.array([[3, 2, 1, 0]]), 2)["kurtosis"][0], 1.0]


def test_quantiles_by_weight():
    values, weights = np.array([30.0, 10.0, 20.0]), np.array([2, 1, 1])
    assert quantiles(values, weights) == {"p25": 10.0, "p50": 20.0, "p75": 30.0}
    assert quantiles(values, np.ones(3)) == {"p25": 10.0, "p50": 20.0, "p75": 30.0}
    assert quantiles(values, np.array([8, 1, 1])) == {"p25": 30.0, "p50": 30.0, "p75": 30.0}


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5)), min_size=1, max_size=12))
def test_weighted_quantiles_are_those_of_values_repeated(pairs):
    values, weights = (np.array(column) for column in zip(*pairs, strict=True))
    repeated = np.sort(np.repeat(values, weights))
    expected = {f"p{q}": float(repeated[-(-q * len(repeated) // 100) - 1]) for q in (25, 50, 75)}
    assert quantiles(values.astype(float), weights) == expected


def test_concentration_of_two_tokens():
    """Token 0 goes to experts 0 0 0 1, token 1 to 2: static top-1 is right thrice of four times, and once of one."""
    trace = make_trace([[0, 0, 0, 0, 1]], np.array([0, 0, 0, 1, 2])[:, None, None])
    (layer,) = concentration(trace, build_affinity(trace))
    assert layer["by_occurrence"]["cumulative_hotness"] == {"p25": 0.75, "p50": 0.75, "p75": 0.75}
    assert layer["by_type"]["cumulative_hotness"] == {"p25": 0.75, "p50": 0.75, "p75": 1.0}
    assert layer["by_occurrence"]["max_other_hotness"] == {"p25": 0.25, "p50": 0.25, "p75": 0.25}
    assert layer["by_occurrence"]["f1"] == {"p25": 1.0, "p50": 1.0, "p75": 1.0}
    assert layer["by_type"]["f1"] == {"p25": 1.0, "p50": 1.0, "p75": 1.0}


@given(st.integers(0, 9999))
def test_concentration_agrees_with_loops(seed):
    trace = random_trace(seed, requests=5, layers=2, vocab=6)
    f1 = {l: {} for l in range(2)}
    for l in range(2):
        counts = np.zeros((6, 8), int)
        for token, experts in zip(trace.token_ids, trace.expert_ids[:, l], strict=True):
            counts[token, experts] += 1
        for token, experts in zip(trace.token_ids, trace.expert_ids[:, l], strict=True):
            top = sorted(range(8), key=lambda e: (-counts[token, e], e))[:2]
            f1[l].setdefault(int(token), []).append(len(set(top) & set(experts.tolist())) / 2)
    for l, found in enumerate(concentration(trace, build_affinity(trace))):
        lower_medians = [sorted(values)[(len(values) - 1) // 2] for values in f1[l].values()]
        every = [value for values in f1[l].values() for value in values]
        assert found["by_type"]["f1"] == quantiles(np.array(lower_medians), np.ones(len(lower_medians)))
        assert found["by_occurrence"]["f1"] == quantiles(np.array(every), np.ones(len(every)))


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
    """Layer 1 is always expert 0, so layer 2 can only be told from layer 0."""
    experts = np.repeat((np.arange(160) % 4)[:, None], 3, axis=1)
    experts[:, 1] = 0
    trace = make_trace([[0] * 4] * 40, experts[..., None], [[]] * 40)
    one, two = next_layer_hit_rate(trace)
    assert two == {"lookback": 2, "hit_rate": 1.0}
    assert one["hit_rate"] == pytest.approx((1 + 1 / 4) / 2)


def test_one_layer_has_none_before_it():
    assert next_layer_hit_rate(make_trace([[0]] * 8, np.zeros((8, 1, 1)), [[]] * 8)) == []
