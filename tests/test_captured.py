"""What engines capture of our decode passes, in a process of its own, whose torch has a device that is not there."""

import os
import subprocess
import sys
from pathlib import Path


def test_decode_passes_can_be_captured():
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        str(Path(__file__).parent / "captured_passes.py"),
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False, env=os.environ)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "skipped" not in done.stdout
