"""vLLM's own DeepEP, over gloo by the stand-in for `deep_ep`: tokens, and rows that are sent.

vLLM's rows are bfloat16 there, and sums are rounded on other ways than without it, so that near-ties of the arg-max may
fall otherwise; what is compared is the same engine, vanilla and on a plan.
"""

import json
from pathlib import Path

import pytest
from models import build
from two_ranks import HEADS, make_plan, on_two_ranks

STAND_IN = Path(__file__).parents[3] / "engines" / "deep-ep-cpu"
HIGH, LOW = "deepep_high_throughput", "deepep_low_latency"
SENT, COUNTED = {HIGH: "ranks", LOW: "pairs"}, {HIGH: "remote_rows", LOW: "pairs"}  # by the stand-in, and by us
WIDTHS = {HIGH: 256, LOW: 2048}  # that a mode takes as they are


def run(model, prompts, folder, monkeypatch, backend, plan=""):
    monkeypatch.syspath_prepend(str(STAND_IN))  # which the ranks' processes take over, in this test alone
    from deep_ep.counts import totals

    counts = folder / "counts"
    counts.mkdir(parents=True)
    variables = {"DEEP_EP_CPU_COUNTS": str(counts)} | ({"SEMMOE_PLAN": plan} if plan else {})
    options = {"dtype": "bfloat16", "all2all_backend": backend}
    tokens = on_two_ranks(model, prompts, folder / "run", "dp2", variables, **options)
    return tokens, totals(counts)


@pytest.mark.parametrize(
    "backend", [pytest.param(HIGH, marks=pytest.mark.costly), pytest.param(LOW, marks=pytest.mark.families)]
)
def test_a_plan_is_served_through_vllms_own_deepep(backend, texts, prompts, tmp_path, monkeypatch):
    """Fewer rows than in vanilla are sent, and ours are counted among them; the others are passes without requests."""
    model = build("qwen3_moe", tmp_path, **HEADS, hidden_size=WIDTHS[backend])
    vanilla, before = run(model, prompts, tmp_path / "vanilla", monkeypatch, backend)
    plan = make_plan(model, texts, tmp_path, "dp2", 2)
    planned, sent = run(model, prompts, tmp_path / "planned", monkeypatch, backend, plan)
    same = [a == b for a, b in zip(vanilla, planned, strict=True)]
    assert sum(same) >= len(prompts) - 3
    assert 0 < sent[SENT[backend]] < before[SENT[backend]]
    assert {kind for kind, rows in sent.items() if rows} == {SENT[backend]}
    samples = [s for path in (tmp_path / "planned" / "run").glob("activity-*.json")
               for s in json.loads(path.read_text())["samples"]]  # fmt: skip
    ours = [s["value"] for s in samples if s["name"] == COUNTED[backend] and s["labels"].get("local") != "true"]
    assert 0 < sum(ours) <= sent[SENT[backend]]
