"""Hooks resolve, or say in one line what moved."""

import json
import subprocess
import sys

import pytest

from semmoe.engines.hooks import Hook, problem


def test_a_module_a_class_and_a_method_resolve():
    for target in (
        "json",
        "json.decoder.JSONDecoder",
        "json.decoder.JSONDecoder.raw_decode",
        "json:JSONDecoder.decode",
    ):
        assert problem(Hook(target, "test")) is None
    assert problem(Hook("json.dumps", "test", ("obj", "indent"))) is None


@pytest.mark.parametrize(
    ("target", "parameters", "words"),
    [
        ("no_such_engine.worker.Runner", (), "No module named 'no_such_engine'"),
        ("json.gone.Runner", (), "json' has no attribute 'gone'"),
        ("json.decoder.JSONDecoder.gone", (), "has no attribute 'gone'"),
        ("json.dumps", ("obj", "stream", "colour"), "json.dumps (test) has no parameter stream, colour"),
        ("json.dumps", ("kw",), "has no parameter kw"),  # **kw stands for no name
        ("json.decoder", ("s",), "is not a callable object"),
        ("", (), "does not resolve"),
    ],
)
def test_what_moved_is_said_in_one_line(target, parameters, words):
    line = problem(Hook(target, "test", parameters))
    assert words in line
    assert "\n" not in line


def test_a_module_that_fails_to_import_names_the_cause(tmp_path, monkeypatch):
    """Not "has no attribute", which would send the reader after the wrong thing."""
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "toy_engine"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "worker.py").write_text("import no_such_dependency\n")
    (package / "crash.py").write_text("raise RuntimeError('no GPU\\nfound')\n")
    (package / "lazy.py").write_text(
        "try:\n    1 / 0\nexcept Exception as e:\n    raise ImportError('not here') from e\n"
    )
    lazy = problem(Hook("toy_engine.lazy.Run", "test"))
    assert "toy_engine.lazy: ImportError: not here (from ZeroDivisionError: division by zero)" in lazy
    assert "toy_engine.worker: No module named 'no_such_dependency'" in problem(Hook("toy_engine.worker.Run", "test"))
    assert "RuntimeError: no GPU found" in problem(Hook("toy_engine.crash.Run", "test"))
    sys.modules.pop("toy_engine", None)


def test_hooks_compare_and_are_frozen():
    hook = Hook("json.dumps", "test")
    assert hook == Hook("json.dumps", "test", ())
    with pytest.raises(AttributeError):
        hook.target = json


@pytest.mark.parametrize("engine", ["sglang", "vllm"])
def test_a_plug_in_that_is_only_installed_brings_no_compiler_into_an_engine(engine):
    """Engines import it in every process; vLLM's CPU back-end does not start beside llvmlite."""
    code = (
        f"import sys, semmoe.engines.{engine}.plugin; "
        "print({'numba', 'llvmlite', 'scipy', 'torch', 'transformers'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_what_engines_load_in_every_process_is_light():
    """Also where no plan is served: with llvmlite in the process vLLM does not start on a CPU."""
    code = "import sys, semmoe.engines.vllm.plugin, semmoe.engines.sglang.plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "semmoe.core" in loaded
    assert not {"numba", "llvmlite", "torch", "fastapi"} & set(loaded)
