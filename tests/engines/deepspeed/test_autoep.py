"""AutoEP, folded with AutoTP, on plans and off them: the plain model's logits and tokens; and faults show."""

import copy
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from models import build

from lab import deepspeed as offline
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import verify
from semmoe.engines.transformers.batch import left_pad
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

pytestmark = pytest.mark.dist
SETTINGS = GenerateSettings(max_new_tokens=8, batch_size=4)  # as of the references
EASY = CoclusterSettings(starts=1, steps=10)
TOPOLOGIES = {"EP2": (2, 2), "TP2/EP2": (2, 1), "TP2/EP4": (4, 2), "TP4/EP4": (4, 1)}  # experts' ranks, groups
PROMPTS = [[5, 17, 1999, 4], [301], [7, 8, 9, 2000, 33, 71, 1500], [44, 45]]


def topology(name):
    ranks, groups = TOPOLOGIES[name]
    return Topology(ep_size=ranks, dp_size=groups)


def attach(model, chosen, comm, shuffle, fault=None):
    """As `offline.attach`, and the logits of a padded batch are held against the plain model's."""
    plain = copy.deepcopy(model)
    planned = offline.attach(model, chosen, comm, shuffle)
    if fault is not None:
        fault(planned)
        return planned
    size = chosen.plan.topology.attn_tp_size  # attention is AutoTP's, cut by heads
    whole, cut = (m.get_decoder().layers[0].self_attn.o_proj.weight.shape for m in (plain, planned.model))
    assert (cut[0], cut[1] * size) == whole
    ids, real = left_pad(PROMPTS)
    inputs = {"input_ids": ids, "attention_mask": real.long(), "position_ids": (real.cumsum(1) - 1).clamp(min=0)}
    with torch.no_grad():
        expected, found = plain(**inputs).logits[real], planned.model(**inputs).logits[real]
    error = float((found - expected).abs().max() / expected.abs().max())
    assert error < 1e-5, f"{chosen.name}: logits differ by {error:.1e} of the greatest"
    return planned


def two_experts_swapped(planned):
    """The router looks one expert up in another's place, and the other way round, at every layer."""
    for copies in planned.copies:
        for table in (copies.ranks, copies.physical, copies.preferred):
            table[[0, 1]] = table[[1, 0]]


def set_ups(trace, name, shuffles=("predicted", "off"), redundant=0):
    """DeepSpeed as it is, then a plan in each way."""
    chosen, vanilla = topology(name), vanilla_plan(trace.fingerprint, topology(name))
    plan = solve(trace, chosen, SolveSettings(redundant_experts=redundant, cocluster=EASY))
    pairs = [("vanilla", vanilla, "off"), *((shuffle, plan, shuffle) for shuffle in shuffles)]
    return [gen.Configuration(name=n, plan=p, attach=partial(attach, shuffle=s)) for n, p, s in pairs]


@pytest.fixture(scope="module")
def shipped(texts, model, prompts, reference, tmp_path_factory):
    trace = record(model, str(MODEL), texts[32:100], tmp_path_factory.mktemp("trace"))
    return str(MODEL), model, trace, prompts, reference


@pytest.fixture(scope="module", params=["mixtral", "deepseek_v2", "deepseek_v3"])
def random_model(request, texts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    path = build(request.param, folder)
    model, few = load_model(path), [text[: 3 + 5 * i] for i, text in enumerate(texts[:10])]
    trace = record(model, path, texts[40:60], folder / "trace")
    return path, model, trace, few, verify.plain_generate(model, few, SETTINGS)


def check(found, ups):
    path, model, _, prompts, reference = found
    results = gen.generate(path, prompts, ups, SETTINGS)
    for result in results:
        agreement = verify.compare_outputs(model, prompts, reference, result.outputs)
        assert agreement.holds, f"{result.name}: requests {agreement.mismatches} differ"
        assert agreement.identical >= len(reference) - 1, f"{result.name}: {agreement}"
    return {result.name: result for result in results}


@pytest.mark.parametrize("name", ["EP2", "TP2/EP2", "TP2/EP4"])
def test_the_shipped_model(shipped, name):
    shuffles = ("off",) if name == "EP2" else ("predicted", "off")
    results = check(shipped, set_ups(shipped[2], name, shuffles))
    assert results["off"].lar is not None
    for one in results.values():  # of all-to-alls, what was counted by the routing and what DeepSpeed sent
        assert one.all_to_all_bytes == sum(map(sum, one.all_to_all_bytes_per_rank_pair))
    if name != "EP2":
        assert results["predicted"].lar > 1.15 * results["off"].lar
        assert results["predicted"].sent_bytes.get("all_reduce", 0) == 0


@pytest.mark.parametrize("name", ["EP2", "TP2/EP2", "TP2/EP4"])
def test_random_models_with_limited_groups_and_latent_attention(random_model, name):
    check(random_model, set_ups(random_model[2], name, ("off",) if name == "EP2" else ("predicted",)))


def test_copies_of_experts(shipped):
    results = check(shipped, set_ups(shipped[2], "TP2/EP4", ("predicted", "off"), redundant=8))
    assert results["predicted"].lar > results["vanilla"].lar


@pytest.mark.parametrize("redundant", [0, 8])
def test_passes_with_few_rows_are_those_of_deepspeed(shipped, redundant):
    path, model, trace, prompts, reference = shipped
    plan = solve(trace, topology("TP2/EP2"), SolveSettings(redundant_experts=redundant, cocluster=EASY))
    plan, chosen = replace(plan, shuffle_from=5), partial(attach, shuffle="predicted")
    found = gen.generate(path, prompts, [gen.Configuration(name="both", plan=plan, attach=chosen)], SETTINGS)[0]
    assert verify.compare_outputs(model, prompts, reference, found.outputs).holds
    assert min(found.passes["shuffled"], found.passes["contiguous"]) > 3


def stale_on_rank_one(model, chosen, comm):
    """Rank 1 has a plan of the same sizes whose experts lie in another order."""
    placement = chosen.plan.placement
    moved = np.ascontiguousarray(placement.physical_to_logical_map[:, ::-1])
    stale = replace(chosen.plan, placement=replace(placement, physical_to_logical_map=moved))
    return offline.attach(model, replace(chosen, plan=stale) if comm.rank == 1 else chosen, comm)


def test_a_rank_with_another_plan_ends_the_run(shipped):
    path, _, trace, prompts, _ = shipped
    plan = vanilla_plan(trace.fingerprint, topology("TP2/EP2"))
    with pytest.raises(ValueError, match="ranks disagree: the plan of rank 1 is not that of rank 0"):
        gen.generate(path, prompts, [gen.Configuration(name="x", plan=plan, attach=stale_on_rank_one)], SETTINGS)


def test_a_fault_shows(shipped):
    path, model, trace, prompts, reference = shipped
    plan = vanilla_plan(trace.fingerprint, topology("TP2/EP2"))
    faulty = gen.Configuration(
        name="x", plan=plan, attach=partial(attach, shuffle="predicted", fault=two_experts_swapped)
    )
    found = gen.generate(path, prompts, [faulty], SETTINGS)[0]
    assert len(verify.compare_outputs(model, prompts, reference, found.outputs).mismatches) > 3
