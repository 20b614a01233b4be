"""The environment that `make test-sglang` builds: SGLang can be imported, and only its pins decide its versions."""

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
CPU_ENGINE = "SGLANG_USE_CPU_ENGINE"

IMPORTS = """
import sglang.srt.entrypoints.engine, sglang.srt.managers.scheduler
import sgl_kernel, torch, torchvision, triton
from sglang.srt.utils import cpu_has_amx_support, is_cpu

assert sglang.__version__ == "0.5.23" and is_cpu()
assert not list(torch.ops.sgl_kernel) and not hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
assert not cpu_has_amx_support()
try:
    sgl_kernel.verify_tree_greedy_cpu()
except NotImplementedError as refusal:
    print(refusal)
"""

NOTHING = """
import importlib.util, sys

assert importlib.util.find_spec("semmoe_sglang_cpu") is not None
assert importlib.util.find_spec("sgl_kernel") is None
assert "torch" not in sys.modules
"""

SPAWNS = """
import multiprocessing
import sgl_kernel

def child():
    pass

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
    assert process.exitcode == 0
"""


def python(script: str | Path, variable: str | None) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != CPU_ENGINE}
    if variable is not None:
        environment[CPU_ENGINE] = variable
    arguments = [str(script)] if isinstance(script, Path) else ["-c", script]
    return subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, text=True)


def test_sglang_is_imported_without_kernels() -> None:
    done = python(IMPORTS, "1")
    assert done.returncode == 0, done.stderr
    assert "sgl_kernel.verify_tree_greedy_cpu is a compiled kernel" in done.stdout
    assert done.stderr.count("semmoe-sglang-cpu: standing in for sgl_kernel (CPU without AMX)") == 1


@pytest.mark.parametrize("variable", [None, "1"])
def test_transformers_models_are_there_to_compare_with(variable: str | None) -> None:
    done = python("from transformers import Qwen3MoeForCausalLM", variable)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("variable", [None, "", "0"])
def test_sglang_finds_no_kernels_without_the_variable(variable: str | None) -> None:
    done = python(NOTHING, variable)
    assert (done.returncode, done.stderr) == (0, "")


def test_spawned_processes_are_mended_and_do_not_repeat_it(tmp_path: Path) -> None:
    script = tmp_path / "spawns.py"
    script.write_text(SPAWNS)
    done = python(script, "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("semmoe-sglang-cpu") == 1


def test_semmoe_moved_no_version() -> None:
    files = [ROOT / "engines/sglang-cpu" / name for name in ("requirements.txt", "requirements-no-deps.txt")]
    lines = [line for file in files for line in file.read_text().splitlines()]
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    assert len(pins) > 90
    assert {name: version(name) for name in pins} == pins
