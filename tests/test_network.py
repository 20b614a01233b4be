"""The slow network of the benchmarks: links that hold their rate, and nothing left behind. Needs root."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parent.parent / "benchmarks" / "serving" / "network.py"
# Host 0 sends for a second and says how many bytes of it host 1 has taken.
TALK = """
import os, socket, sys, time
address = (os.environ["MASTER_ADDR"], 5000)
if os.environ["RANK"] == sys.argv[1]:
    while True:
        try:
            link = socket.create_connection(address)
            break
        except OSError:
            time.sleep(0.05)
    end = time.monotonic() + 1
    while time.monotonic() < end:
        link.sendall(bytes(1 << 14))
    link.close()
elif os.environ["RANK"] == "0":
    link, _ = socket.create_server(address).accept()
    started, total = time.monotonic(), 0
    while got := len(link.recv(1 << 20)):
        total += got
    print(8 * total / (time.monotonic() - started) / 1e6)
"""


def left_behind():
    return sorted(path.name for path in Path("/run/netns").glob("semmoe-*")) if Path("/run/netns").exists() else []


def on_network(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=60, check=False)


def available():
    return os.geteuid() == 0 and bool(shutil.which("ip")) and on_network("--", "true").returncode == 0


needs_root = pytest.mark.skipif(not available(), reason="no network namespaces here: they need root and iproute2")


@needs_root
@pytest.mark.parametrize(
    ("arguments", "sender", "least", "most"),
    [
        (["--hosts", "2", "--rate", "40mbit"], 1, 25, 44),
        (["--hosts", "4", "--nodes", "2", "--rate", "40mbit", "--inside", "400mbit"], 1, 100, 440),
        (["--hosts", "4", "--nodes", "2", "--rate", "40mbit", "--inside", "400mbit"], 2, 25, 44),
    ],
    ids=["uniform", "inside a node", "between nodes"],
)
def test_a_link_carries_its_rate(arguments, sender, least, most):
    done = on_network(*arguments, "--", sys.executable, "-c", TALK, str(sender))
    assert done.returncode == 0, done.stderr
    assert least < float(done.stdout) < most
    assert left_behind() == []


@needs_root
def test_the_first_failure_ends_all_and_nothing_stays():
    command = 'test "$RANK" = 0 && exit 3; sleep 60'
    started = time.monotonic()
    assert on_network("--hosts", "2", "--", "sh", "-c", command).returncode == 3
    assert time.monotonic() - started < 30
    assert left_behind() == []


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_tears_it_down(number):
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--hosts", "2", "--", "sh", "-c", "echo up; sleep 60"], stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout.readline() == b"up\n"
    process.send_signal(number)
    process.wait(timeout=30)
    assert left_behind() == []


@needs_root
def test_what_a_killed_run_left_is_removed_by_the_next():
    process = subprocess.Popen(
        [sys.executable, SCRIPT, "--hosts", "2", "--", "sh", "-c", "echo up; sleep 3"], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"up\n"
    process.kill()
    process.wait(timeout=30)
    assert left_behind()
    assert on_network("--", "true").returncode == 0
    assert left_behind() == []


def test_without_root_it_says_so(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    import network

    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(network.NetworkError, match="need root"), network.slow_network(2, "1mbit"):
        pass


@needs_root
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--hosts", "3", "--nodes", "2"], "3 hosts cannot be grouped in 2 nodes"), (["--rate", "fast"], '"fast"')],
)
def test_a_mistake_is_one_line(arguments, words):
    done = on_network(*arguments, "--", "true")
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
    assert left_behind() == []
