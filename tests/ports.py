"""Ports of this machine, and processes that listen on them."""

import socket
import subprocess
import time
from contextlib import contextmanager


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


@contextmanager
def listening(port, *words):
    """A process that is given a minute to listen on a port, and ended behind the block."""
    running = subprocess.Popen([*map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        until = time.monotonic() + 60
        while not _listens(port):
            assert running.poll() is None, words
            assert time.monotonic() < until, words
            time.sleep(0.1)
        yield
    finally:
        running.terminate()
        running.wait(30)


def _listens(port):
    with socket.socket() as trial:
        return trial.connect_ex(("127.0.0.1", port)) == 0
