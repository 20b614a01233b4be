"""Families that no test has run, served with `--untried`: they prove themselves, or end with the reason."""

import pytest
from architectures import of_vllm
from models import UNTRIED as FAMILIES
from models import build, build_with_images
from two_ranks import HEADS, counted, make_plan, on_two_ranks

from semmoe.engines.support import ARCHITECTURES
from semmoe.engines.support import FAMILIES as TRIED

pytestmark = pytest.mark.timeout(600)
UNTRIED = {"SEMMOE_UNTRIED": "1"}
# vLLM runs FlexOlmo by transformers' code, with its own fused experts.
NAMES = [*FAMILIES, "qwen3_next"]
SERVED = [pytest.param(name, marks=() if name == "granitemoeshared" else pytest.mark.families) for name in NAMES]
# What vLLM's linear attention on a CPU takes.
LINEAR = HEADS | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
CHANGES = {"qwen3_next": LINEAR, "qwen3_5_moe_text": LINEAR}
TYPES = {"qwen3_next": "bfloat16", "qwen3_5_moe_text": "bfloat16"}


@pytest.mark.parametrize("family", SERVED)
def test_a_family_that_proves_itself_answers_as_without_a_plan(family, texts, prompts, tmp_path):
    assert family not in TRIED["vllm"]
    if family == "qwen3_5_moe_text":
        pytest.importorskip("torchvision")  # by vLLM's module of Qwen3.5
    model, dtype = build(family, tmp_path, **CHANGES.get(family, HEADS)), TYPES.get(family, "float32")
    plan = make_plan(model, texts, tmp_path, "dp2", 2)
    planned = on_two_ranks(model, prompts, tmp_path / "planned", "dp2", UNTRIED | {"SEMMOE_PLAN": plan}, dtype=dtype)
    assert planned == on_two_ranks(model, prompts, tmp_path / "vanilla", "dp2", dtype=dtype)
    assert counted(tmp_path / "planned", "remote_rows") > 0


@pytest.mark.families
def test_a_model_with_images_answers_prompts_of_text_as_without_a_plan(texts, prompts, tmp_path):
    pytest.importorskip("torchvision")  # by vLLM's module of Qwen3-VL
    model = build_with_images(tmp_path)
    given = UNTRIED | {"SEMMOE_PLAN": make_plan(model, texts, tmp_path, "dp2", 2)}
    planned = on_two_ranks(model, prompts, tmp_path / "planned", "dp2", given)
    assert planned == on_two_ranks(model, prompts, tmp_path / "vanilla", "dp2")
    assert counted(tmp_path / "planned", "remote_rows") > 0


@pytest.mark.parametrize(
    ("fault", "attention", "reason"),
    [
        ("weights", "dp2", "differ from the engine's without a plan"),
        ("router", "dp2", "does not prove itself: in the first pass hooks ran: routers 2 of 3 times"),
        pytest.param("", "tp2", "prove themselves in attention-DP alone", marks=pytest.mark.families),
    ],
)
def test_what_is_not_proven_is_refused_with_the_reason(fault, attention, reason, texts, prompts, tmp_path):
    model = build("granitemoeshared", tmp_path, **HEADS)
    given = UNTRIED | {"SEMMOE_PLAN": make_plan(model, texts, tmp_path, attention, 2)}
    with pytest.raises(AssertionError):
        on_two_ranks(model, prompts[:4], tmp_path / "planned", attention, given, fault=fault)
    assert reason in (tmp_path / "planned" / "fatal.txt").read_text()


@pytest.mark.families
def test_tensors_that_hold_all_experts_of_a_layer_are_refused(texts, prompts, tmp_path, monkeypatch):
    """vLLM's loader of Llama 4 takes a rank's experts out of such tensors by itself."""
    monkeypatch.setattr("models.SPLIT", set())
    model = build("llama4_text", tmp_path, **HEADS)
    given = UNTRIED | {"SEMMOE_PLAN": make_plan(model, texts, tmp_path, "dp2", 0)}
    with pytest.raises(AssertionError):
        on_two_ranks(model, prompts[:4], tmp_path / "planned", "dp2", given)
    assert "holds all experts of a layer at once" in (tmp_path / "planned" / "fatal.txt").read_text()


def test_every_architecture_that_can_hold_experts_has_a_row():
    assert set(ARCHITECTURES["vllm"]) == of_vllm()
