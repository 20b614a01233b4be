"""Starts that do not fit."""

import json

from serving import refused
from sglang_server import SglangServer
from start_tests import StartTests

from semmoe.cli.demo import MODEL
from semmoe.engines.hooks import cpu_patches
from semmoe.engines.launch import command_line
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import launch, targets
from semmoe.topology import Topology

TWO = Topology(ep_size=2)


class TestSglang(StartTests):
    SERVER, ENGINE = SglangServer, "sglang"
    HOOKS = (*targets.HOOKS, *cpu_patches("sglang").HOOKS)


def test_experts_elsewhere_than_the_plan_says_do_not_start(plans, tmp_path, monkeypatch):
    """SGLang's own command, with the plan named and another placement."""
    placement = tmp_path / "contiguous.json"
    placement.write_text(json.dumps({"physical_to_logical_map": [list(range(32))] * 6}))
    for name, value in launch.environment(PluginSettings(plan=plans["tp2"]), TWO, True).items():
        monkeypatch.setenv(name, value)
    options = command_line(launch.arguments(TWO, placement, 0, True))
    assert "lie elsewhere than the plan says" in refused(SglangServer(tmp_path, str(MODEL), *options, plain=True))
