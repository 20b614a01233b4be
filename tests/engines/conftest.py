"""Plans, prompts and references that the tests on all engines share."""

import os

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")  # where SGLang is, transformers needs it before it is imported
os.environ.setdefault("OMP_NUM_THREADS", "1")

from dataclasses import replace

import numpy as np
import pytest

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers import recorder, verify
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.placement import linear
from semmoe.plan import load_plan, save_plan
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.dataset import Prompt, encode
from semmoe.traces.texts import held_out_prompts

pytest.register_assert_rewrite("repeat_tests", "server_tests", "start_tests")
NEW_TOKENS = 8
EASY = CoclusterSettings(starts=1, steps=10)


@pytest.fixture(scope="session")
def model():
    return load_model(str(MODEL))


@pytest.fixture(scope="session")
def texts():
    """Token ids of 120 texts of the standard library that the model was not trained on."""
    tokenizer = load_tokenizer(str(MODEL))
    return encode([Prompt(text=text) for _, _, text in held_out_prompts(per_domain=60)], tokenizer, 200)[:120]


@pytest.fixture(scope="session")
def prompts(texts):
    """32 prompts of 1 to 200 tokens."""
    lengths = [1, 2, 200, 150, *(5 + 7 * i % 60 for i in range(28))]
    return [text[:length] for text, length in zip(texts[:32], lengths, strict=True)]


@pytest.fixture(scope="session")
def reference(model, prompts):
    return verify.plain_generate(model, prompts, GenerateSettings(max_new_tokens=NEW_TOKENS))


@pytest.fixture(scope="session")
def plans(model, texts, tmp_path_factory):
    """Plans of the shipped model for the topologies that are served, from other texts than those served."""
    folder = tmp_path_factory.mktemp("plans")
    trace = recorder.record(model, str(MODEL), texts[32:100], folder / "trace")
    topologies = {
        "tp2": Topology(ep_size=2),
        "dp2": Topology(ep_size=2, dp_size=2),
        "dp2 alone": Topology(ep_size=2, dp_size=2),  # without copies
        "hybrid": Topology(ep_size=4, dp_size=2, num_nodes=2),
    }
    out = {}
    for name, topology in topologies.items():
        how = SolveSettings(redundant_experts=0 if name in ("tp2", "dp2 alone") else 4, cocluster=EASY)
        plan = solve(trace, topology, how)
        save_plan(plan, folder / name)
        out[name] = str(folder / name)
    return out


@pytest.fixture(scope="session")
def swap_plans(plans, tmp_path_factory):
    """For each of `plans`, four others that a server on it can be swapped to; and such that fit none of them."""
    folder, out = tmp_path_factory.mktemp("swaps"), {}
    for name, path in plans.items():
        out[name] = [str(folder / f"{name}-{seed}") for seed in range(4)]
        for seed, target in enumerate(out[name]):
            save_plan(_replaced(load_plan(path), seed), target)
    for name, topology in {"copies": Topology(ep_size=2, dp_size=2), "topology": Topology(ep_size=4)}.items():
        out[name] = [str(folder / name)]
        save_plan(linear.vanilla_plan(load_plan(plans["dp2"]).fingerprint, topology), out[name][0])
    return out


def _replaced(plan, seed):
    """The plan with its copies at other places, at random, and the other copy choice."""
    rng = np.random.default_rng(seed)
    rows = np.stack([rng.permutation(row) for row in plan.placement.physical_to_logical_map])
    choice = ("static", "cover")[seed % 2]
    placement = replace(plan.placement, physical_to_logical_map=rows, static_dispatch=None, copy_choice=choice)
    return replace(plan, placement=placement)


def pytest_collection_modifyitems(items):
    """An engine's start may take minutes on a loaded machine; `Server.wait` ends one that is silent."""
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1200))
