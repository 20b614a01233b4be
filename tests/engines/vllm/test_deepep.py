"""vLLM's own DeepEP in high-throughput mode, over gloo by the stand-in for `deep_ep`: tokens, and rows that are sent.

vLLM's rows are bfloat16 there, and sums are rounded on other ways than without it, so that near-ties of the arg-max may
fall otherwise; what is compared is the same engine, vanilla and on a plan.
"""

import json
from pathlib import Path

from models import build
from two_ranks import HEADS, make_plan, on_two_ranks

STAND_IN = Path(__file__).parents[3] / "engines" / "deep-ep-cpu"


def run(model, prompts, folder, monkeypatch, plan=""):
    monkeypatch.syspath_prepend(str(STAND_IN))  # which the ranks' processes take over, in this test alone
    from deep_ep.counts import totals

    counts = folder / "counts"
    counts.mkdir(parents=True)
    variables = {"DEEP_EP_CPU_COUNTS": str(counts)} | ({"SEMMOE_PLAN": plan} if plan else {})
    options = {"dtype": "bfloat16", "all2all_backend": "deepep_high_throughput"}
    tokens = on_two_ranks(model, prompts, folder / "run", "dp2", variables, **options)
    return tokens, totals(counts)


def test_a_plan_is_served_through_vllms_own_deepep(texts, prompts, tmp_path, monkeypatch):
    """Fewer rows than in vanilla are sent, and ours are counted among them; the others are passes without requests."""
    model = build("qwen3_moe", tmp_path, **HEADS, hidden_size=256)  # a width that DeepEP takes as it is
    vanilla, before = run(model, prompts, tmp_path / "vanilla", monkeypatch)
    plan = make_plan(model, texts, tmp_path, "dp2", 2)
    planned, sent = run(model, prompts, tmp_path / "planned", monkeypatch, plan)
    same = [a == b for a, b in zip(vanilla, planned, strict=True)]
    assert sum(same) >= len(prompts) - 3
    assert 0 < sent["ranks"] < before["ranks"]
    assert sent["pairs"] == sent["nodes"] == 0
    samples = [s for path in (tmp_path / "planned" / "run").glob("activity-*.json")
               for s in json.loads(path.read_text())["samples"]]  # fmt: skip
    assert 0 < sum(s["value"] for s in samples if s["name"] == "remote_rows") <= sent["ranks"]
