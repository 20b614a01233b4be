"""The embedded engine by Triton's kernels in their interpreter: the tokens of plain transformers, as on a GPU."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest
from triton_runs import interpret

from semmoe.cli.demo import MODEL
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import verify
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.runtime import kernels
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

SETTINGS = GenerateSettings(max_new_tokens=4, batch_size=2)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["dp", "tp"])
def test_tokens_by_tritons_kernels_are_the_plain_models(attention, tmp_path):
    interpret(__file__, attention, str(tmp_path))


def only_triton(rank: int) -> None:
    """Give tensors on the CPU the kernels of GPUs; without those of numba, a call that is left would fail."""
    sys.modules["semmoe.runtime.kernels.on_cpu"] = None
    kernels.of = lambda device: import_module("semmoe.runtime.kernels.on_gpu")


def interpreted(attention: str, folder: str) -> None:
    rng = np.random.default_rng(0)
    profiled, prompts = ([rng.integers(1, 4096, size).tolist() for size in sizes] for sizes in ([9] * 24, [6, 1, 3]))
    model = load_model(str(MODEL))
    trace = record(model, str(MODEL), profiled, Path(folder) / "trace")
    how = SolveSettings(redundant_experts=4, cocluster=CoclusterSettings(starts=1, steps=10))
    plan = replace(solve(trace, Topology.for_attention(attention, 2), how), shuffle_from=1)
    up = gen.Configuration(name=attention, plan=plan)
    [found] = gen.generate(str(MODEL), prompts, [up], SETTINGS, prepare=only_triton)
    reference = verify.plain_generate(model, prompts, SETTINGS)
    assert verify.compare_outputs(model, prompts, reference, found.outputs).holds


if __name__ == "__main__":
    interpreted(*sys.argv[1:])
