"""Lock a control folder for as long as a server runs, so that a running server's state is not removed.

`semmoe serve` claims the folder before it starts an engine and holds the claim until the engine ends. Every process of
the engine joins the claim, so that it outlives a killed parent. Files of a server that ended may be removed.
"""

import fcntl
import os
from pathlib import Path

from semmoe.engines.private import open_folder

LOCK = "owner.lock"


def claim(folder: Path) -> int:
    """Claim a folder that no server uses; returns the descriptor of the lock, which is exclusive until `share`.

    Raises ValueError if a running server has claimed it.
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
    """Make the lock shared, so that the server's own processes can join it."""
    fcntl.flock(descriptor, fcntl.LOCK_SH)


def join(folder: Path) -> None:
    """Hold a shared lock on the folder, with other processes of the same server, until this process ends."""
    open_folder(folder)
    share(_open(folder))  # closed by the system when the process ends


def _open(folder: Path) -> int:
    return os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
