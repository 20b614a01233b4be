"""The `semmoe` program at the end of a pipe, on a full disk, without standard output, and interrupted as it starts."""

import os
import subprocess
import sys

import numpy as np
import pytest

CODE = "import sys; from semmoe.cli import main; sys.argv[0] = 'semmoe'; main()"
PRINTS = {  # a command for each way to print: print, typer's help, rich's console, a table, JSON
    "version": ["--version"],
    "help": ["--help"],
    "help of a command": ["solve", "--help"],
    "lines": ["record", "status", "{folder}"],
    "table": ["trace", "info", "{trace}"],
    "json": ["trace", "info", "{trace}", "--json"],
}


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    path, rng = tmp_path_factory.mktemp("trace") / "trace.npz", np.random.default_rng(0)
    experts = rng.random((120, 2, 8)).argsort(2)[:, :, :2].astype(np.uint8)
    np.savez(path, token_ids=np.arange(120) % 9, expert_ids=experts, request_offsets=np.arange(0, 121, 12))
    return str(path)


@pytest.fixture(params=PRINTS)
def words(request, trace):
    places = {"trace": trace, "folder": os.path.dirname(trace)}
    return [sys.executable, "-c", CODE, *(word.format(**places) for word in PRINTS[request.param])]


def errors(stderr):
    """The lines that are no progress bar."""
    return [line for line in stderr.splitlines() if line.strip() and "━" not in line]


def test_a_closed_pipe_ends_a_command_quietly(words):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = subprocess.run(words, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, errors(done.stderr)) == (141, [])


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_behind_standard_output_is_one_line(words):
    with open("/dev/full", "w") as full:
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 1
    assert errors(done.stderr) == ["error: standard output cannot be written: No space left on device"]


def test_closed_standard_output_is_one_line(words):
    shell = ["sh", "-c", '"$@" >&-', "sh", *words]
    done = subprocess.run(shell, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, errors(done.stderr)) == (1, ["error: standard output is closed"])


def test_a_pipe_that_both_outputs_share_may_close(trace):
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write) as pipe:
        done = subprocess.run([sys.executable, "-c", CODE, "trace", "info", trace], stdout=pipe, stderr=pipe)
    assert done.returncode == 141


@pytest.mark.parametrize("module", ["semmoe.io.console", "semmoe.cli.solve", "semmoe.cli.running"])
def test_an_interrupt_while_commands_are_imported_is_quiet(module):
    interrupt = (
        "import os, signal, sys\n"
        "class Interrupt:\n"
        "    def find_spec(self, name, *rest):\n"
        f"        if name == '{module}':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupt())\n"
    )
    done = subprocess.run([sys.executable, "-c", f"{interrupt}{CODE}", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
