"""Passes of SGLang with too few rows to be shuffled keep contiguous slices: the tokens are the plain model's."""

import json

import pytest
from offline import completed

from semmoe.cli.demo import MODEL
from semmoe.core import NEVER
from semmoe.engines.transformers import recorder
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology


@pytest.fixture(scope="module")
def with_copies(model, texts, tmp_path_factory):
    """Plans with copies, by the rule that chooses among them."""
    folder = tmp_path_factory.mktemp("plan")
    trace = recorder.record(model, str(MODEL), texts[32:64], folder / "trace")
    for rule in ("static", "cover"):
        how = SolveSettings(redundant_experts=4, cocluster=CoclusterSettings(starts=1, steps=10, copy_choice=rule))
        save_plan(solve(trace, Topology(ep_size=2), how), folder / rule)
    return {rule: str(folder / rule) for rule in ("static", "cover")}


def run(prompts, plan, folder, shuffle_from, *options, **settings):
    """Tokens of every prompt, and rank 0's counters by name and slices of passes."""
    settings |= {"shuffle_from": str(shuffle_from)}
    tokens = completed([prompts], str(MODEL), Topology(ep_size=2), folder, plan, options, **settings)
    samples = json.loads((folder / "activity-rank-00000.json").read_text())["samples"]
    return tokens, {(s["name"], s["labels"].get("slices", "")): s["value"] for s in samples}


def test_where_no_pass_is_shuffled_no_token_changes(with_copies, prompts, reference, tmp_path):
    tokens, counted = run(prompts, with_copies["static"], tmp_path, NEVER, "--enable-return-routed-experts")
    assert tokens == reference
    assert counted["passes", "contiguous"] > 0
    assert ("passes", "shuffled") not in counted
    assert counted["routed_tokens", ""] > 0
    assert not any(name == "degraded" for name, _ in counted)


def test_passes_are_shuffled_from_a_number_of_rows_on(with_copies, prompts, reference, tmp_path):
    """Passes over prompts have more than 33 rows here, decode passes fewer."""
    tokens, counted = run(prompts, with_copies["cover"], tmp_path, 33)
    assert tokens == reference
    assert not any(name == "degraded" for name, _ in counted)
    assert counted["passes", "shuffled"] > 0
    assert counted["passes", "contiguous"] > 0
