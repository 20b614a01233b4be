"""Models that do not ship, one of random weights for each family: on a plan SGLang answers as it does without one."""

import json

import pytest
from models import build
from offline import completed
from serving import num_parted

from semmoe.engines.transformers import recorder
from semmoe.engines.transformers.model import load_model
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

pytestmark = pytest.mark.timeout(900)  # each test starts three engines
EASY = CoclusterSettings(starts=1, steps=10)
TOPOLOGIES = {"tp": Topology(ep_size=2), "dp": Topology(ep_size=2, dp_size=2)}
# Families and the attention that SGLang computes them with.
SERVED = [("qwen3_moe", "tp"), ("qwen3_moe", "dp"), ("mixtral", "tp"), ("deepseek_v2", "tp"), ("deepseek_v2", "dp"),
          ("deepseek_v3", "tp"), ("deepseek_v3", "dp"), ("glm4_moe", "tp"), ("glm4_moe", "dp"),
          ("kimi_k2", "tp"), ("kimi_k2", "dp")]  # fmt: skip
# DeepSeek's answers on a CPU depend on the batch and on what of a prompt is cached, without a plan too: where a plan
# changes which requests a rank runs, each runs alone and nothing is cached.
ALONE = {("deepseek_v2", "dp"), ("deepseek_v3", "dp"), ("kimi_k2", "dp")}
SUBSET = [("mixtral", "tp")]


def marked(cells):
    return [pytest.param(*cell, marks=pytest.mark.costly if cell in SUBSET else pytest.mark.families) for cell in cells]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


def planned(family, topology, folder, texts, redundant):
    """The path of a plan for the model of that family."""
    path = folder / f"{family}-{topology.attention}-{redundant}"
    if not path.exists():
        model = build(family, folder)
        trace = recorder.record(load_model(model), model, texts[32:48], folder / f"trace-{path.name}")
        save_plan(solve(trace, topology, SolveSettings(redundant_experts=redundant, cocluster=EASY)), path)
    return str(path)


def answers(model, topology, folder, prompts, plan="", options=(), alone=False, **settings):
    """Tokens of every prompt, and semmoe's counters of all processes."""
    options = (*options, "--disable-radix-cache") if alone else options
    batches = [[prompt] for prompt in prompts] if alone else [prompts]
    tokens = completed(batches, model, topology, folder, plan, options, **settings)
    counted = [json.loads(path.read_text())["samples"] for path in folder.glob("activity-*.json")]
    return tokens, [sample for samples in counted for sample in samples]


@pytest.mark.parametrize(("family", "attention"), marked(SERVED))
def test_a_plan_changes_no_token(family, attention, folder, texts, prompts, tmp_path):
    model, topology, given = build(family, folder), TOPOLOGIES[attention], prompts[:16]
    alone = (family, attention) in ALONE
    vanilla, _ = answers(model, topology, tmp_path / "vanilla", given, alone=alone)
    assert len({tuple(tokens) for tokens in vanilla}) > 8
    for redundant in (2, 0):
        plan = planned(family, topology, folder, texts, redundant)
        tokens, counted = answers(model, topology, tmp_path / str(redundant), given, plan, alone=alone)
        assert tokens == vanilla
        assert [s for s in counted if s["name"] == "degraded"] == []
        assert sum(s["value"] for s in counted if s["name"] == "remote_rows") > 0


@pytest.mark.families
@pytest.mark.parametrize("family", ["qwen3_moe", "glm4_moe"])
def test_in_bfloat16_a_plan_changes_no_more_than_the_choice_of_attention(family, folder, texts, prompts, tmp_path):
    """In attention-TP rounding by rank turns near-ties, in attention-DP other requests in the batch do.

    SGLang's own two attentions part as many answers between them, and three of noise.
    """
    model, given, found = build(family, folder), prompts[:16], {}
    for attention, topology in TOPOLOGIES.items():
        for plan in ("", planned(family, topology, folder, texts, 2)):
            run = tmp_path / f"{attention}-{bool(plan)}"
            found[attention, bool(plan)] = answers(model, topology, run, given, plan, ("--dtype", "bfloat16"))[0]
    own = num_parted(found["dp", False], found["tp", False])
    parted = {attention: num_parted(found[attention, True], found[attention, False]) for attention in TOPOLOGIES}
    assert max(parted.values()) <= own + 3 < len(given), (parted, own)
