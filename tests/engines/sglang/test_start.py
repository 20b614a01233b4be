"""A start that does not fit ends with a line that says why; a fault in the shuffling is noticed."""

import json
from pathlib import Path

import pytest
from serving import Server

from semmoe.demo import MODEL
from semmoe.engines.hooks import problem
from semmoe.engines.sglang import targets
from semmoe.engines.transformers import verify
from semmoe.plan import load_plan, save_plan

BROKEN = Path(__file__).parent / "broken"


@pytest.mark.parametrize("hook", [*targets.HOOKS, *targets.CPU_HOOKS], ids=lambda hook: hook.target.rsplit(".", 1)[1])
def test_every_hook_fits_this_sglang(hook):
    assert problem(hook) is None


def test_the_negative_control_fails(plans, model, prompts, reference, tmp_path):
    """Tokens that come back in another order change outputs, as the other tests of outputs would see."""
    server = Server(tmp_path, str(MODEL), "--plan", plans["tp2"], path=str(BROKEN))
    try:
        outputs = [answer["output_ids"] for answer in server.wait().complete(prompts)]
    finally:
        server.stop()
    assert not verify.compare_outputs(model, prompts, reference, outputs).holds


@pytest.mark.parametrize("case", ["other model", "other placement", "unknown setting"])
def test_what_does_not_fit_does_not_start(case, plans, tmp_path, monkeypatch):
    from dataclasses import replace

    plan = load_plan(plans["tp2"])
    options, expected = ["--plan", plans["tp2"]], "no setting"
    engine: tuple[str, ...] = ("--moe-a2a-backend", "none")
    if case == "other model":
        other = replace(plan, fingerprint=replace(plan.fingerprint, architecture_hash="0" * 64))
        save_plan(other, tmp_path / "other")
        options, expected = ["--plan", str(tmp_path / "other")], "architecture_hash"
    elif case == "other placement":
        trivial = tmp_path / "trivial.json"
        trivial.write_text(json.dumps({"physical_to_logical_map": [list(range(32))] * 6}))
        monkeypatch.setenv("SEMMOE_PLAN", plans["tp2"])
        monkeypatch.setenv("SEMMOE_SHUFFLE", "off")
        options, expected = ["--ep-size", "2"], "lie elsewhere than the plan says"
        engine += ("--init-expert-location", str(trivial))
    else:
        monkeypatch.setenv("SEMMOE_PLANN", "x")
    server = Server(tmp_path, str(MODEL), *options, engine=engine)
    try:
        with pytest.raises(RuntimeError, match=r"did not start \(exit code [^N]"):
            server.wait()
    finally:
        server.stop()
    assert expected in server.log
