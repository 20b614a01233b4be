"""SGLang servers for the benchmarks: plans of the shipped model, a process for each node, all ended together."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from network import DEVICE, Network, command_on, environment_of

from semmoe.core import Topology
from semmoe.demo import MODEL, demo_prompts
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.settings import PluginSettings
from semmoe.engines.transformers.model import load_model, load_tokenizer
from semmoe.engines.transformers.recorder import record
from semmoe.plan import load_plan, save_plan
from semmoe.settings import DemoSettings, SolveSettings
from semmoe.solve import solve

RANKS = 2
PORT, MEETING_PORT = 30477, 20477  # in network namespaces, where all ports are free
# Of every server, vanilla or not. Each rank needs little memory, and what it holds at most is the same everywhere.
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "max_running_requests": 64, "max_total_tokens": 65536, "chunked_prefill_size": 1024,
    "mem_fraction_static": 0.1, "random_seed": 0, "log_level": "warning",
}  # fmt: skip
PROBE = "import sys, urllib.request; sys.exit(urllib.request.urlopen(sys.argv[1], timeout=20).status != 200)"


class ServerError(Exception):
    """Why a server did not start, or ended; one line, and then the end of its log."""


@dataclass(frozen=True, kw_only=True)
class SetUp:
    name: str
    attention: str
    plan: Path | None = None  # none: vanilla
    shuffle: str = "layer"


@dataclass(frozen=True)
class Server:
    processes: list[subprocess.Popen]
    prefix: list[str]  # of a command that runs where node 0 runs
    folder: Path  # counters and logs
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def tree(self) -> list[psutil.Process]:
        """Its processes that run, with all that they started."""
        found = []
        for process in self.processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                root = psutil.Process(process.pid)
                found += [root, *root.children(recursive=True)]
        return found

    def check(self) -> None:
        for node, process in enumerate(self.processes):
            if process.poll() is not None:
                raise ServerError(f"node {node} ended with {process.returncode}\n{self.log(node)}")

    def log(self, node: int, most: int = 60) -> str:
        """What it wrote: from the first failure on, or the end."""
        lines = (self.folder / f"node-{node}.log").read_text(errors="replace").splitlines()
        first = next((i for i, line in enumerate(lines) if "Traceback" in line), -most)
        return "\n".join(lines[first:][:most])


def prompts() -> tuple[list[list[int]], list[list[int]]]:
    """Token ids to profile, and of other documents to serve."""
    return demo_prompts(DemoSettings(generate_prompts=1_000_000), load_tokenizer(str(MODEL)))


def make_plans(seen: list[list[int]], attentions: Sequence[str], redundant: int, folder: Path) -> dict[str, Path]:
    """By attention, a plan of the shipped model."""
    trace, plans = record(load_model(str(MODEL)), str(MODEL), seen, folder / "trace"), {}
    for attention in attentions:
        plan = solve(trace, Topology.for_attention(attention, RANKS), SolveSettings(redundant_experts=redundant))
        plans[attention] = folder / f"plan-{attention}"
        save_plan(plan, plans[attention])
    return plans


@contextlib.contextmanager
def serving(
    up: SetUp, folder: Path, options: dict[str, Any] | None = None, network: Network | None = None, timeout: float = 300
) -> Iterator[Server]:
    """A server that answers, in one process group here or a node on each host of the network. Raises ServerError."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, mode=0o700)
    port = PORT if network else _free_port()
    words, environment = server_command(up, folder, {"port": port} | (options or {}))
    nodes = network.hosts if network else 1
    prefix = ["ip", "netns", "exec", network.namespace(0)] if network else []
    server = Server([], prefix, folder, port)
    try:
        for node in range(nodes):
            server.processes.append(_start(words, environment, folder / f"node-{node}.log", network, node))
        _wait(server, timeout)
        yield server
    finally:
        _end(server)


def server_command(up: SetUp, folder: Path, options: dict[str, Any]) -> tuple[list[str], dict[str, str]]:
    """SGLang's own command for the set-up, as `semmoe serve` has it, and what to add to the environment."""
    topology, location, redundant = Topology.for_attention(up.attention, RANKS), None, 0
    if up.plan is not None:
        plan = load_plan(up.plan)
        location, redundant = launch.write_location(plan, MODEL, folder), plan.placement.redundant_experts
    values = launch.arguments(topology, location, redundant, on_cpu=True) | OPTIONS | options
    settings = PluginSettings(plan=str(up.plan or ""), shuffle=up.shuffle, control=str(folder))
    words = [sys.executable, "-m", "sglang.launch_server", "--model-path", str(MODEL)]
    return words + launch.command_line(values), launch.environment(settings, topology, on_cpu=True)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _start(
    words: list[str], environment: dict[str, str], log: Path, network: Network | None, node: int
) -> subprocess.Popen:
    inherited = dict(os.environ)
    if network is not None:
        at = {"nnodes": network.hosts, "node_rank": node, "dist_init_addr": f"{network.address(0)}:{MEETING_PORT}"}
        words = command_on(network, node, words + launch.command_line(at))
        inherited = environment_of(network, node) | {"SGLANG_HOST_IP": network.address(node)}
    with log.open("w") as file:
        return subprocess.Popen(words, env=inherited | environment, stdout=file, stderr=file, start_new_session=True)


def _wait(server: Server, timeout: float) -> None:
    probe = [*server.prefix, sys.executable, "-I", "-S", "-c", PROBE, server.url + "/health"]
    end = time.monotonic() + timeout
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        server.check()
        if time.monotonic() > end:
            raise ServerError(f"no answer within {timeout:.0f} s\n{server.log(0)}")
        time.sleep(1)


def _end(server: Server) -> None:
    processes = server.tree()
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=30)
    for process in server.processes:
        process.wait()


def counters(folder: Path) -> dict[str, float]:
    """All counters, summed over processes: by name, and by name and label's value (`scheduled_requests.by=plan`)."""
    out: dict[str, float] = defaultdict(float)
    for path in sorted(folder.glob("activity-*.json")):
        for sample in json.loads(path.read_text())["samples"]:
            out[sample["name"]] += sample["value"]
            for label, value in sample["labels"].items():
                out[f"{sample['name']}.{label}={value}"] += sample["value"]
    return dict(out)


def link_bytes(network: Network) -> int:
    """What the hosts have sent so far: all traffic, SGLang's own too."""
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    read = [["ip", "netns", "exec", network.namespace(h), "cat", path] for h in range(network.hosts)]
    return sum(int(subprocess.run(r, capture_output=True, text=True, check=True).stdout) for r in read)
