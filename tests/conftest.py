"""Hypothesis runs few examples, the same ones every time; Ctrl-C reaches the processes that tests start."""

import signal

from hypothesis import settings

# A shell starts what it puts into the background deaf to it, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("small", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("small")
