"""The demo end to end: a real model, real text that it never saw, real processes; and what it promises."""

import json

import pytest
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.demo import MODEL, demo_prompts
from semmoe.settings import DemoSettings
from semmoe.texts import HELD_OUT

pytestmark = pytest.mark.dist


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    outcome = CliRunner().invoke(app, ["demo", "--json", "--keep", str(tmp_path_factory.mktemp("demo"))])
    assert outcome.exit_code == 0, outcome.output
    return {row["name"]: row for row in json.loads(outcome.stdout)["set_ups"]}


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


def test_demo_prompts_are_held_out_and_profile_and_evaluation_share_no_text():
    from semmoe.engines.transformers.model import load_tokenizer

    profile, evaluation = demo_prompts(DemoSettings(), load_tokenizer(str(MODEL)))
    assert len(profile) == DemoSettings().profile_prompts
    assert len(evaluation) == DemoSettings().generate_prompts
    assert not {tuple(p) for p in profile} & {tuple(p) for p in evaluation}
    card = json.loads((MODEL / "training.json").read_text())
    assert card["held_out_documents"] == {domain: list(names) for domain, names in HELD_OUT.items()}


def test_the_demo_takes_a_dataset_of_ones_own(tmp_path):
    from semmoe.dataset import load_dataset
    from semmoe.engines.transformers.model import load_tokenizer

    dataset = tmp_path / "own.jsonl"
    dataset.write_text(
        "".join(json.dumps({"prompt": f"class Shape{i}:\n    sides = {i}\n" * 4}) + "\n" for i in range(8))
    )
    outcome = CliRunner().invoke(app, ["demo", "--json", "--ep-size", "2", "--dataset", str(dataset)])
    assert outcome.exit_code == 0, outcome.output
    assert json.loads(outcome.stdout)["prompts"] == 2
    profile, evaluation = demo_prompts(DemoSettings(), load_tokenizer(str(MODEL)), dataset)
    assert (len(profile), len(evaluation)) == (6, 2)
    dataset.write_text(json.dumps({"prompt": "alone"}))
    assert len(load_dataset(dataset)) == 1
    outcome = CliRunner().invoke(app, ["demo", "--dataset", str(dataset)])
    assert outcome.exit_code == 2
    assert "too few" in outcome.stderr


def test_the_shipped_model_predicts_text_better_than_a_unigram_model_and_routes_soundly():
    card = json.loads((MODEL / "training.json").read_text())
    for domain, figures in card["held_out"].items():
        assert figures["loss"] < figures["unigram"] - 1.0, domain
    assert len(card["layers"]) >= 6
    for layer in card["layers"]:
        assert 0.8 < layer["entropy"] < 0.9999  # neither collapsed nor uniform
    assert (MODEL / "model.safetensors").stat().st_size <= 16_000_000
