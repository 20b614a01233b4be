"""A model with images, served with `--untried`: prompts of text and prompts with an image."""

import functools
import json

import numpy as np
import pytest
import torch
from models import build_with_images
from offline import completed_with_images
from PIL import Image
from test_families import planned

from semmoe.topology import Topology

pytestmark = [pytest.mark.timeout(900), pytest.mark.families]
TWO = Topology(ep_size=2, dp_size=2)
# SGLang's processors of images import Qwen3.5, whose module names these kernels of a CPU with AMX.
KERNELS = (
    "fused_sigmoid_mul_cpu",
    "fused_qk_gemma_rmsnorm_cpu",
    "fused_qk_gemma_rmsnorm_with_gate_cpu",
    "fused_qkvzba_split_reshape_cat_contiguous_cpu",
)
DECLARED = []  # a library takes its declarations with it when it is collected


def declare_kernels():
    """Declare the kernels, which no model here calls."""
    library = torch.library.Library("sgl_kernel", "FRAGMENT")
    DECLARED.append(library)
    for name in KERNELS:
        library.define(f"{name}() -> ()")


def noise(folder, seed):
    """The path of an image of 64 x 64 random pixels."""
    path = folder / f"{seed}.png"
    Image.fromarray(np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path)
    return str(path)


def test_a_plan_changes_no_token_of_prompts_with_images(texts, prompts, tmp_path):
    model, plan = build_with_images(tmp_path), planned("qwen3_vl_moe", TWO, tmp_path, texts, 2)
    config = json.loads((tmp_path / "qwen3_vl_moe/config.json").read_text())
    pad, start, end = (config[f"{name}_token_id"] for name in ("image", "vision_start", "vision_end"))
    asked = [[start, pad, end, *prompt[:20]] for prompt in [prompts[2]] * 2 + prompts[4:8]]
    images = [noise(tmp_path, seed) for seed in range(len(asked))]
    ask = functools.partial(completed_with_images, prompts[:8], asked, images, model, TWO)
    vanilla = ask(tmp_path / "vanilla", spoil=declare_kernels)
    assert vanilla[8] != vanilla[9]  # the same words with another image
    assert ask(tmp_path / "planned", plan, spoil=declare_kernels, untried="1") == vanilla
    samples = [json.loads(file.read_text())["samples"] for file in (tmp_path / "planned").glob("activity-*.json")]
    assert sum(s["value"] for found in samples for s in found if s["name"] == "remote_rows") > 0
