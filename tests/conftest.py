"""Hypothesis runs few examples, the same ones every time; Ctrl-C reaches the processes that tests start."""

import os
import shutil
import signal

import pytest
from hypothesis import settings

# A shell starts what it puts into the background deaf to it, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("small", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("small")


@pytest.fixture(scope="module")
def browser():
    def missing(what):
        if os.environ.get("BROWSER_TESTS") == "required":
            pytest.fail(f"{what}, and BROWSER_TESTS=required")
        pytest.skip(what)

    names = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        missing(f"no browser ({', '.join(names)})")
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError:
        missing("no playwright: pip install playwright")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield running
        running.close()
