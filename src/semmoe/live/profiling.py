"""Profile with an engine's server: start it, send it prompts, and record which experts their tokens choose."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.client import HTTPException
from pathlib import Path
from socket import create_server

from semmoe.live.client import Served
from semmoe.settings import ProfileSettings, RecordSettings

MOST_TOKENS = 1 << 40  # that a rank records
BEGIN_SECONDS = 1.0  # until ranks look for an order to record
START_SECONDS = 3600.0
# Tokens that a prompt finds in the cache of an earlier prompt are not routed again.
UNCACHED = {"sglang": "--disable-radix-cache", "vllm": "--no-enable-prefix-caching"}


def profile(
    engine: str, model: str, prompts: Sequence[Sequence[int]], out: Path, settings: ProfileSettings, words: list[str]
) -> Iterator[None]:
    """Write a trace of prompts of token ids to `out`; yields after each prompt. words: the engine's own options.

    The server has a rank for each GPU, or one on a CPU. Raises ValueError or ServerError.
    """
    with _server(engine, model, words) as served, served.recording(out, RecordSettings(max_tokens=MOST_TOKENS)):
        time.sleep(BEGIN_SECONDS)
        yield from served.complete(prompts, max(settings.max_new_tokens, 1), settings.batch_size)


@contextmanager
def _server(engine: str, model: str, words: list[str]) -> Iterator[Served]:
    """Run `semmoe serve` for as long as the block runs."""
    import torch

    with create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = str(torch.accelerator.device_count() or 1)
    command = [sys.executable, "-c", "from semmoe.cli import main; main()", "serve", model, "--engine", engine]
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        served, log = Served(f"http://127.0.0.1:{port}", Path(scratch) / "control"), Path(scratch) / "log"
        command += ["--port", port, "--control", str(served.folder), "--ep-size", ranks, "--attention", "dp"]
        command += ["--", UNCACHED[engine], *words]
        with log.open("wb") as file:
            environment = {**os.environ, "SEMMOE_RECORD": "1"}
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            _wait(served, process, log)
            yield served
        finally:
            process.terminate()
            process.wait()


def _wait(served: Served, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server serves. Raises ValueError with its last line if it ends before."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            served.client.read(served.url + "/health", 10.0)
            return
        except (OSError, HTTPException):
            time.sleep(1.0)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise ValueError(lines[-1].removeprefix("error: ") if lines else "the engine's server did not start")
