"""Look-ahead in a live engine: what the tests on both engines share."""

import json
from dataclasses import replace
from pathlib import Path

from semmoe.plan import load_plan, save_plan
from semmoe.settings import PredictorSettings
from semmoe.tokens.predictor import fit, project
from semmoe.trace import open_trace


def blind_plan(plans: dict[str, str], folder: Path) -> str:
    """The plan for tp2, its experts where they are, with tables that read nothing ahead."""
    plan, trace = load_plan(plans["tp2"]), open_trace(Path(plans["tp2"]).parent / "trace")
    assert plan.tokens.lookahead == 2
    tables = project(fit(trace, PredictorSettings(), 0), trace, plan.placement)
    save_plan(replace(plan, tokens=tables), folder / "blind")
    return str(folder / "blind")


def local_share(folder: Path) -> float:
    """The share of local pairs that the ranks whose counters are in `folder` have counted."""
    samples = [s for path in folder.glob("activity-rank-*.json") for s in json.loads(path.read_text())["samples"]]
    pairs = [sample for sample in samples if sample["name"] == "pairs"]
    return sum(s["value"] for s in pairs if s["labels"]["local"] == "true") / sum(s["value"] for s in pairs)
