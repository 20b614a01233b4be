"""Where a result is to go is looked at before the work, and what goes wrong later names what the user typed."""

import errno
import json
import os
import pkgutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from test_plan import saved
from typer.testing import CliRunner

from lab.__main__ import app as lab
from lab.save import save_trace
from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.io import files
from semmoe.io.files import atomic_directory, atomic_file, check_output
from semmoe.traces.trace import open_trace

WORK = {  # command, and the function that does its work
    "calibrate": (["calibrate", "tiny"], "lab.calibrate.calibrate"),
    "profile": (["profile", "tiny"], "semmoe.engines.transformers.model.load_model"),
    "solve": (["solve", "trace.npz"], "semmoe.traces.streams.open_bounded"),
    "report": (["report", "."], "semmoe.report.page.write"),
    "apply": (["apply", "plan", "--model", "tiny"], "semmoe.checkpoint.relabel.relabel"),
    "apply sglang": (["apply", "plan", "--model", "tiny", "--to", "sglang"], "semmoe.checkpoint.relabel.relabel"),
    "reproduce": (["reproduce", "table1"], "lab.run.make"),
}
OF_LAB = {"calibrate", "reproduce"}
FILES = {"calibrate", "report", "apply sglang"}  # the others make directories
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
    result = CliRunner().invoke(lab if command in OF_LAB else app, [*WORK[command][0], "--out", out])
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


def test_what_a_replay_prints_as_json_is_found_by_a_report(tmp_path):
    saved("linear", tmp_path)
    trace = tmp_path / "trace.npz"
    ids = np.random.default_rng(0).random((240, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez(trace, token_ids=np.arange(240) % 9, expert_ids=ids, request_offsets=np.arange(0, 241, 12))
    words = ["replay", str(trace), "--ep-size", "2", "--method", "eplb", "--json"]
    (tmp_path / "replay.json").write_text(CliRunner().invoke(app, words).stdout)
    page = CliRunner().invoke(app, ["report", str(tmp_path), "--json"])
    assert [source["file"] for source in json.loads(page.stdout)["sources"]] == ["replay.json"]


def test_room_that_is_known_to_be_needed_is_looked_for(tmp_path):
    check_output(tmp_path / "small", room=1)
    with pytest.raises(OSError, match=r"1,000,000,000,000 MB are needed, and .* MB are free there: '.*large'"):
        check_output(tmp_path / "large", room=10**18)


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fail_half_way(path):
    path.write_text("half")
    raise RuntimeError("half-way")


@pytest.mark.parametrize("private", [False, True])
@pytest.mark.parametrize("before", ["", "what was there"])
def test_a_write_that_fails_leaves_nothing_but_what_was_there(tmp_path, private, before):
    path = tmp_path / "links.json"
    if before:
        path.write_text(before)
    with pytest.raises(RuntimeError, match="half-way"), atomic_file(path, private) as staged:
        fail_half_way(staged)
    assert [one.read_text() for one in tmp_path.iterdir()] == [before] * bool(before)
    with pytest.raises(RuntimeError, match="half-way"), atomic_directory(tmp_path / "plan", private) as staged:
        fail_half_way(staged / "plan.json")
    assert [one.read_text() for one in tmp_path.iterdir()] == [before] * bool(before)


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


@pytest.fixture
def inputs(tmp_path, monkeypatch):
    """A working directory with an input of each kind, and links to some; commands must leave all as they are."""
    monkeypatch.chdir(tmp_path)
    saved("linear", tmp_path).rename("plan")
    ids = np.random.default_rng(0).random((240, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez("t.npz", token_ids=np.arange(240) % 9, expert_ids=ids, request_offsets=np.arange(0, 241, 12))
    save_trace(open_trace(Path("t.npz")), Path("trace"))
    for name in ("map.json", "prompts.jsonl", "links.json"):
        Path(name).write_text("mine")
    Path("trace-link").symlink_to("trace")
    Path("t-link.npz").symlink_to("t.npz")
    os.link("t.npz", "t-hard.npz")
    before = contents(tmp_path)
    yield tmp_path
    assert contents(tmp_path) == before


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(
    ("words", "out"),
    [
        ("import trace --model tiny", "trace"),
        ("import trace-link --model tiny", "trace"),
        ("import trace --model tiny", "trace-link"),
        ("import trace --model tiny", "trace/smaller"),
        ("import trace --model tiny", "."),
        ("solve t.npz --from plan", "plan"),
        ("solve plan/../trace --ep-size 2", "trace"),
        ("import map.json --model tiny", "."),
        ("calibrate tiny", str(MODEL / "links.json")),
    ],
)
def test_an_output_is_no_input(words, out, inputs):
    result = CliRunner().invoke(lab if "calibrate" in words else app, [*words.split(), "--out", out, "--force"])
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1), result.output
    assert any(word in result.stderr for word in ("input of this command", "is a link", "other files than a plan's"))


@pytest.mark.parametrize(
    ("name", "out"),
    [
        ("t.npz", "t.npz"),
        ("t-link.npz", "t.npz"),
        ("t-hard.npz", "t.npz"),
        ("trace", "trace/a.json"),
        ("plan", "plan/plan.json"),
    ],
)
def test_a_file_to_be_written_is_no_input(name, out, inputs):
    with pytest.raises(ValueError, match="input of this command"):
        check_output(Path(out), force=True, inputs=["absent", name])


@pytest.mark.parametrize(
    ("words", "out"),
    [
        ("trace merge trace trace", "trace"),
        ("profile tiny --dataset prompts.jsonl", "."),
        ("apply plan --model tiny --to sglang", "plan/location.json"),
        ("report .", "links.json"),
        ("report plan", "plan/plan.json"),
    ],
)
def test_an_output_of_a_command_without_force_is_no_input(words, out, inputs):
    result = CliRunner().invoke(app, [*words.split(), "--out", out])
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1), result.output
    assert "input of this command" in result.stderr


@pytest.mark.parametrize("command", WORK)
def test_a_link_a_device_and_a_name_that_is_no_text_are_refused_before_the_work(command, lazy):
    ending = ".json" if command in FILES else ""
    Path(f"dangling{ending}").symlink_to("absent")
    Path("empty").mkdir()
    Path(f"link{ending}").symlink_to("file.json" if command in FILES else "empty")
    os.mkfifo(f"pipe{ending}")
    for name in (f"dangling{ending}", f"link{ending}"):
        assert "is a link: name its target" in refused(command, name)
    assert "neither a file nor a directory" in refused(command, f"pipe{ending}")
    assert "dangling" in refused(command, f"dangling{ending}/inside{ending}")
    name = os.fsdecode(b"\xff") + ending
    result = CliRunner().invoke(lab if command in OF_LAB else app, [*WORK[command][0], "--out", name])
    assert (result.exit_code, result.stderr.count("error:")) == (2, 1), result.output
    assert "is not UTF-8: choose another name" in result.stderr


def test_a_demo_refuses_what_it_can_know_before_the_work(inputs):
    for words, line in (
        (["--ep-size", "3"], "ep_size 3 does not divide 32 experts"), (["--out", "plan"], "is a plan or a trace"),
        (["--out", "trace"], "is a plan or a trace"),
    ):  # fmt: skip
        result = CliRunner().invoke(app, ["demo", *words])
        assert (result.exit_code, "profiling" in result.stderr) == (2, False)
        assert line in result.stderr


@pytest.mark.parametrize("in_one_step", [True, False])
def test_an_interrupted_replacement_leaves_the_old_folder_or_the_new_one(in_one_step, tmp_path, monkeypatch):
    """Every step of the replacement is interrupted once, before it and after it."""
    if not in_one_step:
        monkeypatch.setattr(files, "_exchange", lambda *_: False)
    real, steps = Path.replace, []
    for interrupted in range(8):
        (tmp_path / "plan").mkdir(exist_ok=True)
        (tmp_path / "plan" / "name").write_text("old")
        steps.clear()

        def replace(self, target, interrupted=interrupted):
            for act in (lambda: None, lambda: real(self, target)):
                act()
                steps.append(act)
                if len(steps) == interrupted + 1:
                    raise KeyboardInterrupt
            return target

        monkeypatch.setattr(Path, "replace", replace)
        try:
            with atomic_directory(tmp_path / "plan") as staged:
                (staged / "name").write_text("new")
        except KeyboardInterrupt:
            pass
        else:
            assert (tmp_path / "plan" / "name").read_text() == "new"
        monkeypatch.setattr(Path, "replace", real)
        assert (tmp_path / "plan" / "name").read_text() in ("old", "new")
        assert [path.name for path in tmp_path.iterdir()] == ["plan"]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux exchanges two folders in one step")
def test_a_folder_is_never_absent_while_it_is_replaced(tmp_path):
    """Killed at any moment, too: the exchange is one call of the system."""
    (tmp_path / "plan").mkdir()
    missed, end = [], threading.Event()

    def look():
        while not end.is_set():
            if not os.path.exists(tmp_path / "plan"):
                missed.append(1)

    looking = threading.Thread(target=look)
    looking.start()
    for turn in range(100):
        with atomic_directory(tmp_path / "plan") as staged:
            (staged / "turn").write_text(str(turn))
    end.set()
    looking.join()
    assert (len(missed), (tmp_path / "plan" / "turn").read_text()) == (0, "99")
