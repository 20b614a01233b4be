"""A control folder belongs to one running server, and an engine's server runs as a child that ends with its parent."""

import os
import signal
import subprocess
import sys

import pytest
from waiting import eventually

from semmoe.engines import ownership, supervisor

JOIN = "import sys, time; from pathlib import Path; from semmoe.engines.ownership import join\n" \
       "join(Path(sys.argv[1])); print('joined', flush=True); time.sleep(60)"  # fmt: skip
RUN = "import os, sys; from semmoe.engines.supervisor import run\n" \
      "raise SystemExit(run([sys.executable, '-c', sys.argv[1]], dict(os.environ)))"  # fmt: skip
WAITS = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"


def started(script, *arguments):
    """A process, and the first line that it printed."""
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_folder_that_a_process_has_joined_cannot_be_claimed(tmp_path):
    process, _ = started(JOIN, str(tmp_path))
    try:
        with pytest.raises(ValueError, match="in use by a running server: stop that, or give this one another"):
            ownership.claim(tmp_path)
    finally:
        process.kill()
        process.wait()
    os.close(ownership.claim(tmp_path))  # what stays of an ended server keeps nobody out


def test_a_claim_holds_until_it_is_let_go_and_lets_the_servers_processes_join(tmp_path):
    held = ownership.claim(tmp_path)
    with pytest.raises(ValueError, match="in use"):
        ownership.claim(tmp_path)
    ownership.share(held)
    process, said = started(JOIN, str(tmp_path))
    assert said == "joined"
    os.close(held)
    with pytest.raises(ValueError, match="in use"):  # the parent is gone, a rank of it lives
        ownership.claim(tmp_path)
    process.kill()
    process.wait()


def test_the_exit_code_is_the_childs():
    for script, code in (("raise SystemExit(7)", 7), ("import os; os.kill(os.getpid(), 9)", 137)):
        assert supervisor.run([sys.executable, "-c", script], dict(os.environ)) == code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_parent_reaches_the_child(number):
    """A script of Python's that ends by SIGINT says so by a traceback; by SIGTERM by the signal."""
    process, child = started(RUN, WAITS)
    process.send_signal(number)
    assert process.wait(timeout=20) == 128 + number
    assert not alive(int(child))


def test_a_child_ends_with_a_parent_that_is_killed():
    process, child = started(RUN, WAITS)
    process.kill()
    process.wait()
    eventually(lambda: not alive(int(child)), 20, 0.05)


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"  # a zombie waits for whoever collects it
    except FileNotFoundError:
        return False


def test_the_first_reason_is_kept_as_one_printable_line(tmp_path):
    assert supervisor.reported(tmp_path) is None
    supervisor.report(tmp_path, "the plan is\n for\x1b[31m another model")
    supervisor.report(tmp_path, "a rank that was ended for that")
    supervisor.report(None, "nowhere to leave it")
    assert supervisor.reported(tmp_path) == "the plan is for [31m another model"
