"""Loads sent to a server, and what became of them."""

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from semmoe.cli.demo import MODEL
from serving.engine import ServerError
from serving.loads import Load
from serving.server import Server

LOAD = Path(__file__).with_name("load.py")


@dataclass(frozen=True)
class Answers:
    seconds: float
    requests: list[list[float]]  # ms to the first token and to the last, of each


def run(server: Server, load: Load, output_tokens: int) -> Answers:
    """Raises ServerError if a request has no answer."""
    job = {"url": server.url, "model": str(MODEL), "prompts": load.prompts, "arrivals": load.arrivals,
           "output_tokens": output_tokens}  # fmt: skip
    words = [*server.prefix, sys.executable, str(LOAD)]
    done = subprocess.run(words, input=json.dumps(job), capture_output=True, text=True, check=False)
    server.check()
    if done.returncode:
        raise ServerError(f"the client failed\n{done.stderr[-2000:]}\n{server.log(0)}")
    return Answers(**json.loads(done.stdout))
