"""Who uses a control folder: a lock that lives as long as a server, so that nobody removes a running server's state.

`semmoe serve` claims the folder before it starts an engine and holds the claim until that ends; every process of the
engine joins it, so that the claim outlives a killed parent. What stays of an ended server may be removed.
"""

import fcntl
import os
from pathlib import Path

from semmoe.engines.recorder_files import open_folder

LOCK = "owner.lock"


def claim(folder: Path) -> int:
    """Take a folder that no server uses; returns the descriptor that holds it, exclusively until `share`.

    Raises ValueError if a server that runs has it.
    """
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        message = f"{folder} is in use by a running server: stop that, or give this one another --control"
        raise ValueError(message) from None
    return descriptor


def share(descriptor: int) -> None:
    """Let the server's own processes join what was claimed."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def join(folder: Path) -> None:
    """Hold the folder, beside other processes of the same server, until this process ends."""
    open_folder(folder)
    share(_open(folder))  # never closed by us: the system does it


def _open(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
