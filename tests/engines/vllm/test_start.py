"""Starts that do not fit."""

from serving import refused
from start_tests import StartTests
from vllm_server import VllmServer

from semmoe.cli.demo import MODEL
from semmoe.engines.hooks import cpu_patches
from semmoe.engines.vllm import targets

ALONE = ("--enforce-eager", "--enable-expert-parallel")


class TestVllm(StartTests):
    SERVER, ENGINE = VllmServer, "vllm"
    HOOKS = (*targets.HOOKS, targets.LOAD_MODEL_CPU, *cpu_patches("vllm").HOOKS)


def test_ranks_other_than_the_plans_do_not_start(plans, tmp_path, monkeypatch):
    """vLLM's own command, with the plan named and another topology."""
    monkeypatch.setenv("SEMMOE_PLAN", plans["tp2"])
    server = VllmServer(tmp_path, str(MODEL), *ALONE, plain=True)
    assert "the plan is for ep_size 2, attention tp" in refused(server)
