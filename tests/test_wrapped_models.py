"""Models that keep the sizes of their language part in `text_config`: fingerprint, import, apply and doctor."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_apply import failed
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.plan import load_plan

SIZES = ("vocab_size", "num_layers", "num_experts", "top_k", "hidden_size", "expert_size", "tokenizer_hash")


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory):
    """The shipped model as the language part of a model with images."""
    path = tmp_path_factory.mktemp("models") / "wrapped"
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL / name, path)
    inner = {"model.visual.merger.weight": torch.zeros(2, 2)}
    for name, tensor in load_file(MODEL / "model.safetensors").items():
        inner[name.replace("model.", "model.language_model.", 1)] = tensor
    save_file(inner, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((MODEL / "config.json").read_text()) | {"model_type": "qwen3_vl_moe_text"}
    outer = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"model_type": "qwen3_vl_moe"}}
    (path / "config.json").write_text(json.dumps(outer))
    return path


def test_sizes_are_those_of_the_language_part(wrapped):
    found, tiny = fingerprint_of(str(wrapped)), fingerprint_of(str(MODEL))
    assert {name: getattr(found, name) for name in SIZES} == {name: getattr(tiny, name) for name in SIZES}
    assert found.architecture_hash != tiny.architecture_hash


def test_a_map_becomes_a_plan_that_renumbers_the_experts(wrapped, tmp_path):
    experts = fingerprint_of(str(MODEL)).num_experts
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": list(reversed(range(experts)))}))
    made = run("import", tmp_path / "map.json", "--model", wrapped, "--ep-size", 4, "--out", tmp_path / "plan")
    assert made.exit_code == 0, made.output
    assert load_plan(tmp_path / "plan").fingerprint == replace(fingerprint_of(str(wrapped)), model="wrapped")
    applied = run("apply", tmp_path / "plan", "--model", wrapped, "--out", tmp_path / "relabelled")
    assert applied.exit_code == 0, applied.output
    before, after = (load_file(path / "model.safetensors") for path in (wrapped, tmp_path / "relabelled"))
    name = "model.language_model.layers.0.mlp.experts.{}.up_proj.weight"
    assert torch.equal(before[name.format(0)], after[name.format(experts - 1)])


def test_profiling_is_refused_before_the_work(wrapped, tmp_path):
    failed(run("profile", wrapped, "--limit", 1, "--out", tmp_path / "trace"), 2, "has no text-only form")
    assert not (tmp_path / "trace").exists()


def test_doctor_recommends_apply_only_where_it_can_relabel(wrapped, tmp_path):
    told = " ".join(run("doctor", "--model", wrapped).output.split())
    assert "give the engine a checkpoint made by `semmoe apply`" in told
    odd = tmp_path / "odd"
    shutil.copytree(wrapped, odd)
    tensors = load_file(odd / "model.safetensors")
    tensors["model.language_model.layers.0.mlp.experts.odd"] = torch.zeros(32)
    save_file(tensors, odd / "model.safetensors", metadata={"format": "pt"})
    told = " ".join(run("doctor", "--model", odd).output.split())
    assert "give the engine a checkpoint made by `semmoe apply`" not in told
    assert "`semmoe apply` cannot relabel it either: model.language_model.layers.0.mlp.experts.odd" in told
