"""Tokens shuffled in DeepSeek-V2's decoder layers, whose attention vLLM reduce-scatters itself.

Held against vLLM without a plan on the same ranks: with latent attention on a CPU it agrees neither with itself on one
rank nor with transformers.
"""

import pytest
import torch
import transformers
from models import COMMON, LATENT
from serving import num_parted
from two_ranks import LATENT_HEADS, counted, make_plan, on_two_ranks

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer

pytestmark = pytest.mark.timeout(600)  # for machines under load
ROUTERS = {
    "float32": {"topk_method": "greedy", "n_group": 1, "topk_group": 1},
    "float16": {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3, "routed_scaling_factor": 16.0,
                "n_routed_experts": 16},
}  # fmt: skip


def deepseek(folder, router):
    config = transformers.DeepseekV2Config(**(COMMON | LATENT | LATENT_HEADS | {"n_routed_experts": 8} | router))
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(str(MODEL)).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("dtype", [pytest.param(d, marks=[pytest.mark.costly] * (d != "float32")) for d in ROUTERS])
def test_a_plan_changes_no_token(dtype, texts, prompts, tmp_path):
    """In float16 vLLM divides the stream of this family by its `routed_scaling_factor`."""
    model = deepseek(tmp_path / "deepseek", ROUTERS[dtype])
    plan = make_plan(model, texts, tmp_path, "tp2", 2)
    # Attention on a CPU depends on what else is in the batch: as many requests at a time as the test has time for.
    given = {"dtype": dtype, "together": dtype == "float32"}
    prompts = prompts if dtype == "float32" else prompts[4:16]
    vanilla = on_two_ranks(model, prompts, tmp_path / "vanilla", **given)
    planned = on_two_ranks(model, prompts, tmp_path / "planned", variables={"SEMMOE_PLAN": plan}, **given)
    # In float16 the stream is rounded where it is gathered, which may turn a near-tie.
    assert num_parted(planned, vanilla) <= (dtype == "float16")
    assert counted(tmp_path / "planned", "remote_rows") > 0
