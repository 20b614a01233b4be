"""Weights loaded again into an engine that is up, as reinforcement learning does, go where the plan has them.

Held against experts' weights after a start: on a CPU vLLM 0.32.0 answers wrongly after a reload, without semmoe too.
"""

from pathlib import Path

from models import build
from safetensors.torch import load_file, save_file
from test_families import HEADS
from two_ranks import experts, make_plan, on_two_ranks


def test_experts_of_another_checkpoint_go_to_their_slots(texts, prompts, tmp_path):
    first, other = (build("qwen3_moe", tmp_path / name, **HEADS) for name in ("first", "other"))
    rewrite(other)
    given = {"SEMMOE_PLAN": make_plan(first, texts, tmp_path, "tp2", 2)}
    reload = ("collective_rpc", "reload_weights", None, [], {"weights_path": other})
    on_two_ranks(first, prompts[:4], tmp_path / "again", variables=given, calls=(reload,))
    on_two_ranks(other, prompts[:4], tmp_path / "fresh", variables=given)
    for (before, after), (expected,) in zip(experts(tmp_path / "again"), experts(tmp_path / "fresh"), strict=True):
        assert after == expected != before


def rewrite(checkpoint: str) -> None:
    """Other weights under the same names."""
    path = Path(checkpoint) / "model.safetensors"
    save_file({name: tensor.flip(0).contiguous() for name, tensor in load_file(path).items()}, path, {"format": "pt"})
