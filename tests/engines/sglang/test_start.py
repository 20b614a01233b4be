"""Starts that do not fit."""

import json
from pathlib import Path

import pytest
from serving import refused
from sglang_server import SglangServer
from start_tests import StartTests

from semmoe.cli.demo import MODEL
from semmoe.engines.hooks import cpu_patches
from semmoe.engines.launch import command_line
from semmoe.engines.sglang import launch, targets
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.transformers import verify
from semmoe.topology import Topology

TWO = Topology(ep_size=2)
EMULATED = Path(__file__).parents[1] / "emulated"  # a plug-in that stands in for GPUs' memory


class TestSglang(StartTests):
    SERVER, ENGINE = SglangServer, "sglang"
    HOOKS = (*targets.HOOKS, *cpu_patches("sglang").HOOKS)


def test_experts_elsewhere_than_the_plan_says_do_not_start(plans, tmp_path, monkeypatch):
    """SGLang's own command, with the plan named and another placement."""
    placement = tmp_path / "contiguous.json"
    placement.write_text(json.dumps({"physical_to_logical_map": [list(range(32))] * 6}))
    for name, value in launch.environment(SglangSettings(plan=plans["tp2"]), TWO, True).items():
        monkeypatch.setenv(name, value)
    options = command_line(launch.arguments(TWO, placement, 0, True))
    assert "lie elsewhere than the plan says" in refused(SglangServer(tmp_path, str(MODEL), *options, plain=True))


@pytest.mark.costly
@pytest.mark.parametrize(
    ("plan", "why"),
    [("tp2", "ranks read each other's buffers on GPUs only, not on cpu"), ("dp2", "needs a plan that shuffles tokens")],
)
def test_a_fused_shuffle_that_cannot_be_does_not_start(plans, tmp_path, monkeypatch, plan, why):
    monkeypatch.setenv("SEMMOE_FUSED", "1")
    log = refused(SglangServer(tmp_path, str(MODEL), "--plan", plans[plan]))
    assert any("SEMMOE_FUSED=1" in line and why in line for line in log.splitlines())


@pytest.mark.costly
def test_the_fused_shuffle_gives_the_plain_models_tokens(plans, model, prompts, reference, tmp_path, monkeypatch):
    """Its kernels in Triton's interpreter, its buffers in files."""
    monkeypatch.setenv("SEMMOE_FUSED", "1")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    server = SglangServer(tmp_path, str(MODEL), "--plan", plans["tp2"], path=str(EMULATED))
    try:
        outputs = server.wait().complete(prompts[:8])
    finally:
        server.stop()
    assert "fused true" in server.log
    assert verify.compare_outputs(model, prompts[:8], reference[:8], outputs).holds
