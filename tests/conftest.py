"""Hypothesis runs few examples, the same ones every time."""

from hypothesis import settings

settings.register_profile("small", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("small")
