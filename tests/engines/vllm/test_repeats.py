"""Answers in the engine's default type repeat on a plan without copies, where each expert is summed on one rank."""

from repeat_tests import different_answers
from vllm_server import VllmServer

from semmoe.demo import MODEL
from semmoe.plan import load_plan


def test_answers_repeat_without_copies_at_changing_concurrency(plans, prompts, tmp_path):
    assert load_plan(plans["dp2 alone"]).placement.redundant_experts == 0
    server = VllmServer(tmp_path, str(MODEL), "--plan", plans["dp2 alone"], engine=("--dtype", "auto"))
    try:
        assert "bfloat16" in server.wait().log
        assert different_answers(server, prompts[4:20]) == []
        assert server.counters()["scheduled_requests plan"] >= 7 * 16
    finally:
        server.stop()
