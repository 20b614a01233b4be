"""Run an engine's server as a child process: forward signals, and print the reason of a failed start as the last line.

Engines end a failed start with a traceback that hides the reason, and with any exit code. Plug-ins write the reason to
the control folder (`report`).
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

REASON = "fatal.txt"
LONGEST = 2000  # characters of a reason
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # prctl(2)


def report(folder: Path | None, reason: str) -> None:
    """Write, from a process of the engine, why the server cannot start or continue. Only the first reason is kept."""
    if folder is not None:
        with contextlib.suppress(OSError), (folder / REASON).open("x", encoding="utf-8") as file:
            file.write(" ".join(reason.split())[:LONGEST])


def reported(folder: Path) -> str | None:
    """The reason that a plug-in reported, or None."""
    try:
        with (folder / REASON).open(encoding="utf-8", errors="replace") as file:
            return "".join(c if c.isprintable() else " " for c in file.read(LONGEST))
    except FileNotFoundError:
        return None


def run(words: list[str], environment: dict[str, str]) -> int:
    """Run a command until it ends; returns its exit code, 128 + n where signal n ended it.

    It has its own process group, so that Ctrl-C in a terminal reaches it only once, through this process.
    """
    child = subprocess.Popen(words, env=environment, preexec_fn=partial(_as_child, os.getpid()))
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in FORWARDED}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def _as_child(parent: int) -> None:
    """In the child: create its own process group, and end when the parent ends for any reason."""
    os.setpgid(0, 0)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:  # the parent ended before the call took effect
            os.kill(os.getpid(), signal.SIGTERM)
