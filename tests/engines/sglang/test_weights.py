"""Weights loaded again while the engine runs, as reinforcement learning does: experts land where the plan has them."""

from pathlib import Path

import pytest
import transformers
from offline import engine
from safetensors.torch import load_file

from semmoe.demo import MODEL
from semmoe.engines.transformers import recorder, verify
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.plan import save_plan
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

NEW_TOKENS = 8
EASY = CoclusterSettings(starts=1, steps=10)


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """A model of the shipped one's sizes, with weights of its own."""
    folder = tmp_path_factory.mktemp("other")
    transformers.set_seed(1)
    config = transformers.AutoConfig.from_pretrained(MODEL)
    config.initializer_range = 0.25
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    load_tokenizer(str(MODEL)).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def copied(model, texts, tmp_path_factory):
    """A plan for attention-TP with copies."""
    folder = tmp_path_factory.mktemp("copied")
    trace = recorder.record(model, str(MODEL), texts[32:64], folder / "trace")
    save_plan(solve(trace, Topology(ep_size=2), SolveSettings(redundant_experts=4, cocluster=EASY)), folder / "plan")
    return str(folder / "plan")


def named(folder):
    """The tensors of a checkpoint."""
    return [pair for path in sorted(Path(folder).glob("*.safetensors")) for pair in load_file(path).items()]


def test_weights_that_are_loaded_again_are_those_that_answer(copied, other, prompts, reference, tmp_path):
    given, settings = prompts[:12], GenerateSettings(max_new_tokens=NEW_TOKENS)
    theirs = verify.plain_generate(load_model(other), given, settings)
    ours = reference[:12]
    assert ours != theirs
    with engine(str(MODEL), Topology(ep_size=2), tmp_path / "control", copied) as running:
        sglang = running._engine

        def answers():
            return [completion.token_ids for completion in running.complete(given, NEW_TOKENS)]

        assert answers() == ours
        assert sglang.update_weights_from_disk(str(MODEL))[0]
        assert answers() == ours
        assert sglang.update_weights_from_disk(other)[0]
        assert answers() == theirs
        sglang.begin_weight_update()
        assert sglang.update_weights_from_tensor(named(MODEL))[0]
        refused = sglang.update_weights_from_tensor(named(other)[:1], load_format="direct")
        sglang.end_weight_update()
        assert refused[0] is False
        assert "load_format 'direct' writes experts where a plan has others" in refused[1]
        assert answers() == ours
