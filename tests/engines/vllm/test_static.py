"""vLLM's tokens shuffled with static shapes, as in CUDA graphs: outputs stay, and about as many pairs are local."""

import pytest
from lookahead_tests import local_share
from two_ranks import counted, on_two_ranks

from semmoe.demo import MODEL


def test_no_token_changes_and_as_many_pairs_are_local(plans, prompts, reference, tmp_path):
    given = {"SEMMOE_PLAN": plans["tp2"]}
    static = given | {"SEMMOE_STATIC": "1"}
    assert on_two_ranks(str(MODEL), prompts, tmp_path / "static", variables=static) == reference
    assert on_two_ranks(str(MODEL), prompts, tmp_path / "host", variables=given) == reference
    assert local_share(tmp_path / "static") == pytest.approx(local_share(tmp_path / "host"), abs=0.01)
    assert counted(tmp_path / "static", "active", static="true") == 1
    assert counted(tmp_path / "static", "degraded") == 0
