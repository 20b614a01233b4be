"""The real SGLang over HTTP, in every set-up, on a plan."""

from server_tests import ServerTests, started
from serving import cli
from sglang_server import SglangServer

from semmoe.cli.demo import MODEL

SET_UPS = {  # options of `semmoe serve`, SGLang's own
    "tp1": (["--ep-size", "1"], ()),
    "tp2, placed": (["--plan", "tp2", "--shuffle", "off"], ("--moe-a2a-backend", "none")),
    # Some of its requests are preempted in every third pass.
    "tp2, shuffled": (["--plan", "tp2"], ("--enable-mixed-chunk",),
                      {"SGLANG_TEST_RETRACT": "true"}),
    "dp2": (["--plan", "dp2"], ()),
    "tp4 dp2": (["--plan", "hybrid"], ()),
}  # fmt: skip


server = started(SglangServer, SET_UPS, costly=("tp1", "tp2, placed"))


class TestSglang(ServerTests):
    ACTIVE = "sglang 0.5.23"
    SCHEDULING = ("dp2", "tp4 dp2")
    RECORDING = ("tp1", "tp2, shuffled", "dp2")
    COUNTED = {"tp2, shuffled": 0.54, "dp2": 0.54, "tp4 dp2": 0.3}
    RANKS = {"tp1": 1, "tp4 dp2": 4}
    ROUTED = ("dp2",)
    KILLED = ("tp2, shuffled", "dp2")
    SWAPPED = {"tp2, shuffled": "tp2", "dp2": "dp2", "tp4 dp2": "hybrid"}
    PREEMPTED = ("tp2, shuffled",)


def test_serving_is_described(plans, capsys):
    cli("serve", str(MODEL), "--plan", plans["dp2"], "--dry-run", "--", "--dtype", "float32")
    said = capsys.readouterr()
    assert "-m sglang.launch_server" in said.out
    assert "--dtype float32" in said.out
    assert "SEMMOE_PLAN=" in said.err
