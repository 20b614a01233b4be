"""The generator of synthetic routing: group limits, seeds, and statistics that follow the strengths asked for."""

from dataclasses import replace

import numpy as np
import pytest

from lab.calibrate_routing import calibrate, shape_of
from lab.node_traffic import _removed_rows, bound_of_groups
from lab.routing_statistics import chance, fit, path_information, same_request, same_token
from lab.synthetic_routing import Shape, Strengths, choose, draw, resampled
from semmoe.core import DECODE, PREFILL

L, E = 3, 16
SMALL = Shape(
    layers=L, experts=32, top_k=4, groups=8, kept_groups=4, requests=60, vocabulary=400, hidden_size=64, expert_size=32
)
FLAT = replace(SMALL, experts=E, groups=1, kept_groups=1, prefill=False)


def strengths(**changes) -> Strengths:
    values = {
        "shares": np.tile(np.linspace(1.6, 0.4, E), (L, 1)),
        "id": np.zeros(L),
        "request": np.zeros(L),
        "context": np.zeros(L),
        "keep": 0.9,
        "id_directions": 4.0,
        "request_directions": 3.0,
        "context_directions": 4.0,
        "topics": 8,
        "topic_share": 0.5,
        "lexicon": 0.5,
        "prompt_lexicon": 0.5,
        "repeat": 0.2,
        "zipf": (1.0, 2.0),
        "answer_lengths": np.array([60.0, 100.0, 140.0]),
        "prompt_lengths": np.array([10.0, 20.0]),
    }
    return Strengths(**{**values, **changes})


def test_a_token_stays_within_its_groups_and_its_experts_differ():
    trace = draw(strengths(id=np.full(L, 2.0)), SMALL)
    groups = trace.expert_ids // 4
    assert max(len(set(token)) for token in groups.reshape(-1, 4)) <= 4
    two = draw(strengths(), replace(SMALL, kept_groups=2))
    assert max(len(set(token)) for token in (two.expert_ids // 4).reshape(-1, 4)) == 2
    ordered = np.sort(trace.expert_ids, axis=2)
    assert (np.diff(ordered.astype(int), axis=2) > 0).all()


def test_groups_score_the_sum_of_their_two_highest_logits():
    logits = np.array([[9.0, 0.0, 5.0, 5.0, 4.0, 4.0]], np.float32)  # scores 9, 10, 8
    shape = Shape(experts=6, top_k=2, groups=3, kept_groups=1)
    np.testing.assert_array_equal(np.sort(choose(logits, shape)), [[2, 3]])
    np.testing.assert_array_equal(choose(logits, replace(shape, kept_groups=2))[:, :1], [[0]])


def test_the_same_seed_gives_the_same_bytes_and_another_does_not():
    asked = strengths(id=np.full(L, 2.0), request=np.ones(L), context=np.ones(L))
    assert draw(asked, SMALL, 3).digest() == draw(asked, SMALL, 3).digest()
    assert draw(asked, SMALL, 3).digest() != draw(asked, SMALL, 4).digest()


def test_prompts_are_routed_first_if_at_all():
    both, answers = draw(strengths(), SMALL), draw(strengths(), replace(SMALL, prefill=False))
    first = both.rows(0)
    assert list(np.unique(both.phase)) == [PREFILL, DECODE]
    assert (np.diff(both.phase[first].astype(int)) >= 0).all()
    np.testing.assert_array_equal(both.token_ids[first][: len(both.prompt(0))], both.prompt(0))
    assert (answers.phase == DECODE).all()
    assert both.num_tokens - answers.num_tokens == len(answers.prompt_ids)


def test_strengths_of_zero_leave_nothing_to_find():
    found = fit(draw(strengths(), FLAT))
    assert np.abs(found.token).max() < 0.02
    assert np.abs(found.request).max() < 0.02
    assert found.path.max() < 0.01
    assert found.together.max() < 0.02


@pytest.mark.parametrize(("name", "statistic"), [("id", "token"), ("request", "request"), ("context", "path")])
def test_each_strength_raises_its_own_statistic(name, statistic):
    found = fit(draw(strengths(**{name: np.full(L, 3.0)}), FLAT))
    assert getattr(found, statistic)[1:].min() > 0.1
    for other in {"token", "request"} - {statistic}:
        assert np.abs(getattr(found, other)).max() < 0.05


def test_shares_are_those_asked_for():
    found = fit(draw(strengths(id=np.full(L, 2.0)), replace(FLAT, requests=200)))
    np.testing.assert_allclose(found.shares.mean(axis=0), np.linspace(1.6, 0.4, E), atol=0.15)
    wide = resampled(np.array([[1.5, 0.5]]), 4)
    np.testing.assert_allclose(wide, [[1.5, 1.25, 0.75, 0.5]])


def test_calibration_comes_near_the_statistics_of_a_trace():
    asked = strengths(id=np.full(L, 3.0), request=np.full(L, 1.5), context=np.full(L, 1.0))
    real = fit(draw(asked, replace(FLAT, requests=100), 7))
    _, drawn = calibrate(real, rounds=6)
    assert shape_of(real).requests == 100
    np.testing.assert_allclose(drawn.token, real.token, atol=0.1)
    np.testing.assert_allclose(drawn.request, real.request, atol=0.06)
    np.testing.assert_allclose(drawn.path, real.path, atol=0.1)
    assert abs(drawn.distinct - real.distinct) < 0.1


def test_likeness_by_hand():
    experts = np.array([[0], [1], [0], [1]])
    ids, request, halves = np.array([5, 6, 5, 7]), np.array([0, 0, 1, 1]), np.array([0, 1, 0, 1])
    assert chance(experts, request, 2) == 0.5  # pairs of requests 0 and 1: (0,0) (1,1) alike of four
    assert same_token(ids, request, experts, 2) == 1.0  # token 5 chose expert 0 both times
    assert same_request(ids, request, halves, experts, 2) == 0.0
    trace = draw(strengths(), FLAT)
    assert path_information(trace, 1, 1) < 0.01


def test_copies_remove_a_row_when_the_last_expert_of_a_group_is_held():
    experts = np.array([[0, 2], [0, 2], [2, 3], [4, 5]])  # groups of two, the node has group 0
    np.testing.assert_array_equal(_removed_rows(experts, 2, 0, 6, np.array([1, 2])), [2, 3])


def test_the_bound_knows_routing_that_stays_in_one_group():
    trace = draw(strengths(), replace(SMALL, groups=4, kept_groups=1))
    one = np.repeat(np.arange(trace.num_requests) % 4, np.diff(trace.request_offsets))
    aligned = replace(trace, expert_ids=(one[:, None, None] * 8 + np.arange(4)).repeat(L, 1).astype(np.uint8))
    reached, left = bound_of_groups(aligned, 4, (1,))
    assert reached == 1.0
    assert max(left) < 0.1
