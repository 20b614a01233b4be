"""Splits by request: what stays together, what is drawn, what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from semmoe.core import RoutingTrace
from semmoe.traces.split import near_duplicates, split


def with_prompts(prompts: list[list[int]], vocabulary: int = 1000) -> RoutingTrace:
    """One routed token a request, whose id is the request's number, behind the prompts given."""
    experts = np.zeros((len(prompts), 1, 1))
    return make_trace([[r] for r in range(len(prompts))], experts, prompts, num_experts=1, vocab_size=vocabulary)


@given(share=st.floats(0.01, 0.99), seed=st.integers(0, 99))
def test_split_divides_the_requests_and_keeps_arrival_order(share, seed):
    trace = with_prompts([[10 * r, 10 * r + 1, 10 * r + 2, 10 * r + 3] for r in range(6)])
    profile, rest = split(trace, share, seed)
    assert sorted([*profile.token_ids, *rest.token_ids]) == list(range(6))
    assert profile.num_requests == min(max(round(6 * share), 0) + (round(6 * share) == 0), 5)
    assert (np.diff(profile.token_ids) > 0).all()
    assert (np.diff(rest.token_ids) > 0).all()


def test_split_depends_on_the_seed_alone():
    parts = [split(random_trace(0), 0.5, seed)[0].digest() for seed in (1, 1, 2)]
    assert parts[0] == parts[1] != parts[2]


@pytest.mark.parametrize("share", [0.0, 1.0, -0.5])
def test_split_refuses_an_empty_part(share):
    with pytest.raises(ValueError, match="between 0 and 1"):
        split(random_trace(0), share, 0)


@pytest.mark.parametrize("prompts", [[[1, 2, 3, 4]], [[1, 2, 3, 4]] * 3])
def test_one_distinct_request_cannot_be_split(prompts):
    with pytest.raises(ValueError, match=r"1 distinct request\(s\) cannot be split"):
        split(with_prompts(prompts), 0.5, 0)


def test_repeated_and_nearly_repeated_prompts_share_a_cluster():
    template = [1, 2, 3, 4, 5, 6, 7, 8]
    question = list(range(100, 130))
    prompts = [
        template + question,  # 0
        template + list(range(200, 230)),  # 1: another question
        template + [*question[:-1], 999],  # 2: one token differs from 0
        template + list(range(200, 230)),  # 3: repeats 1
        template + list(range(300, 330)),  # 4
    ]
    clusters = near_duplicates(with_prompts(prompts))
    assert clusters[0] == clusters[2]
    assert clusters[1] == clusters[3]
    assert len(set(clusters.tolist())) == 3


@pytest.mark.parametrize(("shared", "together"), [(8, True), (7, False)])
def test_prompts_that_are_exactly_half_alike_share_a_cluster(shared, together):
    """Of 12 shingles each, 8 in both, 16 in either: one half. Of 7 and 17 a little less."""
    first, second = list(range(14)), [*range(shared + 2), *range(100, 112 - shared)]
    prompts = [first, second, *([1000 + 20 * r + i for i in range(14)] for r in range(40))]
    clusters = near_duplicates(with_prompts(prompts, vocabulary=2000))
    assert (clusters[0] == clusters[1]) == together
    assert len(set(clusters.tolist())) == 42 - together


def test_a_common_template_makes_no_duplicates():
    prompts = [[*range(1, 40), 100 + 3 * r, 101 + 3 * r, 102 + 3 * r] for r in range(60)]
    assert len(set(near_duplicates(with_prompts(prompts)).tolist())) == 60


def test_requests_without_a_prompt_are_no_duplicates():
    assert len(set(near_duplicates(with_prompts([[], [], []])).tolist())) == 3


@pytest.mark.parametrize("seed", range(5))
def test_near_duplicates_are_never_divided(seed):
    base = np.random.default_rng(seed).integers(0, 900, (12, 30))
    prompts = [[*base[r // 2, : 29 - r % 2], 900 + r % 2] for r in range(24)]
    profile, rest = split(with_prompts([list(map(int, p)) for p in prompts]), 0.4, seed)
    assert not set(profile.token_ids // 2) & set(rest.token_ids // 2)
