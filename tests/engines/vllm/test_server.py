"""The real vLLM over HTTP, in every set-up, on a plan."""

from server_tests import ServerTests, started
from serving import cli
from vllm_server import VllmServer

from semmoe.cli.demo import MODEL

SET_UPS = {  # options of `semmoe serve`, vLLM's own
    # A cache of 640 tokens, which 16 requests do not fit in; recorded as in CUDA graphs.
    "tp2, shuffled": (["--plan", "tp2"],
                      ("--num-gpu-blocks-override", "20", "--max-model-len", "512"),
                      {"SEMMOE_RECORD": "1"}),
    # Ranks agree to pause after 4 passes in place of 16, and schedule for themselves, as by default on a GPU.
    "dp2": (["--plan", "dp2"], ("--dp-sync-interval", "4", "--distributed-executor-backend",
                                "vllm.v1.executor.uniproc_executor.UniProcExecutor")),
    "tp2 dp2": (["--plan", "hybrid"], ()),
}  # fmt: skip


server = started(VllmServer, SET_UPS)


class TestVllm(ServerTests):
    ACTIVE = "vllm 0.32.0"
    SCHEDULING = ("dp2", "tp2 dp2")
    RECORDING = ("tp2, shuffled", "dp2")
    COUNTED = {"tp2, shuffled": 0.54, "dp2": 0.54, "tp2 dp2": 0.3}
    RANKS = {"tp2 dp2": 4}
    ROUTED = ("dp2",)
    KILLED = ("dp2",)
    SWAPPED = {"tp2, shuffled": "tp2", "dp2": "dp2"}
    NEWCOMERS = ("dp2",)
    PREEMPTED = ("tp2, shuffled",)


def test_serving_is_described(plans, capsys):
    cli("serve", str(MODEL), "--engine", "vllm", "--plan", plans["dp2"], "--dry-run", "--", "--dtype", "float32")
    said = capsys.readouterr()
    assert "-m vllm.entrypoints.cli.main serve" in said.out
    assert "--data-parallel-size 2 --enable-expert-parallel" in said.out
    assert "SEMMOE_PLAN=" in said.err
