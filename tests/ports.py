"""Ports of this machine, and processes that listen on them."""

import socket
import subprocess
from contextlib import contextmanager

from waiting import eventually


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def listening(port, *words):
    """A process that is given a minute to listen on a port, and ended behind the block."""
    running = subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        eventually(lambda: _listens(port, running, words), 60, 0.1, words)
        yield
    finally:
        running.terminate()
        running.wait(30)


def _listens(port, running, words):
    assert running.poll() is None, words
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
