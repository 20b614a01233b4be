"""Processes of ranks, started and ended together."""

import signal
import subprocess
import sys
import time

import pytest

SLOW = """
import time
print("importing", flush=True)
time.sleep(20)
"""
MAIN = """
from semmoe.runtime.launch import run_ranks

def rank(*arguments):
    pass

if __name__ == "__main__":
    try:
        run_ranks(2, rank, None, print, preload=["slow_to_import"])
    except KeyboardInterrupt:
        raise SystemExit(130)
"""


@pytest.mark.dist
def test_an_interrupt_while_ranks_start_leaves_no_process_and_says_nothing(tmp_path):
    """Only the parent is told, as by `kill -INT`, while the process that forks ranks still imports."""
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    (tmp_path / "main.py").write_text(MAIN)
    command = [sys.executable, str(tmp_path / "main.py")]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "importing\n"
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    said, _ = process.communicate(timeout=60)  # until every process that could still write has ended
    assert time.monotonic() - started < 10
    assert said == ""
    assert process.returncode == 130
