"""Passes of SGLang with an all-to-all and without, in one engine: the tokens are the plain model's on either path."""

import json
from pathlib import Path

import pytest
from fixed_times import assert_as_text
from offline import completed

from semmoe.demo import MODEL
from semmoe.engines.transformers import recorder
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

TIMED = Path(__file__).parents[1] / "timed"  # a plug-in that gives the times of passes


@pytest.fixture(scope="module")
def with_copies(model, texts, tmp_path_factory):
    """Plans with copies, by the rule that chooses among them."""
    folder = tmp_path_factory.mktemp("plan")
    trace = recorder.record(model, str(MODEL), texts[32:64], folder / "trace")
    for rule in ("static", "cover"):
        how = SolveSettings(redundant_experts=4, cocluster=CoclusterSettings(starts=1, steps=10, copy_choice=rule))
        save_plan(solve(trace, Topology(ep_size=2), how), folder / rule)
    return {rule: str(folder / rule) for rule in ("static", "cover")}


def run(prompts, plan, folder, path, *options):
    """Tokens of every prompt, and rank 0's counters by name and path."""
    tokens = completed([prompts], str(MODEL), Topology(ep_size=2), folder, plan, options, path=path)
    samples = json.loads((folder / "activity-rank-00000.json").read_text())["samples"]
    return tokens, {(s["name"], s["labels"].get("path", "")): s["value"] for s in samples}


def test_without_an_all_to_all_no_row_is_dispatched_and_no_token_changes(with_copies, prompts, reference, tmp_path):
    """SGLang gathers routed experts from the ranks, for which its buffer has no room where each has all rows."""
    tokens, counted = run(prompts, with_copies["static"], tmp_path, "whole", "--enable-return-routed-experts")
    assert tokens == reference
    assert counted["passes", "whole"] > 0
    assert counted["routed_tokens", ""] == 0


def test_each_pass_takes_the_path_that_is_cheaper_for_its_tokens(
    with_copies, prompts, reference, tmp_path, monkeypatch
):
    monkeypatch.syspath_prepend(str(TIMED))  # which its processes take over
    tokens, counted = run(prompts, with_copies["cover"], tmp_path, "auto")
    assert tokens == reference
    assert counted["passes", "whole"] > 0
    assert counted["passes", "shuffled"] > 0
    assert not any(name == "degraded" for name, _ in counted)
    assert_as_text(tmp_path / "chosen.json")


def test_paths_are_timed_at_the_first_pass(plans, prompts, reference, tmp_path, monkeypatch):
    """Passes that are only timed are not counted, and no counter that is published meanwhile falls afterwards."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    tokens, counted = run(prompts[:4], plans["tp2"], tmp_path, "auto")
    assert tokens == reference[:4]
    assert counted["passes", "whole"] + counted.get(("passes", "shuffled"), 0) <= 4 * 9
    assert counted["routed_tokens", ""] <= 6 * sum(len(prompt) + 8 for prompt in prompts[:4])
    assert not any(name == "degraded" for name, _ in counted)
    assert "cannot be published" not in (tmp_path / "log.txt").read_text()
