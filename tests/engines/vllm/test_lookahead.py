"""Asking routers ahead of time in vLLM: no token changes, and more pairs are local than by the same tables without."""

import pytest
from lookahead_tests import blind_plan, local_share
from two_ranks import on_two_ranks

from semmoe.demo import MODEL


@pytest.mark.costly
def test_names_keep_more_pairs_local(plans, prompts, reference, tmp_path):
    looking, blind = ({"SEMMOE_PLAN": path} for path in (plans["tp2"], blind_plan(plans, tmp_path)))
    assert on_two_ranks(str(MODEL), prompts, tmp_path / "looking", variables=looking) == reference
    assert on_two_ranks(str(MODEL), prompts, tmp_path / "without", variables=blind) == reference
    assert local_share(tmp_path / "looking") > local_share(tmp_path / "without") + 0.005
