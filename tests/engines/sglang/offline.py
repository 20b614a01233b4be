"""SGLang's offline engine for the tests, with or without a plan."""

import os
from contextlib import contextmanager
from pathlib import Path

from serving import free_port

from semmoe.engines.launch import command_line
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.offline import running
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.plan import load_plan
from semmoe.topology import Topology

LIMITS = ["--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16", "--chunked-prefill-size",
          "128", "--mem-fraction-static", "0.5"]  # fmt: skip


@contextmanager
def engine(
    model: str, topology: Topology, folder: Path, plan: str = "", options: tuple[str, ...] = (), **settings: str
):
    """An engine with an all-to-all over gloo, by default in all passes; counters and `semmoe record` in `folder`."""
    os.makedirs(folder, mode=0o700, exist_ok=True)
    given = SglangSettings(plan=plan, control=str(folder), **{"path": "shuffled", **settings})
    location, redundant = None, 0
    if plan:
        made = load_plan(plan)
        location, redundant = launch.write_location(made, Path(model), folder), made.placement.redundant_experts
    words = command_line(launch.arguments(topology, location, redundant, on_cpu=True))
    words += [*LIMITS, "--port", str(free_port()), *options]  # the first of several that it takes
    with running(model, words, launch.environment(given, topology, on_cpu=True)) as made:
        yield made
