"""`semmoe estimate` as people meet it: tables, JSON, refusals; a plan's own figures; what aiconfigurator prints."""

import json
import shutil
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from synthetic import random_trace
from test_estimate import config
from typer.testing import CliRunner

from semmoe.calibration import load_links
from semmoe.cli import app
from semmoe.estimate import outside
from semmoe.estimate.forecast import HOOKS
from semmoe.expectation import expect
from semmoe.plan import save_plan
from semmoe.results import EstimateFile
from semmoe.settings import QUICK, CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

DEEPSEEK = ["--ep-size", "64", "--num-nodes", "8", "--attention", "dp", "--links", "h200-400g"]
ROOFLINE = ["--performance", "roofline"]
QUICKLY = CoclusterSettings(**QUICK)


def estimate(*arguments):
    return CliRunner().invoke(app, ["estimate", *(str(a) for a in arguments)])


def told(*arguments):
    result = estimate(*arguments, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    EstimateFile.model_validate(found)
    return found


def refused(result, *words):
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert (result.exit_code, len(lines)) == (2, 1), result.output
    assert all(word in lines[0] for word in words), lines


@pytest.fixture
def model(tmp_path):
    return config(tmp_path)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A model of the sizes that `plan` is for."""
    sizes = {"num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2}
    return config(tmp_path_factory.mktemp("models"), "OLMoE-1B-7B", **sizes)


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan on made-up routing; beside it one that expects nothing."""
    trace = random_trace(0, requests=40)
    topology, settings = Topology.for_attention("dp", 4), SolveSettings(redundant_experts=4, cocluster=QUICKLY)
    solved = solve(trace, topology, settings)
    expected = expect(trace, topology, settings, ReplaySettings(batch_tokens=64))
    folder = tmp_path_factory.mktemp("plans")
    save_plan(replace(solved, expected=expected), folder / "plan")
    save_plan(solved, folder / "silent")
    return folder / "plan"


def test_parts_add_up_and_the_verdict_is_that_of_the_figures(model):
    found = told(model, *DEEPSEEK, *ROOFLINE, "--saving", 0.3, "--load", 1.5, "--redundant-experts", 64)
    for one in found["methods"].values():
        assert sum(one["decode_ms"].values()) - one["decode_hidden_ms"] == pytest.approx(one["tpot_ms"])
        assert sum(one["prefill_ms"].values()) - one["prefill_hidden_ms"] == pytest.approx(one["ttft_ms"])
        assert one["tokens_per_second_per_gpu"] == pytest.approx(128e3 / one["tpot_ms"])
        assert one["with_prefill_tokens_per_second_per_gpu"] < one["tokens_per_second_per_gpu"]
    tpot = {name: one["tpot_ms"] for name, one in found["methods"].items()}
    assert found["verdict"]["gain"] == pytest.approx(1 - tpot["plan"] / tpot["eplb"])
    assert found["verdict"]["worth_it"] == (found["verdict"]["gain"] >= 0.02)
    assert found["verdict"]["against"] == "eplb"
    assert found["break_even"]["bandwidth"]["when"] == "below"
    assert 0 < found["memory"]["kv_lost"] < 0.1
    assert set(found["labels"]["decode"]) == set(found["methods"]["plan"]["decode_ms"])


def test_a_table_says_all_that_people_ask(model):
    result = estimate(model, *DEEPSEEK, *ROOFLINE, "--saving", 0.3, "--redundant-experts", 64)
    assert result.exit_code == 0, result.output
    for words in ("DeepSeek-V3" if model.name == "DeepSeek-V3" else model.name, "vanilla", "eplb", "attention core",
                  "fitted", "extrapolated", "assumed", "worth it:", "pays below", "GB/s between nodes",
                  "of the KV cache is lost", "compute by roofline"):  # fmt: skip
        assert words in result.stdout
    assert max(map(len, result.stdout.split("Per method")[1].split("time per token")[0].splitlines())) <= 80


def test_without_a_plan_or_an_assumption_there_is_no_verdict(model):
    found = told(model / "config.json", *DEEPSEEK, *ROOFLINE)
    assert set(found["methods"]) == {"vanilla", "eplb"}
    assert found["verdict"] is found["break_even"] is None
    assert "no plan was given" in estimate(model, *DEEPSEEK, *ROOFLINE).stdout


def test_it_is_not_worth_it_where_overlap_hides_what_a_plan_saves(model):
    words = ["--ep-size", "128", "--num-nodes", "16", "--attention", "dp", "--links", "h800-400g", "--overlap"]
    found = told(model, *words, "--saving", 0.3, "--input-length", 4096, "--output-length", 1786)
    assert not found["verdict"]["worth_it"]
    assert "not worth it: communication is hidden behind compute" in found["verdict"]["sentence"]
    page = (Path(__file__).parents[1] / "docs" / "estimate.md").read_text(encoding="utf-8")
    assert found["verdict"]["sentence"] in page
    assert f"pays below {found['break_even']['bandwidth']['value']:.3g} GB/s between nodes (these have 47.2)" in page
    assert found["break_even"]["bandwidth"]["when"] == "below"
    assert set(found["labels"]["decode"].values()) == {"extrapolated", "nominal"}
    assert (
        "from 128 ranks on it estimates" in found["performance"]["reason"] or "h800" in found["performance"]["reason"]
    )


def test_with_attention_tp_a_plan_competes_with_expert_parallelism_without_all_to_all(small):
    found = told(small, "--saving", 0.3, "--batch", 1, *ROOFLINE)
    assert set(found["methods"]) == {"vanilla", "eplb", "plan", "all-reduce"}
    assert found["verdict"]["against"] == "all-reduce"
    assert "against expert parallelism without all-to-all" in found["verdict"]["sentence"]


def test_a_batch_that_does_not_fit_is_warned_of(model):
    result = estimate(model, *DEEPSEEK, *ROOFLINE, "--batch", 4096)
    assert "warning: this batch needs 10,240,000 tokens of KV cache" in result.stderr


def test_a_plan_says_its_own_traffic_and_load(plan, small):
    found = told(small, "--plan", plan, *ROOFLINE)
    expected = json.loads((plan / "plan.json").read_text())["expected"]
    methods, said = found["methods"], {"plan": expected, "vanilla": expected["others"]["linear"]}
    assert {one["label"] for one in methods.values()} == {"measured"}
    assert (found["settings"]["redundant_experts"], found["settings"]["ep_size"]) == (4, 4)
    links = load_links("h200-nvlink-ll")
    for name, figures in said.items():
        assert methods[name]["load"] == figures["load_max_over_mean"]
        moved = 128 * figures["rows_by_kind"]["per-pair"]["inside_node"] * (2048 + 2 * 8)
        seconds = moved / (links.inside_node.gigabytes_per_second * 1e9) + links.inside_node.dispatch_latency_us * 1e-6
        assert methods[name]["decode_ms"]["dispatch"] == pytest.approx(3e3 * seconds)


def test_a_plan_by_a_rival_is_its_own_rival(plan, small, tmp_path):
    trace, settings = random_trace(0, requests=40), SolveSettings(method="eplb", redundant_experts=4)
    topology = Topology.for_attention("dp", 4)
    expected = expect(trace, topology, settings, ReplaySettings(batch_tokens=64))
    save_plan(replace(solve(trace, topology, settings), expected=expected), tmp_path / "eplb")
    methods = told(small, "--plan", tmp_path / "eplb", *ROOFLINE)["methods"]
    for phase, total in (("decode_ms", "tpot_ms"), ("prefill_ms", "ttft_ms")):
        own = methods["plan"][phase].pop(HOOKS)
        assert methods["plan"][phase] == methods["eplb"][phase]
        assert methods["plan"][total] == pytest.approx(methods["eplb"][total] + own)


def test_a_plan_of_an_older_version_is_to_be_solved_again(plan, small, tmp_path):
    shutil.copytree(plan, tmp_path / "old")
    header = json.loads((plan / "plan.json").read_text())
    del header["expected"]["others"]["eplb"]["rows_by_kind"]
    (tmp_path / "old" / "plan.json").write_text(json.dumps(header))
    refused(estimate(small, "--plan", tmp_path / "old"), "does not say what eplb sends by kind", "solve it again")


def test_a_plan_of_another_model_or_without_a_forecast_is_refused(plan, small, model):
    refused(estimate(model, "--plan", plan), "the plan is for a model whose num_experts is 8, not 256")
    refused(estimate(small, "--plan", plan.parent / "silent"), "does not say what it expects")
    refused(estimate(small, "--plan", plan, "--ep-size", 8), "the plan is for ep_size 4, not 8")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--plan-load", "1.2"], "--plan-load has no effect here: there is no plan"),
        (["--redundant-experts", "3"], "ep_size 8 does not divide 35 experts"),
        (["--links", "pcie5"], "do not say what GPU they join: give --gpu h100"),
        (["--links", "h200-nvlink", "--num-nodes", "2"], "say nothing of several nodes"),
        (["--links", "smoke"], "no links called 'smoke'"),
        (["--decode-links", "smoke"], "no links called 'smoke'"),
        (["--gpu", "abacus"], "abacus"),
        (["--num-nodes", "3"], "num_nodes 3 does not divide"),
        (["--performance", "aiconfigurator"], "aiconfigurator cannot be used"),
    ],
)
def test_what_cannot_be_estimated_is_refused_in_one_line(words, said):
    refused(estimate("tiny", *words), said)


def test_options_that_a_plan_decides_are_refused(plan, small):
    for option, value in {"--saving": "0.3", "--load": "1.2", "--redundant-experts": "4"}.items():
        refused(estimate(small, "--plan", plan, option, value), f"{option} has no effect here: --plan decides it")


def test_a_model_that_is_not_there_is_refused(tmp_path):
    refused(estimate(tmp_path), "config.json is missing")
    refused(estimate(tmp_path / "absent"), "there is no directory")


def test_a_result_is_written_once(tmp_path):
    out = tmp_path / "estimate.json"
    assert estimate("tiny", *ROOFLINE, "--out", out).exit_code == 0
    EstimateFile.model_validate_json(out.read_text())
    refused(estimate("tiny", *ROOFLINE, "--out", out), "exists")


# aiconfigurator, by what it printed in version 0.12.0.

PRINTED = """
Performance Summary
  tpot                      52.536 ms
  {phase}_qkv_a_proj_gemm     408.771 ms  ######    1.6%  [silicon]
  {phase}_add_norm_1          149.500 ms  ######    0.6%  [empirical]
  {phase}_attention          7426.657 ms  ######   28.3%  [silicon]
  {phase}_gate_ffn1_gemm      448.576 ms   10.191 ms   31.1%  1.7%  [silicon]
  {phase}_moe_dispatch       3107.822 ms  ######   11.9%  [silicon]
  {phase}_moe                8072.579 ms  ######   30.8%  [{source}]
  {phase}_moe_combine        5666.829 ms  ######   21.6%  [silicon]
    {phase}_attention           silicon
"""
PROGRAM = """#!/bin/sh
if [ "$1" = version ]; then echo "aiconfigurator {version}"; exit; fi
echo "$@" >> {log}
case "$*" in *static_gen*) cat {generation};; *) cat {context};; esac
"""


@pytest.fixture
def installed(tmp_path, monkeypatch):
    """Puts a program that prints what aiconfigurator printed on the path; returns the file of its calls."""

    def install(version="0.12.0", printed=PRINTED):
        folder = tmp_path / "bin"
        folder.mkdir(exist_ok=True)
        for phase in ("generation", "context"):
            (folder / phase).write_text(printed.format(phase=phase, source="silicon"))
        program, log = folder / "aiconfigurator", folder / "calls"
        program.write_text(
            PROGRAM.format(version=version, log=log, generation=folder / "generation", context=folder / "context")
        )
        program.chmod(program.stat().st_mode | stat.S_IEXEC)
        monkeypatch.setenv("PATH", str(folder), prepend=":")
        return log

    return install


def test_parts_of_aiconfigurator_take_the_place_of_the_rooflines(model, installed):
    log = installed()
    found, plain = told(model, *DEEPSEEK), told(model, *DEEPSEEK, *ROOFLINE)
    decode, labels = found["methods"]["vanilla"]["decode_ms"], found["labels"]["decode"]
    assert found["performance"] == {"source": "aiconfigurator", "reason": None}
    assert decode["attention"] == pytest.approx(7426.657 / 499)
    assert (labels["attention"], labels["add norm 1"], labels["routed experts"]) == ("measured", "fitted", "fitted")
    for part in ("routed experts", "dispatch", "combine"):
        assert decode[part] == pytest.approx(plain["methods"]["vanilla"]["decode_ms"][part])
    assert found["methods"]["vanilla"]["prefill_ms"]["attention"] == pytest.approx(7426.657)
    calls = log.read_text().splitlines()
    assert len(calls) == 2
    assert "--system h200_sxm" in calls[0]
    assert "--ep 64 --etp 1 --batch-size 128 --isl 2000 --osl 500" in calls[0]


@pytest.mark.parametrize(
    ("version", "printed", "reason"),
    [
        ("0.13.1", PRINTED, "version 0.12.x is supported, not 0.13.1"),
        ("0.12.0", "error: no data\n", "says nothing of these passes: error: no data"),
        ("0.12.0", PRINTED.replace("28.3%  [silicon]", "28.3%  [estimated]"), "says that attention is 'estimated'"),
        ("0.12.0", PRINTED + "  {phase}_moe_overlap  9.0 ms  1%  [mixed]\n", "joins routed and shared experts"),
    ],
)
def test_where_aiconfigurator_says_nothing_the_roofline_does(model, installed, version, printed, reason):
    installed(version, printed)
    found = told(model, *DEEPSEEK)
    assert found["performance"]["source"] == "roofline"
    assert reason in found["performance"]["reason"]
    refused(estimate(model, *DEEPSEEK, "--performance", "aiconfigurator"), reason)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--ep-size", "128", "--num-nodes", "16", "--attention", "dp"], "from 128 ranks on it estimates"),
        (["--ep-size", "16", "--num-nodes", "2", "--attention", "tp"], "attention dp only"),
        ([*DEEPSEEK, "--overlap", "--batch", "127", "--prompts", "2"], "the batch or the prompts are odd"),
        ([*DEEPSEEK, "--gpu", "h800"], "no tables of the h800"),
    ],
)
def test_aiconfigurator_is_not_asked_what_it_cannot_say(model, installed, words, reason):
    log = installed()
    assert reason in told(model, *words)["performance"]["reason"]
    assert not log.exists()


def test_halves_of_a_batch_are_asked_for_where_they_take_turns(model, installed):
    log = installed()
    told(model, *DEEPSEEK, "--overlap", "--prompts", "2")
    assert "--batch-size 64 " in log.read_text()


def test_an_answer_that_does_not_come_ends_the_wait(monkeypatch):
    monkeypatch.setattr(outside, "PROGRAM", "sleep")
    monkeypatch.setattr(outside, "TIMEOUT", 0.05)
    with pytest.raises(ValueError, match="did not answer"):
        outside._run(["5"])
