"""Weights loaded again while the engine runs, as reinforcement learning does: experts land where the plan has them."""

import functools
from pathlib import Path

import pytest
import transformers
from offline import on_engine
from safetensors.torch import load_file

from semmoe.cli.demo import MODEL
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
    work = functools.partial(reload, given, other)
    answers, refused = on_engine(work, str(MODEL), Topology(ep_size=2), tmp_path / "control", copied)
    assert answers == [ours, ours, theirs, ours]
    assert refused[0] is False
    assert "load_format 'direct' writes experts where a plan has others" in refused[1]


def reload(given, other, running):
    """Answers at first and after each time that weights were loaded, and what a load that is refused returns."""
    sglang, answers = running.engine, []

    def answer():
        answers.append(running.complete(given, NEW_TOKENS))

    answer()
    for folder in (str(MODEL), other):
        assert sglang.update_weights_from_disk(folder)[0]
        answer()
    sglang.begin_weight_update()
    assert sglang.update_weights_from_tensor(named(MODEL))[0]
    refused = sglang.update_weights_from_tensor(named(other)[:1], load_format="direct")
    sglang.end_weight_update()
    answer()
    return answers, refused
