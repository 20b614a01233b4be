"""The demo end to end: a real model, real text that it never saw, real processes; and what it promises."""

import json
import sys
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from semmoe.cli import app, tables
from semmoe.cli.demo import MODEL, demo_prompts, run_demo
from semmoe.costs.payoff import BATCHES, LINKS, MODELS, measured, payoffs
from semmoe.settings import DemoSettings
from semmoe.traces.texts import HELD_OUT

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(1500)]  # its four ranks may share two cores


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def made(kept):
    outcome = CliRunner().invoke(app, ["demo", "--json", "--out", str(kept)])
    assert outcome.exit_code == 0, outcome.output
    made = json.loads(outcome.stdout)
    assert made["report"] == str(kept / "report.html")
    return made


@pytest.fixture(scope="module")
def result(made):
    return {row["name"]: row for row in made["set_ups"]}


def test_outputs_are_identical_in_all_five_set_ups(result):
    assert len(result) == 5
    assert all(row["identical"] for row in result.values())


def test_attention_tp_finds_experts_at_home_1_6_times_as_often(result):
    vanilla, planned = result["attention-TP, vanilla"], result["attention-TP, on the plan"]
    assert planned["lar"] >= 1.6 * vanilla["lar"]
    assert vanilla["lar"] == pytest.approx(0.25, abs=0.02)


@pytest.mark.parametrize("mode", ["DP", "TP"])
def test_the_plan_sends_fewer_all_to_all_bytes_in_both_modes(result, mode):
    vanilla, planned = result[f"attention-{mode}, vanilla"], result[f"attention-{mode}, on the plan"]
    assert planned["all_to_all_bytes"] < vanilla["all_to_all_bytes"]
    assert planned["total_bytes"] < vanilla["total_bytes"]


def test_without_all_to_all_the_plan_still_sends_less_in_all(result):
    assert result["attention-TP, on the plan"]["total_bytes"] < result["attention-TP, all-reduce"]["total_bytes"]
    assert result["attention-TP, all-reduce"]["all_to_all_bytes"] == 0


def test_where_a_plan_pays_follows_from_what_the_demo_counted(result, made):
    found = {(o["attention"], o["links"], o["model"], o["batch_tokens"]): o for o in made["payoffs"]}
    assert len(found) == len(made["payoffs"]) == 2 * len(LINKS) * len(MODELS) * len(BATCHES)
    run = measured("tp", result["attention-TP, vanilla"], result["attention-TP, on the plan"], ep_size=4)
    assert 0 < run.remote_share < 1
    for one in payoffs(run):
        assert found[one["attention"], one["links"], one["model"], one["batch_tokens"]] == one
    assert {one["worth_it"] for one in made["payoffs"]} == {True, False}


def test_the_table_of_payoffs_says_no_where_a_plan_is_not_worth_it(made):
    columns, rows = tables.payoffs(made["payoffs"])
    assert columns[:2] == ["attention, links", "Qwen3-30B\nA3B\n1,024"]
    assert [row[0] for row in rows] == [f"{mode}, {links}" for mode in ("DP", "TP") for links in LINKS]
    cells = [cell for row in rows for cell in row[1:]]
    said = [f"{one['gain']:.0%}" if one["worth_it"] else "no" for one in made["payoffs"]]
    assert cells == said


def test_the_demo_ends_with_a_report_of_all_that_it_did(result, kept):
    names = {"demo.json", "plan-dp", "plan-tp", "report.html", "trace"}
    assert {path.name for path in kept.iterdir()} == names
    written = json.loads(CliRunner().invoke(app, ["report", str(kept), "--json"]).stdout)
    assert [entry["file"] for entry in written["left_out"]] == ["trace"]
    assert written["bytes"] <= 2_000_000
    for found, mode in zip(written["verdicts"], ("DP", "TP"), strict=True):
        vanilla, planned = result[f"attention-{mode}, vanilla"], result[f"attention-{mode}, on the plan"]
        saved = 1 - planned["all_to_all_bytes"] / vanilla["all_to_all_bytes"]
        assert found["verdict"] in ("yes", "no")
        assert f"{saved:.1%}".removesuffix("%") in found["sentences"][1]
        assert "outputs are identical" in found["sentences"][1]


def test_without_jinja_the_demo_says_how_to_get_a_report(tmp_path, monkeypatch):
    from semmoe.cli.online import _demo_report

    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert _demo_report(tmp_path, tmp_path) is None


def test_demo_prompts_are_held_out_and_profile_and_evaluation_share_no_text():
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    profile, evaluation = demo_prompts(DemoSettings(), load_tokenizer(str(MODEL)))
    assert len(profile) == DemoSettings().profile_prompts
    assert len(evaluation) == DemoSettings().generate_prompts
    assert not {tuple(p) for p in profile} & {tuple(p) for p in evaluation}
    card = json.loads((MODEL / "training.json").read_text())
    assert card["held_out_documents"] == HELD_OUT


def test_a_demo_leaves_a_page_alone_unless_it_is_told_to_keep_more(tmp_path, monkeypatch):
    def small(settings, *rest):
        return run_demo(replace(settings, profile_prompts=24, generate_prompts=4, max_new_tokens=2), *rest)

    monkeypatch.setattr("semmoe.cli.online.run_demo", small)
    monkeypatch.chdir(tmp_path)
    outcome = CliRunner().invoke(app, ["demo", "--json", "--ep-size", "2"])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["report"] == "semmoe-demo/report.html"
    assert [path.name for path in (tmp_path / "semmoe-demo").iterdir()] == ["report.html"]


def test_the_shipped_model_predicts_text_better_than_a_unigram_model_and_routes_soundly():
    card = json.loads((MODEL / "training.json").read_text())
    for domain, figures in card["held_out"].items():
        assert figures["loss"] < figures["unigram"] - 1.0, domain
    assert len(card["layers"]) >= 6
    for layer in card["layers"]:
        assert 0.8 < layer["entropy"] < 0.9999  # neither collapsed nor uniform
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000
