"""How concentrated routing is, by hand and by loops."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from lab.concentration import concentration, quantiles, token_statistics


def test_hotness_of_the_docstring_s_example():
    found = token_statistics(np.array([[3, 2, 1, 0]]), 2)
    assert found["cumulative_hotness"] == pytest.approx([5 / 6])
    assert found["max_other_hotness"] == pytest.approx([1 / 6])


def test_a_token_seen_once_is_as_hot_as_can_be():
    found = token_statistics(np.array([[0, 1, 0, 1]]), 2)
    assert (found["cumulative_hotness"], found["max_other_hotness"]) == ([1.0], [0.0])


def test_every_expert_chosen_leaves_no_other():
    assert token_statistics(np.array([[2, 1]]), 2)["max_other_hotness"].tolist() == [0.0]


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
    (layer,) = concentration(trace)
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
    for l, found in enumerate(concentration(trace)):
        lower_medians = [sorted(values)[(len(values) - 1) // 2] for values in f1[l].values()]
        every = [value for values in f1[l].values() for value in values]
        assert found["by_type"]["f1"] == quantiles(np.array(lower_medians), np.ones(len(lower_medians)))
        assert found["by_occurrence"]["f1"] == quantiles(np.array(every), np.ones(len(every)))


def test_where_every_token_uses_every_expert_no_other_expert_is_hot():
    for found in concentration(random_trace(0, experts=4, top_k=4)):
        assert found["by_type"]["cumulative_hotness"] == {"p25": 1.0, "p50": 1.0, "p75": 1.0}
        assert found["by_occurrence"]["max_other_hotness"] == {"p25": 0.0, "p50": 0.0, "p75": 0.0}
