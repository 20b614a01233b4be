"""Waiting for what another thread or process does."""

import time


def eventually(condition, seconds=10.0, every=0.005, what="it"):
    """Waits until a condition holds, asked every so many seconds; fails if it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not come about"
        time.sleep(every)
