"""SGLang's own DeepEP dispatchers, over gloo by the stand-in for `deep_ep`: tokens, and rows against our counters."""

import json
from collections import Counter
from pathlib import Path

import pytest
from offline import completed

from semmoe.cli.demo import MODEL
from semmoe.plan import load_plan

STAND_IN = Path(__file__).parents[3] / "engines" / "deep-ep-cpu"


V1 = ("--deepep-dispatcher-output-dtype", "bf16", "--deepep-mode")
V2 = ("--moe-a2a-backend", "deepep_v2", "--deepep-v2-mode")


def run(prompts, plan, folder, monkeypatch, mode, node_size=0, words=V1):
    """Tokens of every prompt, the rows that the stand-in sent, and what our counters say of all ranks."""
    counts = folder / "counts"
    counts.mkdir()
    monkeypatch.syspath_prepend(str(STAND_IN))  # which SGLang's processes take over, in these tests alone
    from deep_ep.counts import totals

    monkeypatch.setenv("DEEP_EP_CPU_ANY", "1")
    monkeypatch.setenv("DEEP_EP_CPU_COUNTS", str(counts))
    monkeypatch.setenv("DEEP_EP_CPU_NODE_SIZE", str(node_size or ""))
    where = (str(MODEL), load_plan(plan).topology, folder / "control", plan, (*words, mode))
    return completed([prompts], *where, fresh=True), totals(counts), counted(folder / "control")


def counted(folder):
    """By name, and by name and whether pairs are local."""
    out = Counter()
    for path in folder.glob("activity-rank-*.json"):
        for sample in json.loads(path.read_text())["samples"]:
            out[sample["name"], sample["labels"].get("local", "")] += sample["value"]
    return out


def test_low_latency_sends_a_row_for_each_pair_that_is_not_local(plans, prompts, reference, tmp_path, monkeypatch):
    """With tokens that are shuffled."""
    tokens, sent, ours = run(prompts, plans["tp2"], tmp_path, monkeypatch, "low_latency")
    assert tokens == reference
    assert sent["pairs"] == ours["pairs", "false"] > 0
    assert sent["ranks"] == sent["nodes"] == 0
    assert not any(kind == "degraded" for kind, _ in ours)


def test_normal_mode_sends_a_row_to_each_rank(plans, prompts, reference, tmp_path, monkeypatch):
    """With copies, and requests that are scheduled."""
    tokens, sent, ours = run(prompts, plans["dp2"], tmp_path, monkeypatch, "normal")
    assert tokens == reference
    assert sent["ranks"] == ours["remote_rows", ""] > 0
    assert sent["pairs"] == sent["nodes"] == 0


@pytest.mark.costly
def test_normal_mode_sends_a_row_to_each_node_and_forwards_it(plans, prompts, reference, tmp_path, monkeypatch):
    tokens, sent, ours = run(prompts, plans["hybrid"], tmp_path, monkeypatch, "normal", node_size=2)
    assert tokens == reference
    assert sent["nodes"] == ours["node_rows", ""] > 0


@pytest.mark.families
def test_prompts_in_normal_mode_and_decoding_in_low_latency(plans, prompts, reference, tmp_path, monkeypatch):
    tokens, sent, _ = run(prompts, plans["dp2"], tmp_path, monkeypatch, "auto")
    assert tokens == reference
    assert sent["pairs"] > 0
    assert sent["ranks"] > 0


@pytest.mark.costly
def test_v2_sends_a_row_to_each_rank(plans, prompts, reference, tmp_path, monkeypatch):
    """Prompts and decoding in its expanded layout, with tokens that are shuffled."""
    tokens, sent, ours = run(prompts, plans["tp2"], tmp_path, monkeypatch, "direct", words=V2)
    assert tokens == reference
    assert sent["ranks"] == ours["remote_rows", ""] > 0
    assert sent["pairs"] == sent["nodes"] == 0


@pytest.mark.families
def test_v2_in_hybrid_mode_sends_a_row_to_each_node(plans, prompts, reference, tmp_path, monkeypatch):
    """With prompts' rows as they came. A rank without a prompt sends a row of nobody's beside others' prompts."""
    monkeypatch.setenv("SGLANG_DEEPEP_V2_ENABLE_PREFILL_EXPAND", "0")
    tokens, sent, ours = run(prompts, plans["hybrid"], tmp_path, monkeypatch, "hybrid", 2, V2)
    assert tokens == reference
    assert sent["nodes"] >= ours["node_rows", ""] > 0
