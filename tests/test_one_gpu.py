"""The parts of `benchmarks/one_gpu.sh`: each calls only what exists, and a part that fails or hangs stops no other."""

import os
import re
import subprocess
import sys
from pathlib import Path

import typer

from semmoe.cli import app

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "benchmarks" / "one_gpu.sh"


def run(out, *parts, **settings):
    """Exit code, and of each part its state and the reason."""
    environment = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), **settings}
    done = subprocess.run(["bash", SCRIPT, *parts], env=environment, capture_output=True, text=True, timeout=120)
    rows = [line.split("\t") for line in (out / "parts.tsv").read_text().splitlines()] if out.exists() else []
    return done.returncode, {part: (state, reason) for part, state, _, reason in rows}


def test_one_part_is_run_and_the_others_are_skipped(tmp_path):
    code, parts = run(tmp_path / "out", "machine")
    assert code == 0
    assert parts.pop("machine") == ("passed", "")
    assert len(parts) == 12
    assert set(parts.values()) == {("skipped", "not asked for")}
    assert "torch" in (tmp_path / "out" / "machine.log").read_text()


def test_a_part_that_hangs_is_ended_and_the_next_one_is_run(tmp_path):
    """The interpreter says how many GPUs there are, and then sleeps once, as a part that waits for a GPU does."""
    slow = tmp_path / "python"
    slow.write_text('#!/bin/sh\ncase "$*" in *platform*) sleep 60;; *device_count*) echo 0;; *) exit 3;; esac\n')
    slow.chmod(0o755)
    code, parts = run(tmp_path / "out", "machine", "tokens-2-dp", PYTHON=str(slow), MOST_SECONDS="18")
    assert code == 1
    assert parts["machine"][0] == "failed"
    assert parts["machine"][1].startswith("not done after ")
    assert parts["tokens-2-dp"] == ("skipped", "no time was left")
    code, parts = run(tmp_path / "out", "tokens-2-dp", "plans", PYTHON=str(slow))
    assert [parts[name][0] for name in ("plans", "tokens-2-dp")] == ["failed", "failed"]


def test_an_unknown_part_is_refused(tmp_path):
    assert run(tmp_path / "out", "speed") == (2, {})


def test_the_parts_name_files_commands_and_options_that_exist():
    text = SCRIPT.read_text().replace("\\\n", " ")
    files = set(re.findall(r"(?:benchmarks|tests)/\w+\.(?:py|sh)", text))
    assert len(files) > 5
    assert [name for name in files if not (ROOT / name).exists()] == []
    called = re.findall(r"^ +semmoe (\w+) (.*)", text, re.MULTILINE)
    assert {name for name, _ in called} == {"profile", "solve"}
    known = typer.main.get_command(app).commands
    for name, words in called:
        options = {option for parameter in known[name].params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", words)) <= options
