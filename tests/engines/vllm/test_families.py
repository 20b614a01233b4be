"""A small random model of every family that a plan can be served on: the tokens are vLLM's own without a plan.

All run with `make test-families`; `make test-vllm` has a few of them.
"""

import pytest
from models import build
from serving import num_parted
from two_ranks import HEADS, LATENT_HEADS, counted, make_plan, on_two_ranks

pytestmark = pytest.mark.timeout(600)  # for machines under load
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "gpt_oss", "glm4_moe", "deepseek_v2", "deepseek_v3", "kimi_k2")
# Families whose decoder layers no hook knows, so that tokens are not split around their experts.
IN_ATTENTION_DP = ("qwen2_moe", "granitemoe", "phimoe", "ernie4_5_moe")
LATENT = ("deepseek_v2", "deepseek_v3", "kimi_k2")
WIDTHS = {family: LATENT_HEADS if family in LATENT else HEADS for family in (*FAMILIES, *IN_ATTENTION_DP)}
WIDTHS["gpt_oss"] = HEADS | {"intermediate_size": 64}
# The last two are widths that the configuration derives only once.
WIDTHS["deepseek_v3"] = WIDTHS["kimi_k2"] = LATENT_HEADS | {"head_dim": 64, "qk_head_dim": 192}
ALWAYS = {("mixtral", "tp2", 2), ("gpt_oss", "tp2", 2)}
CASES = [
    pytest.param(*case, marks=() if case in ALWAYS else pytest.mark.families)
    for case in ((f, a, c) for f in (*FAMILIES, *IN_ATTENTION_DP) for a in ("tp2", "dp2") for c in (0, 2))
    if case[0] in FAMILIES or case[1] == "dp2"
]


@pytest.fixture(scope="module")
def vanilla(prompts, tmp_path_factory):
    """Tokens of a family on two ranks without a plan, made once, and the model."""
    folder, found = tmp_path_factory.mktemp("vanilla"), {}

    def get(*case):  # family, attention, dtype
        if case not in found:
            model, run = build(case[0], folder, **WIDTHS[case[0]]), folder / "-".join(case)
            found[case] = on_two_ranks(model, prompts, run, case[1], dtype=case[2]), model
        return found[case]

    return get


@pytest.mark.parametrize(("family", "attention", "copies"), CASES)
def test_a_plan_changes_no_token(family, attention, copies, vanilla, texts, prompts, tmp_path):
    expected, model = vanilla(family, attention, "float32")
    plan = make_plan(model, texts, tmp_path, attention, copies)
    planned = on_two_ranks(model, prompts, tmp_path / "planned", attention, {"SEMMOE_PLAN": plan})
    assert planned == expected
    assert counted(tmp_path / "planned", "remote_rows") > 0


@pytest.mark.families
@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_a_plan_changes_no_more_than_the_choice_of_attention(family, vanilla, texts, prompts, tmp_path):
    """In attention-TP partial sums are rounded by rank, which turns near-ties of tokens and of experts.

    So do vLLM's own two attentions between them: the plan may part as many answers, and five of noise. In attention-DP
    it changes no token.
    """
    (tp, model), (dp, _) = vanilla(family, "tp2", "bfloat16"), vanilla(family, "dp2", "bfloat16")
    planned = {}
    for attention in ("tp2", "dp2"):
        given = {"SEMMOE_PLAN": make_plan(model, texts, tmp_path, attention, 2)}
        planned[attention] = on_two_ranks(model, prompts, tmp_path / attention, attention, given, dtype="bfloat16")
    assert planned["dp2"] == dp
    assert num_parted(planned["tp2"], tp) <= num_parted(dp, tp) + 5 < len(prompts)
