"""semmoe record start, status, stop, on a folder that recorders use as a server's ranks would."""

import json
import os
import stat
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_fingerprint
from test_live_recorder import Looking, _soon  # noqa: F401  a fixture
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.core import PREFILL
from semmoe.engines.private import open_folder
from semmoe.live.recorder import files
from semmoe.live.recorder.files import Status, read_control, refuse, write_status
from semmoe.live.recorder.memory import Rows
from semmoe.traces.trace import open_trace

F = make_fingerprint(vocab_size=50, num_layers=2, num_experts=8, top_k=2)
LENGTH = 12


def run(*arguments):
    return CliRunner().invoke(app, ["record", *(str(a) for a in arguments)])


def refused(result, *words, code=2):
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.exit_code == code, result.output
    assert len(lines) == 1, result.stderr
    for word in words:
        assert word in lines[0]


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(files, "SETTLE_SECONDS", 0.0)


@pytest.fixture
def folder(tmp_path):
    open_folder(tmp_path / "control")
    return tmp_path / "control"


def server(folder, ranks=2):
    return [Looking(folder, F, rank, watch=False) for rank in range(ranks)]


def serve(recorders, requests=20, twins=0):
    """Every rank runs its own requests; the last of each goes on. The first `twins` requests have a row of zeros."""
    for rank, recorder in enumerate(recorders):
        rng = np.random.default_rng(rank)
        for r in range(requests + 1):
            tokens = rng.integers(0, 50, LENGTH)
            experts = np.argsort(rng.random((LENGTH, 2, 8)) + (tokens % 4)[:, None, None] * np.eye(8)[0], axis=2)
            if r < twins:
                experts[0] = 0
            assert recorder.poll()
            rows = Rows(np.zeros(LENGTH, int), np.arange(LENGTH), tokens, experts[..., :2])
            recorder.observe([f"{rank}-{r}"], rows)
            if r < requests:
                recorder.finish(f"{rank}-{r}", tokens)


class Polled:
    """Forward passes go on while a command runs."""

    def __init__(self, recorders):
        self._recorders, self._end = recorders, threading.Event()

    def __enter__(self):
        self._thread = threading.Thread(target=self._poll)
        self._thread.start()

    def _poll(self):
        while not self._end.wait(0.01):
            for recorder in self._recorders:
                recorder.poll()

    def __exit__(self, *exception):
        self._end.set()
        self._thread.join()


def test_rows_of_zeros_are_left_out_of_what_ranks_record(folder, tmp_path):
    recorders = server(folder)
    run("start", folder)
    serve(recorders, twins=1)
    with Polled(recorders):
        result = run("stop", folder, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert result.stderr.count("1 tokens name an expert twice in a layer and are left out; 239 are kept") == 2
    assert open_trace(tmp_path / "out").num_tokens == 478


def test_a_recording_with_many_rows_of_zeros_is_refused_and_stays(folder, tmp_path):
    recorders = server(folder)
    run("start", folder)
    serve(recorders, twins=20)
    with Polled(recorders):
        refused(run("stop", folder, "--out", tmp_path / "trace"), "20 of 240 tokens name an expert twice in a layer")
    assert not (tmp_path / "trace").exists()
    assert len(list((folder / read_control(folder).run).glob("rank-*"))) == 2


def test_what_ranks_record_becomes_a_trace_that_solve_reads(folder, tmp_path):
    recorders = server(folder)
    assert "for 2 ranks" in run("start", folder).output
    serve(recorders)
    with Polled(recorders):
        result = run("stop", folder, "--out", tmp_path / "trace")
    assert result.exit_code == 0, result.output
    assert "40 requests, 480 tokens" in result.output
    assert "2 unfinished requests are left out" in result.output
    trace = open_trace(tmp_path / "trace")
    assert (trace.num_requests, trace.num_tokens, set(trace.phase)) == (40, 480, {PREFILL})
    solved = CliRunner().invoke(
        app, ["solve", str(tmp_path / "trace"), "--ep-size", "4", "--hidden-size", "64", "--expert-size", "64",
              "--out", str(tmp_path / "plan")],
    )  # fmt: skip
    assert solved.exit_code == 0, solved.output
    files = [tmp_path / "trace", *(tmp_path / "trace").iterdir()]
    assert {stat.S_IMODE(path.stat().st_mode) for path in files} == {0o700, 0o600}
    assert list((folder / read_control(folder).run).iterdir()) == []  # users' text does not lie about twice
    refused(run("stop", folder, "--out", tmp_path / "again"), "holds no request that has ended")


def test_without_out_the_trace_lies_beside_the_ranks(folder):
    recorders = server(folder, 1)
    run("start", folder, "--sample", 0.9)
    serve(recorders)
    with Polled(recorders):
        result = json.loads(run("stop", folder, "--json").stdout)
    assert result["out"] == str(folder / result["run"] / "trace")
    assert open_trace(result["out"]).num_requests == result["requests"] < 20
    refused(run("stop", folder), "exists: choose another name")


def test_status_in_words_and_json(folder):
    assert "nothing was ever recorded here" in run("status", folder).output
    recorders = server(folder)
    run("start", folder, "--sample", 0.5, "--max-mb", 64)
    serve(recorders, 3)
    for recorder in recorders:
        recorder.poll()
    output = run("status", folder).output
    for word in ("is on: sample 0.5, at most 64 MB", "recording", "CPU us", "2 ranks"):
        assert word in output
    ranks = json.loads(run("status", folder, "--json").stdout)["ranks"]
    assert [rank["state"] for rank in ranks] == ["recording", "recording"]
    assert ranks[0]["tokens_seen"] == 4 * LENGTH
    for recorder in recorders:
        recorder.close()
    assert "rank 1: the server ended" in run("status", folder).output


def test_a_damaged_status_file_is_shown_and_disturbs_nothing(folder):
    server(folder)
    (folder / "status-00001.json").write_text('{"rank": 1, "reason": "[red]\\u001b[2J"}')
    write_status(folder, Status(rank=3, state="failed", reason="[bold]disk\x1b[2J full"))
    output = run("status", folder).output
    assert "rank 3: [bold]disk?[2J full" in output
    assert "\x1b" not in output
    (folder / "status-00001.json").write_text("{")
    assert "rank 1: " in run("status", folder).output
    assert "not valid" in run("status", folder).output


def test_files_of_another_version_end_in_one_line(folder):
    recorders = server(folder, 1)
    run("start", folder)
    for file in ("control.json", "status-00000.json"):
        content = json.loads((folder / file).read_text()) | {"of_another_version": False}
        (folder / file).write_text(json.dumps(content))
    for command in ("status", "stop"):
        refused(run(command, folder), "control.json is not valid: of_another_version: Extra inputs are not permitted")
    assert not recorders[0].poll()
    assert "of_another_version" in recorders[0].status.reason
    assert run("start", folder).exit_code == 0
    assert recorders[0].poll()
    (folder / "status-00000.json").write_text(json.dumps({"rank": 0, "of_another_version": False}))
    output = run("status", folder)
    assert output.exit_code == 0
    assert "rank 0: " in output.output
    assert "of_another_version" in output.output


def test_what_a_rank_that_is_gone_left_is_kept(folder, tmp_path, monkeypatch):
    recorders = server(folder)
    run("start", folder)
    serve(recorders)
    recorders[0].close()
    for _ in range(40):
        recorders[1].poll()  # brings to disk what has ended, and is killed then
    monkeypatch.setattr(files, "GONE_SECONDS", -1.0)
    assert "gone" in run("status", folder).output
    result = run("stop", folder, "--out", tmp_path / "trace")
    assert result.exit_code == 0, result.output
    assert "rank 1 recorded and no longer responds" in result.stderr
    assert open_trace(tmp_path / "trace").num_requests == 40


def test_a_rank_that_does_not_answer_in_time_loses_nothing(folder, tmp_path):
    recorders = server(folder)
    run("start", folder)
    serve(recorders)
    for recorder in recorders:
        recorder.poll()
    refused(run("stop", folder, "--out", tmp_path / "t", "--timeout", 0.2), "rank 0, 1 still records", code=1)
    assert not (tmp_path / "t").exists()
    with Polled(recorders):
        assert run("stop", folder, "--out", tmp_path / "t").exit_code == 0
    assert open_trace(tmp_path / "t").num_requests == 40


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--sample", "0"], "'--sample'"), (["--sample", "1.5"], "'--sample'"), (["--sample", "nan"], "'--sample'"),
        (["--max-mb", "0"], "'--max-mb'"), (["--max-tokens", "-1"], "'--max-tokens'"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused(folder, options, words):
    refused(run("start", folder, *options), words)
    assert not (folder / "control.json").exists()


def test_mistakes_end_in_one_line(folder, tmp_path):
    refused(run("start", tmp_path / "nowhere"), "does not exist")
    refused(run("status", tmp_path / "nowhere"), "does not exist")
    refused(run("stop", folder), "control.json is missing")
    assert "no server has used this folder" in run("start", folder).stderr
    refused(run("start", folder), "is on: stop it first")
    refused(run("stop", folder), "holds no request that has ended")
    assert run("start", folder).exit_code == 0
    (folder / "control.json").write_text("{")
    refused(run("status", folder), "control.json is not valid")
    assert run("start", folder).exit_code == 0  # replaces a damaged one
    folder.chmod(0o777)
    refused(run("start", folder), "can be written by others")


def test_ranks_of_different_models_are_not_merged(folder, tmp_path):
    fingerprints = [F, replace(F, tokenizer_hash="other")]
    recorders = [Looking(folder, f, rank, watch=False) for rank, f in enumerate(fingerprints)]
    run("start", folder)
    serve(recorders, 2)
    with Polled(recorders):
        refused(run("stop", folder, "--out", tmp_path / "t"), "another model or tokenizer")
    assert not (tmp_path / "t").exists()


SERVER = """
import sys, time
from pathlib import Path
import numpy as np
from semmoe.topology import Fingerprint
from semmoe.live.recorder.memory import Rows
from semmoe.live.recorder.recorder import LiveRecorder
recorder = LiveRecorder(Path(sys.argv[1]), Fingerprint(model="m", architecture_hash="a", tokenizer_hash="t",
                        vocab_size=50, num_layers=2, num_experts=8, top_k=2), 0)
print("ready", flush=True)
while not recorder.recording:
    time.sleep(0.01)
recorder.observe(["a"], Rows(np.zeros(3, int), np.arange(3), np.arange(3), np.tile([0, 1], (3, 2, 1))))
recorder.finish("a", [0, 1])
print("idle", flush=True)
sys.stdin.read()
"""


def test_a_real_process_that_idles(folder, tmp_path, monkeypatch):
    """Nobody polls when the recording is to end: the recorder's own thread sees it."""
    monkeypatch.setattr(files, "SETTLE_SECONDS", 0.5)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", SERVER, str(folder)], env=os.environ, **pipes) as process:
        assert process.stdout.readline() == "ready\n"
        assert run("start", folder).exit_code == 0
        assert process.stdout.readline() == "idle\n"
        begin = time.monotonic()
        result = run("stop", folder, "--out", tmp_path / "trace", "--timeout", 30)
        assert time.monotonic() - begin < 20
        process.stdin.close()
    assert result.exit_code == 0, result.output
    assert open_trace(tmp_path / "trace").token_ids.tolist() == [0, 1, 2]


def test_every_command_explains_itself():
    for command in ("start", "stop", "status"):
        output = run(command, "--help").output
        assert "Example" in output
        assert "semmoe record" in output


def test_a_server_that_cannot_record_says_why(folder):
    refuse(folder, 0, "passes in CUDA graphs are not recorded")
    refused(run("start", folder), "cannot record: passes in CUDA graphs are not recorded")
    assert not (folder / "control.json").exists()
    said = run("status", folder)
    assert "refused" in said.output
    assert "rank 0: passes in CUDA graphs are not recorded" in said.output
