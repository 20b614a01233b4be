"""Ranks that do not run the same plan end at the start, each with the same line."""

from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest
from ranks import on_ranks, on_threads
from test_plan import CASES, make_plan

from semmoe.core import Placement
from semmoe.engines.host import OnPlan
from semmoe.engines.settings import PluginSettings
from semmoe.runtime.agreement import check_agreement, disagreement


def mirrored(plan):
    """The same sizes, other places: what a stale folder on a second node may hold."""
    placement = plan.placement
    moved = np.ascontiguousarray(placement.physical_to_logical_map[:, ::-1])
    return replace(plan, placement=Placement(physical_to_logical_map=moved, num_experts=8, ep_size=4))


def outcome(comm, plan, **decides):
    try:
        check_agreement(comm.group, {"the plan": plan, **decides})
    except ValueError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.dist
def test_a_plan_that_differs_on_one_rank_ends_every_rank(tmp_path):
    said = on_ranks(3, _stale_on_rank_one, tmp_path)
    assert said[0] == said[1] == said[2]
    assert said[0][0].startswith("ranks disagree: the plan of rank 1 is not that of rank 0")


def _stale_on_rank_one(comm):
    plan = make_plan("linear")
    return [outcome(comm, mirrored(plan) if comm.rank == 1 else plan)]


@pytest.mark.parametrize("case", CASES)
def test_the_same_plan_is_agreed_on(case):
    made = make_plan(case)
    assert on_threads(4, lambda comm: outcome(comm, deepcopy(made), shuffle="plan")) == [None] * 4


def test_a_single_value_of_a_table_is_enough():
    made = make_plan("request map and scores")

    def run(comm):
        plan = deepcopy(made)
        scores = plan.tokens.token_scores.copy()
        scores[1, 2, 0] += comm.rank == 2
        shuffle = replace(plan.tokens, token_scores=scores)
        return outcome(comm, replace(plan, tokens=shuffle))

    assert all("the plan of rank 2 is not" in said for said in on_threads(4, run))


def test_the_type_of_a_table_is_part_of_it():
    def run(comm):
        plan = make_plan("linear")
        kind = np.int64 if comm.rank == 3 else np.int32
        layout = plan.placement.physical_to_logical_map.astype(kind)
        return outcome(comm, replace(plan, placement=replace(plan.placement, physical_to_logical_map=layout)))

    assert all("the plan of rank 3 is not" in said for said in on_threads(4, run))


def test_settings_are_compared_by_name():
    said = on_threads(2, lambda comm: outcome(comm, None, settings="plan" if comm.rank else "off"))
    assert all("settings of rank 1 is not that of rank 0" in text for text in said)


def test_all_ranks_that_differ_are_named():
    digests = np.zeros((4, 2, 32), np.uint8)
    digests[[1, 3], 1, 5] = 1
    assert "the plan of rank 1, 3 is not that of rank 0" in disagreement(["version", "the plan"], digests)
    digests[2, 0, 0] = 1
    assert "version of rank 2 is not" in disagreement(["version", "the plan"], digests)


def test_settings_that_need_a_plan_are_compared_without_its_path():
    """Each node has paths of its own; what must be the same is the rest."""
    plan = make_plan("linear")

    def run(comm):
        settings = PluginSettings(plan=f"/node-{comm.rank}/plan")
        OnPlan(plan, settings)._agree(comm.group)

    assert on_threads(2, run) == [None, None]
