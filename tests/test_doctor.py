"""semmoe doctor: installed versions, hooks that resolve, and the plans that are served for a model."""

import json
import sys
import types

import pytest
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.engines import doctor
from semmoe.engines.hooks import Hook


def run(*arguments):
    return CliRunner().invoke(app, ["doctor", *(str(a) for a in arguments)])


@pytest.fixture
def installed(monkeypatch):
    """Set the versions that are found, and an adaptor's hooks."""

    def install(**found):
        monkeypatch.setattr(doctor.importlib.metadata, "version", lambda package: _version(package, found))

    return install


def _version(package, found):
    if found.get(package) is None:
        raise doctor.importlib.metadata.PackageNotFoundError(package)
    return found[package]


def adaptor(monkeypatch, engine, *hooks):
    package, targets = types.ModuleType(f"semmoe.engines.{engine}"), types.ModuleType("targets")
    targets.HOOKS = hooks
    monkeypatch.setitem(sys.modules, f"semmoe.engines.{engine}", package)
    monkeypatch.setitem(sys.modules, f"semmoe.engines.{engine}.targets", targets)


def test_versions_without_importing_anything(installed):
    installed(semmoe="0.1.0", torch="2.13.0")
    found = doctor.versions()
    assert list(found) == ["python", "semmoe", "torch", "transformers", "triton", "sglang", "vllm", "deepspeed"]
    assert (found["torch"], found["vllm"]) == ("2.13.0", None)
    assert "not installed" in run().output


def test_hooks_that_resolve_and_one_that_moved(monkeypatch, installed):
    installed(semmoe="0.1.0", sglang="0.5.0")
    adaptor(monkeypatch, "sglang", Hook("json.dumps", "writes", ("obj",)))
    result = run()
    assert result.exit_code == 0, result.output
    assert "sglang 0.5.0: 1 of 1 hooks resolve" in result.output
    adaptor(monkeypatch, "sglang", Hook("json.dumps", "writes", ("obj",)), Hook("json.gone", "reads"))
    result = run("--engine", "sglang", "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert [hook["problem"] is None for hook in found["engines"][0]["hooks"]] == [True, False]
    assert "json.gone (reads) does not resolve" in found["problems"][0]
    assert "FAIL" in run().output


def test_an_engine_that_was_asked_for_and_is_not_there(installed):
    installed(semmoe="0.1.0")
    result = run("--engine", "vllm")
    assert result.exit_code == 1
    assert "vllm: not installed" in result.output
    assert json.loads(run("--engine", "vllm", "--json").stdout)["problems"] == ["vllm is not installed"]


def test_an_engine_that_prints_while_imported_leaves_json_whole(installed, monkeypatch, tmp_path):
    (tmp_path / "loud_engine.py").write_text("print('INFO: starting up')\n")
    monkeypatch.syspath_prepend(tmp_path)
    installed(sglang="1")
    adaptor(monkeypatch, "sglang", Hook("loud_engine", "speaks"))
    assert json.loads(run("--engine", "sglang", "--json").stdout)["problems"] == []


def test_a_broken_adaptor_is_a_problem_not_a_traceback(installed, monkeypatch):
    installed(sglang="1")
    adaptor(monkeypatch, "sglang", None)
    result = run("--engine", "sglang")
    assert result.exit_code == 1
    assert "the adaptor of sglang is broken" in result.output


def test_the_embedded_engine_resolves():
    pytest.importorskip("transformers")
    result = run("--engine", "transformers", "--json")
    assert result.exit_code == 0, result.output
    hooks = json.loads(result.stdout)["engines"][0]["hooks"]
    assert hooks
    assert all(hook["problem"] is None for hook in hooks)


def test_mistakes_end_in_one_line(tmp_path):
    result = run("--model", tmp_path)
    assert result.exit_code == 2
    assert "config.json is missing" in result.stderr


@pytest.mark.parametrize(("version", "said"), [("0.32.0", False), ("0.32.0+cpu", False), ("0.33.1", True)])
def test_a_version_that_nobody_tried_is_told(version, said, installed):
    installed(vllm=version)
    assert ("tried on 0.32.0, this is another version" in run("--engine", "vllm").output) == said


def test_doctor_shows_what_is_supported_of_a_configuration(tmp_path):
    rows = json.loads(run("--model", "tiny", "--json").stdout)["supported"]
    assert {(row["engine"], row["use"]) for row in rows} >= {("sglang", "copies"), ("vllm", "tokens shuffled")}
    assert all(row["state"] == "works, by a test" for row in rows)
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = json.loads(run("--model", tmp_path, "--engine", "transformers", "--json").stdout)["supported"]
    assert rows == []
    assert "refused" in run("--model", tmp_path).stdout
