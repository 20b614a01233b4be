"""Passes of vLLM with an all-to-all and without one, in one engine: the tokens are the plain model's on either path."""

import re

import pytest
from fixed_times import assert_as_text
from two_ranks import counted, make_plan, on_two_ranks

from semmoe.demo import MODEL


@pytest.fixture(scope="module")
def with_copies(texts, tmp_path_factory):
    return make_plan(str(MODEL), texts, tmp_path_factory.mktemp("plan"), "tp2", copies=4)


def test_without_an_all_to_all_no_byte_is_dispatched_and_no_token_changes(with_copies, prompts, reference, tmp_path):
    given = {"SEMMOE_PLAN": with_copies, "SEMMOE_PATH": "whole"}
    assert on_two_ranks(str(MODEL), prompts, tmp_path, variables=given) == reference
    assert counted(tmp_path, "passes", path="whole") == counted(tmp_path, "passes") > 0
    assert counted(tmp_path, "all_to_all_bytes") == 0


def test_each_pass_takes_the_path_that_is_cheaper_for_its_tokens(with_copies, prompts, reference, tmp_path):
    times = {"shuffled": [2.0, 3.0], "whole": [1.0, 33.0]}  # of 1 and 1000 tokens: equal at 33
    given = {"SEMMOE_PLAN": with_copies}
    assert on_two_ranks(str(MODEL), prompts, tmp_path, variables=given, times=times) == reference
    assert counted(tmp_path, "passes", path="whole") > 0
    assert counted(tmp_path, "passes", path="shuffled") > 0
    assert counted(tmp_path, "degraded") == 0
    assert_as_text(tmp_path / "chosen.json")


def test_passes_are_timed_with_tokens_as_local_as_those_that_are_served(texts, prompts, reference, tmp_path):
    """Without a stand-in for attention as few were as at random, where .74 are in text that is served."""
    plan = make_plan(str(MODEL), texts, tmp_path, "tp2", copies=0)
    for path in ("auto", "shuffled"):
        given = {"SEMMOE_PLAN": plan, "SEMMOE_PATH": path}
        (tmp_path / path).mkdir()
        assert on_two_ranks(str(MODEL), prompts[:4], tmp_path / path, variables=given) == reference[:4]
    log = (tmp_path / "auto" / "rank0" / "log.txt").read_text()
    timed = float(re.search(r"timed with (\S+) of pairs local", log)[1])
    local, all_pairs = (counted(tmp_path / "shuffled", "pairs", **label) for label in ({"local": "true"}, {}))
    assert local / all_pairs - timed < 0.15
    assert timed > 0.6


def test_paths_are_timed_before_the_engine_serves(with_copies, prompts, reference, tmp_path):
    given = {"SEMMOE_PLAN": with_copies, "SEMMOE_PATH": "auto"}
    assert on_two_ranks(str(MODEL), prompts[:4], tmp_path, variables=given) == reference[:4]
    log = (tmp_path / "rank0" / "log.txt").read_text()
    assert "cheapest path of a pass by its tokens" in log
    assert "hooks ran" not in log
    tokens = counted(tmp_path, "routed_tokens") + counted(tmp_path, "routed_tokens", rank=1)
    assert tokens <= 6 * sum(len(prompt) + 8 for prompt in prompts[:4])  # those timed served nobody
