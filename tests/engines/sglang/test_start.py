"""A start that does not fit ends with a line that says why; a fault in the shuffling is noticed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from serving import Server

from semmoe.core import Topology
from semmoe.demo import MODEL
from semmoe.engines.hooks import problem
from semmoe.engines.sglang import launch, targets
from semmoe.engines.sglang.settings import PluginSettings
from semmoe.engines.transformers import verify
from semmoe.plan import load_plan, save_plan

TWO = Topology(ep_size=2)
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


def refused(server: Server) -> str:
    """The log of a server that must end by itself."""
    try:
        with pytest.raises(RuntimeError, match=r"did not start \(exit code [^N]"):
            server.wait()
    finally:
        server.stop()
    return server.log


def test_a_plan_of_another_model_does_not_start(plans, tmp_path):
    plan = load_plan(plans["tp2"])
    save_plan(replace(plan, fingerprint=replace(plan.fingerprint, architecture_hash="0" * 64)), tmp_path / "other")
    assert "architecture_hash" in refused(Server(tmp_path, str(MODEL), "--plan", str(tmp_path / "other")))


def test_an_unknown_setting_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setenv("SEMMOE_PLANN", "x")
    assert "SEMMOE_PLANN is no setting" in refused(Server(tmp_path, str(MODEL)))


def test_experts_elsewhere_than_the_plan_says_do_not_start(plans, tmp_path, monkeypatch):
    """SGLang's own command, with the plan named and another placement."""
    placement = tmp_path / "contiguous.json"
    placement.write_text(json.dumps({"physical_to_logical_map": [list(range(32))] * 6}))
    for name, value in launch.environment(PluginSettings(plan=plans["tp2"]), TWO, True).items():
        monkeypatch.setenv(name, value)
    options = launch.command_line(launch.arguments(TWO, placement, 0, True))
    assert "lie elsewhere than the plan says" in refused(Server(tmp_path, str(MODEL), *options, plain=True))
