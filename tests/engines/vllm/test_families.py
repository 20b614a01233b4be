"""A small random model of every family that a plan can be served on: the tokens are vLLM's own without a plan.

All run with `make test-families`; `make test-vllm` has a few of them.
"""

import pytest
from models import build
from two_ranks import LATENT, counted, make_plan, on_two_ranks

pytestmark = pytest.mark.timeout(600)  # for machines under load
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3")
# Widths that vLLM's kernels on a CPU take.
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
WIDTHS = {family: LATENT if family.startswith("deepseek") else HEADS for family in FAMILIES}
WIDTHS["gpt_oss"] = HEADS | {"intermediate_size": 64}
WIDTHS["deepseek_v3"] = LATENT | {"head_dim": 64, "qk_head_dim": 192}  # which its configuration derives only once
ALWAYS = {("mixtral", "tp2", 2), ("gpt_oss", "tp2", 2)}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.families)
    for case in ((f, a, c) for f in FAMILIES for a in ("tp2", "dp2") for c in (0, 2))
]


@pytest.fixture(scope="module")
def vanilla(prompts, tmp_path_factory):
    """Tokens of a family on two ranks without a plan, made once."""
    folder, found = tmp_path_factory.mktemp("vanilla"), {}

    def get(family, attention):
        if (family, attention) not in found:
            model = build(family, folder, **WIDTHS[family])
            found[family, attention] = on_two_ranks(model, prompts, folder / f"{family}-{attention}", attention)
        return found[family, attention], build(family, folder, **WIDTHS[family])

    return get


@pytest.mark.parametrize(("family", "attention", "copies"), CASES)
def test_a_plan_changes_no_token(family, attention, copies, vanilla, texts, prompts, tmp_path):
    expected, model = vanilla(family, attention)
    plan = make_plan(model, texts, tmp_path, attention, copies)
    planned = on_two_ranks(model, prompts, tmp_path / "planned", attention, {"SEMMOE_PLAN": plan})
    assert planned == expected
    assert counted(tmp_path / "planned", "remote_rows") > 0
