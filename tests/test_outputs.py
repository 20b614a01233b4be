"""Where a result is to go is looked at before the work, and what goes wrong later names what the user typed."""

import errno
import json
import pkgutil
from pathlib import Path

import numpy as np
import pytest
from test_plan import saved
from typer.testing import CliRunner

from lab.__main__ import app as lab
from semmoe.cli import app
from semmoe.files import atomic_directory, atomic_file, check_output

WORK = {  # command, and the function that does its work
    "calibrate": (["calibrate", "tiny"], "semmoe.engines.transformers.calibrate.calibrate"),
    "generate": (["generate", "tiny", "--prompt", "x"], "semmoe.engines.transformers.generate.generate"),
    "profile": (["profile", "tiny"], "semmoe.engines.transformers.model.load_model"),
    "replay": (["replay", "trace.npz"], "semmoe.trace.open_trace"),
    "affinity": (["affinity", "trace.npz"], "semmoe.trace.open_trace"),
    "solve": (["solve", "trace.npz"], "semmoe.trace.open_trace"),
    "report": (["report", "."], "semmoe.report.page.write"),
    "apply": (["apply", "plan", "--model", "tiny"], "semmoe.checkpoint.relabel.relabel"),
    "apply sglang": (["apply", "plan", "--model", "tiny", "--to", "sglang"], "semmoe.checkpoint.relabel.relabel"),
    "reproduce": (["reproduce", "table1"], "lab.run.make"),
}
FILES = {"affinity", "calibrate", "generate", "replay", "report", "apply sglang"}  # the others make directories
REPLACES = {"profile", "report", "reproduce"}  # a profile resumes, a page is made again, items add to a folder


@pytest.fixture
def lazy(tmp_path, monkeypatch):
    """Commands whose work must not begin."""
    monkeypatch.chdir(tmp_path)
    functions = [function for _, function in WORK.values()]
    for function in functions:
        pkgutil.resolve_name(function)  # imported before any is replaced, or a module would keep a replaced one
    for function in functions:
        monkeypatch.setattr(function, lambda *args, **more: pytest.fail("the work began"))
    (tmp_path / "file.json").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "thesis.txt").write_text("mine")


def refused(command: str, out: str) -> str:
    result = CliRunner().invoke(lab if command == "reproduce" else app, [*WORK[command][0], "--out", out])
    assert result.exit_code == 2, result.output
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert len(lines) == 1
    assert out in lines[0]
    assert ".partial" not in result.stderr
    return lines[0]


@pytest.mark.parametrize("command", WORK)
def test_what_cannot_be_written_is_refused_before_the_work(command, lazy):
    ending = ".json" if command in FILES else ""
    assert "file.json is a file" in refused(command, f"file.json/inside{ending}")
    refused(command, f"/proc/semmoe{ending}")
    assert "too long" in refused(command, f"{'x' * 250}{ending}").lower()


@pytest.mark.parametrize("command", WORK)
def test_the_other_kind_is_refused(command, lazy):
    if command in FILES:
        (Path("folder.json")).mkdir()
        assert "is a directory: name a file" in refused(command, "folder.json")
    else:
        assert "is a file: name a directory" in refused(command, "file.json")


@pytest.mark.parametrize("command", sorted(set(WORK) - REPLACES))
def test_what_is_there_is_kept(command, lazy):
    refused(command, "file.json" if command in FILES else "folder")
    assert Path("file.json").read_text() == Path("folder/thesis.txt").read_text() == "mine"


def test_a_plan_is_replaced_by_force_alone(tmp_path):
    plan = saved("linear", tmp_path)
    before = (plan / "plan.json").read_bytes()
    trace = tmp_path / "trace.npz"
    ids = np.random.default_rng(0).random((240, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez(trace, token_ids=np.arange(240) % 9, expert_ids=ids, request_offsets=np.arange(0, 241, 12))
    words = ["solve", str(trace), "--ep-size", "2", "--method", "linear", "--out", str(plan)]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2
    assert "give --force to replace it" in result.stderr
    assert (plan / "plan.json").read_bytes() == before
    assert CliRunner().invoke(app, [*words, "--force"]).exit_code == 0
    assert (plan / "plan.json").read_bytes() != before


def test_a_replay_and_the_statistics_of_a_trace_are_left_as_json_that_a_report_finds(tmp_path):
    saved("linear", tmp_path)
    trace = tmp_path / "trace.npz"
    ids = np.random.default_rng(0).random((240, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez(trace, token_ids=np.arange(240) % 9, expert_ids=ids, request_offsets=np.arange(0, 241, 12))
    for words in (["replay", str(trace), "--ep-size", "2", "--method", "eplb"], ["affinity", str(trace)]):
        out = tmp_path / f"{words[0]}.json"
        result = CliRunner().invoke(app, [*words, "--json", "--out", str(out)])
        assert json.loads(out.read_text()) == json.loads(result.stdout)
    page = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert {"replay.json", "affinity.json"} <= {source["file"] for source in json.loads(page.stdout)["sources"]}


def test_the_result_of_a_run_stands_beside_its_completions(tmp_path, lazy):
    Path("mine.json").write_text("mine")
    assert "mine.json" in refused_beside("mine.jsonl")
    assert not Path("mine.jsonl").exists()


def refused_beside(out: str) -> str:
    """Of a run whose completions could be written, and not the result beside them."""
    result = CliRunner().invoke(app, [*WORK["generate"][0], "--out", out])
    assert result.exit_code == 2, result.output
    return result.stderr


def test_room_that_is_known_to_be_needed_is_looked_for(tmp_path):
    check_output(tmp_path / "small", room=1)
    with pytest.raises(ValueError, match=r"large needs 1,000,000,000,000 MB, and .* MB are free"):
        check_output(tmp_path / "large", room=10**18)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_errors_of_the_system_name_what_the_user_typed(tmp_path):
    with pytest.raises(OSError, match="No space") as file, atomic_file(tmp_path / "links.json"):
        full_disk()
    with pytest.raises(OSError, match="No space") as folder, atomic_directory(tmp_path / "plan"):
        full_disk()
    with pytest.raises(FileNotFoundError) as inside, atomic_directory(tmp_path / "plan") as staged:
        (staged / "absent").read_text()
    with pytest.raises(FileNotFoundError) as elsewhere, atomic_file(tmp_path / "links.json"):
        (tmp_path / "input").read_text()
    names = [Path(error.value.filename).name for error in (file, folder, inside, elsewhere)]
    assert names == ["links.json", "plan", "plan", "input"]
    assert not list(tmp_path.iterdir())
