"""`semmoe.gateway.Scorer`: a plan's scores of ranks for a prompt, as its tables say."""

import numpy as np
import pytest
from synthetic import random_trace

import semmoe
from semmoe.gateway import Ranks, Scorer
from semmoe.settings import CoclusterSettings

QUICK = CoclusterSettings(starts=1, steps=10)


def plan(attention, method="semmoe"):
    topology = semmoe.Topology.for_attention(attention, 4)
    settings = semmoe.SolveSettings(method=method, cocluster=QUICK)
    return semmoe.solve(random_trace(0, requests=40), topology, settings)


@pytest.mark.parametrize("stored", [False, True])
def test_scores_are_those_of_the_plan_s_tables(tmp_path, stored):
    made = plan("dp")
    semmoe.save_plan(made, tmp_path / "plan")
    scorer, table = Scorer(tmp_path / "plan" if stored else made), made.requests
    ids = [3, 7, 3, 19, 999]  # an id counts once; one that the model does not have is like any that was not profiled
    rows = [3, 7, 19, len(table.token_weights) - 1]
    weight = np.sqrt(table.token_weights[rows].sum(dtype=np.float64))
    expected = table.bias + table.token_scores[rows].sum(axis=0, dtype=np.float64) / weight - table.prices
    for given in (ids, np.array(ids, np.int32)):
        ranks, scores = scorer(given)
        assert sorted(ranks) == [0, 1, 2, 3]
        assert (np.diff(scores) <= 0).all()
        np.testing.assert_allclose(scores, expected[ranks], rtol=1e-5)


def test_one_prompt_leaves_no_trace_in_the_next():
    scorer = Scorer(plan("dp"))
    first = scorer([1, 2, 3])
    scorer([4, 5])
    np.testing.assert_array_equal(scorer([1, 2, 3]), first)


@pytest.mark.parametrize(("attention", "method"), [("tp", "semmoe"), ("dp", "eplb")])
def test_a_plan_that_schedules_no_requests_is_refused(attention, method):
    with pytest.raises(ValueError, match="this plan schedules no requests: solve one with --attention dp or hybrid"):
        Scorer(plan(attention, method))


def test_a_rank_is_the_plans_until_it_runs_ahead():
    made = plan("dp")
    ranks, best = Ranks(made), int(Scorer(made)([3, 7])[0][0])
    others = [rank for rank in range(4) if rank != best]
    first = ranks.admit([3, 7], range(4))
    assert first.ranks == [best, *others]
    held = [ranks.admit([3, 7], range(4)) for _ in range(15)]
    assert {choice.ranks[0] for choice in held} == set(range(4)), "a rank that runs ahead is left out"
    assert ranks.running.total() == 16
    for choice in (first, *held):
        ranks.finish(choice)
    assert ranks.running.total() == 0
    assert ranks.admit([3, 7], range(4)).ranks[0] == best, "all have ended"


def test_a_rank_that_cannot_be_used_is_not_named_and_has_no_work_after():
    made = plan("dp")
    ranks, best = Ranks(made), int(Scorer(made)([3, 7])[0][0])
    others = [rank for rank in range(4) if rank != best]
    assert ranks.admit([3, 7], others).ranks == others
    assert ranks.admit([3, 7], range(4)).ranks[0] == best
    assert ranks.admit([3, 7], []).ranks == []


def test_without_a_prompt_ranks_are_ordered_by_load():
    ranks = Ranks(plan("dp"))
    ranks.running.update({0: 2, 2: 1})
    assert ranks.admit(None, range(4)).ranks == [1, 3, 2, 0]
    assert ranks.admit(None, [2, 0]).ranks == [2, 0]
    assert ranks.admit(None, []).ranks == []
