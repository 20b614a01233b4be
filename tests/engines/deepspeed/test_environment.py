"""The environment that `make test-deepspeed` builds, and what is said of versions that do not work together."""

from importlib.metadata import version
from pathlib import Path

import pytest
from transformers.utils import output_capturing

from semmoe.engines.deepspeed.targets import HOOKS
from semmoe.engines.deepspeed.versions import check_versions
from semmoe.engines.hooks import problem

ROOT = Path(__file__).parents[3]


def test_every_hook_resolves():
    """The contract with DeepSpeed: what moved is named."""
    assert [line for line in map(problem, HOOKS) if line] == []


def test_the_versions_are_those_that_work():
    lines = (ROOT / "engines/deepspeed-cpu/requirements.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if "==" in line)
    assert {name: version(name) for name in pins} == pins
    check_versions("qwen3_moe")


class Registry(dict):
    """As of transformers 5.23."""

    def get(self, model):
        return super().get(str(model))


def test_versions_that_do_not_work_are_named(monkeypatch):
    monkeypatch.setattr(output_capturing, "_CAN_RECORD_REGISTRY", Registry())
    with pytest.raises(ValueError, match=r"cannot convert mixtral .* use deepspeed 0\.19\.8 with"):
        check_versions("mixtral")
    check_versions("deepseek_v2")
