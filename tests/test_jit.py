"""Kernels are compiled where no folder for a cache can be written, and the compiler is loaded for computing alone."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import semmoe
from semmoe.cli.demo import MODEL

NOTE = "note: every command compiles its kernels again"
REPLAY = ["--ep-size", "2", "--method", "linear"]


@pytest.fixture(scope="module")
def nowhere(tmp_path_factory):
    """The environment of a copy of the package with no place for a cache, neither in it nor at home, even for root."""
    copy = tmp_path_factory.mktemp("installed") / "semmoe"
    shutil.copytree(Path(semmoe.__file__).parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for folder in [path.parent for path in copy.rglob("*.py")]:
        (folder / "__pycache__").touch()
    kept = {name: value for name, value in os.environ.items() if name not in ("NUMBA_CACHE_DIR", "XDG_CACHE_HOME")}
    return kept | {"PYTHONPATH": str(copy.parent), "HOME": os.devnull}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("trace") / "trace.npz", np.random.default_rng(0)
    experts = rng.random((120, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez(path, token_ids=np.arange(120) % 9, expert_ids=experts, request_offsets=np.arange(0, 121, 12))
    return str(path)


def run(words, environment):
    code = "import sys; from semmoe.cli import main; sys.argv[0] = 'semmoe'; main()"
    return subprocess.run([sys.executable, "-c", code, *words], env=environment, capture_output=True, text=True)


def test_a_command_without_a_place_for_a_cache_runs_and_says_so_once(nowhere, trace):
    done = run(["replay", trace, *REPLAY, "--json"], nowhere)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["methods"]
    assert done.stderr.count(NOTE) == 1
    assert "set NUMBA_CACHE_DIR" in done.stderr


def test_the_folder_that_the_note_asks_for_is_used(nowhere, trace, tmp_path):
    done = run(["replay", trace, *REPLAY], nowhere | {"NUMBA_CACHE_DIR": str(tmp_path)})
    assert (done.returncode, NOTE in done.stderr) == (0, False)
    assert list(tmp_path.rglob("*.nbi"))


@pytest.mark.slow
def test_ranks_run_without_a_cache_too(nowhere):
    words = ["generate", str(MODEL), "--prompt", "def f(x):", "--ep-size", "2", "--max-new-tokens", "2", "--verify"]
    done = run(words, nowhere)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(NOTE) == 1


def test_neither_version_nor_help_loads_the_compiler(nowhere):
    done = run(["--version"], nowhere)
    assert (done.stdout.strip(), done.stderr) == (semmoe.__version__, "")
    code = (
        "import sys; from typer.main import get_command; from typer.testing import CliRunner;"
        "from semmoe.cli import app;"
        "groups = {(n,): c for n, c in get_command(app).commands.items()};"
        "groups |= {(*n, m): d for n, c in groups.items() for m, d in getattr(c, 'commands', {}).items()};"
        "print([CliRunner().invoke(app, [*n, '--help']).exit_code for n in groups], 'numba' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], env=nowhere, capture_output=True, text=True, check=True)
    codes, loaded = done.stdout.strip().rsplit(" ", 1)
    assert set(json.loads(codes)) == {0}
    assert len(json.loads(codes)) > 20
    assert loaded == "False"
