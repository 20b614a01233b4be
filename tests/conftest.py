"""Hypothesis runs few examples, the same ones every time; Ctrl-C reaches the processes that tests start."""

import os
import shutil
import signal

import pytest
from hypothesis import settings

# A shell starts what it puts into the background deaf to it, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Files that run side by side start in this order, the longest first, then all others. One worker compiles numba's
# kernels in test_generate.py; meanwhile the other runs files that need few kernels.
FIRST = (
    "test_release.py",
    "test_demo.py",
    "test_generate.py",
    "test_captured.py",
    "test_history_kernels.py",
    "test_shuffle_kernels.py",
    "test_reproduce.py",
    "test_readme.py",
    "test_calibrate.py",
    "test_placement_moves.py",
    "test_cli.py",
    "test_placement_cocluster.py",
    "test_live_swap.py",
    "test_options.py",
    "test_docs.py",
    "test_argsort.py",
    "test_kernels_at_real_shapes.py",
    "test_examples.py",
    "test_console.py",
    "test_shuffler.py",
    "test_methods_paper.py",
    "test_effort.py",
)

settings.register_profile("small", max_examples=25, deadline=None, derandomize=True, database=None)
settings.load_profile("small")


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(FIRST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))


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
