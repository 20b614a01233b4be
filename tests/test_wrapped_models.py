"""Models that keep the sizes of their language part in `text_config`: fingerprint, import, apply and doctor."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
import transformers
from models import COMMON, CONFIGS
from safetensors.torch import load_file, save_file
from test_apply import failed
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.plan import load_plan

VISION = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 32, "out_hidden_size": 64,
          "deepstack_visual_indexes": [0], "num_position_embeddings": 16}  # fmt: skip
TEXT = {**COMMON, "num_hidden_layers": 3, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 64}
MODELS = {
    "qwen3_vl_moe": lambda: transformers.Qwen3VLMoeConfig(
        text_config=TEXT | {"num_experts": 8, "moe_intermediate_size": 32, "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}, vision_config=VISION,
    ),
    "llama4": lambda: transformers.Llama4Config(
        text_config=TEXT | {"num_hidden_layers": 4, "num_experts_per_tok": 1, "num_local_experts": 8,
                            "intermediate_size_mlp": 64, "interleave_moe_layer_step": 2},
        vision_config={"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2,
                       "image_size": 28, "patch_size": 14, "vision_output_dim": 64, "projector_input_dim": 64,
                       "projector_output_dim": 64},
    ),
    "kimi_k25": lambda: transformers.Kimi_K25Config(
        text_config=CONFIGS["kimi_k2"]().to_dict(),
        vision_config={"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2},
    ),
}  # fmt: skip
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
    outer = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": VISION}
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


def test_weights_that_are_missing_are_refused_before_the_work(wrapped, tmp_path):
    failed(run("profile", wrapped, "--limit", 1, "--out", tmp_path / "trace"), 2, "tensors are missing, such as")
    assert not (tmp_path / "trace").exists()


def build(kind, path):
    """A whole model with images, random; transformers 5.24 saves Kimi-K2.5's decoder layers under another name."""
    torch.manual_seed(0)
    transformers.AutoModelForImageTextToText.from_config(MODELS[kind]()).save_pretrained(path)
    load_tokenizer(str(MODEL)).save_pretrained(path)
    tensors = load_file(path / "model.safetensors")
    named = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): t for name, t in tensors.items()
    }
    save_file(named, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.parametrize("kind", ["qwen3_vl_moe", "kimi_k25"])
def test_a_model_with_images_is_profiled_solved_relabelled_and_generates_the_same(kind, tmp_path):
    model = build(kind, tmp_path / "model")
    for words in (
        ["profile", model, "--limit", 8, "--out", tmp_path / "trace"],
        [
            "solve",
            tmp_path / "trace",
            "--ep-size",
            2,
            "--attention",
            "dp",
            "--method",
            "eplb",
            "--out",
            tmp_path / "plan",
        ],
        ["apply", tmp_path / "plan", "--model", model, "--out", tmp_path / "new"],
    ):
        result = run(*words)
        assert result.exit_code == 0, result.output
    ids = torch.arange(1, 33)[None]
    old, new = (load_model(str(path))(input_ids=ids).logits for path in (model, tmp_path / "new"))
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4 * old.abs().max().item())


def test_llama_4_is_relabelled_and_its_profile_refused(tmp_path):
    """transformers computes every expert for every token there, so that no module sees a choice of experts."""
    model = build("llama4", tmp_path / "model")
    failed(run("profile", model, "--limit", 1, "--out", tmp_path / "trace"), 2, "no MoE layer that semmoe knows")
    (tmp_path / "map.json").write_text(json.dumps({"physical_to_logical_map": list(reversed(range(8)))}))
    made = run("import", tmp_path / "map.json", "--model", model, "--ep-size", 4, "--out", tmp_path / "plan")
    assert made.exit_code == 0, made.output
    assert run("apply", tmp_path / "plan", "--model", model, "--out", tmp_path / "new").exit_code == 0
    load = transformers.AutoModelForImageTextToText.from_pretrained
    ids = torch.arange(1, 33)[None]
    old, new = (
        load(path, dtype=torch.float32).language_model(input_ids=ids).logits for path in (model, tmp_path / "new")
    )
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4 * old.abs().max().item())


def test_an_engine_s_support_is_looked_up_by_the_whole_model(tmp_path):
    """Kimi-K2.5's language model is DeepSeek-V3, which both engines serve, but it has another class there."""
    told = " ".join(run("doctor", "--model", build("kimi_k25", tmp_path / "model")).output.split())
    assert "models of type 'kimi_k25' were never run on a plan on vllm" in told


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
