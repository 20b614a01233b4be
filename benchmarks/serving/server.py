"""Servers for the benchmarks: plans of the shipped model, a process for each node, all ended together."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import psutil

from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.plan import save_plan
from semmoe.settings import DemoSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.dataset import LeftOut, encode, read_prompts
from serving.engine import RANKS, Command, Engine, ServerError, SetUp
from serving.network import DEVICE, Network, command_on, environment_of

MOST_PROMPTS = 1000  # of a data set
PORT, MEETING_PORT = 30477, 20477  # in network namespaces, where all ports are free
STARTS = 2  # tries: an engine may draw a port that was free a moment ago
APART = 1000  # ports between servers that are alive at the same time
PROBE = "import sys, urllib.request; sys.exit(urllib.request.urlopen(sys.argv[1], timeout=20).status != 200)"


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

    def pause(self) -> None:
        """Stop all of its processes, so that they take no core from another server; they keep what they hold."""
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def resume(self) -> None:
        for process in self.tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def ranks(self, title: str | tuple[str, ...]) -> list[psutil.Process]:
        """The processes of ranks, whose titles begin so."""
        ranks = [process for process in self.tree() if " ".join(process.cmdline()).startswith(title)]
        if len(ranks) < len(self.processes):
            raise ServerError(f"{len(ranks)} processes are called {title}, of {len(self.processes)} ranks or more")
        return ranks

    def seat(self, ranks: list[psutil.Process]) -> None:
        """Hold every rank to one core, a core of its own where there are as many.

        An engine's other processes may spin while they wait for the ranks, and the kernel then moves these about.
        """
        cores = sorted(os.sched_getaffinity(0))
        for place, process in enumerate(ranks):
            for thread in process.threads():
                os.sched_setaffinity(thread.id, {cores[place % len(cores)]})

    def check(self) -> None:
        for node, process in enumerate(self.processes):
            if process.poll() is not None:
                raise ServerError(f"node {node} ended with {process.returncode}\n{self.log(node)}")

    def log(self, node: int, most: int = 60) -> str:
        """What it wrote: from the first failure on, or the end."""
        lines = (self.folder / f"node-{node}.log").read_text(errors="replace").splitlines()
        first = next((i for i, line in enumerate(lines) if "Traceback" in line), -most)
        return "\n".join(lines[first:][:most])


def prompts(dataset: str = "") -> tuple[list[list[int]], list[list[int]]]:
    """Token ids to profile, and to serve: held-out text of other documents, or the last four fifths of a data set."""
    tokenizer, settings = load_tokenizer(str(MODEL)), DemoSettings(generate_prompts=1_000_000)
    if not dataset:
        return demo_prompts(settings, tokenizer)
    found = read_prompts(Path(dataset), LeftOut(Path(dataset), strict=True))
    ids = encode(islice(found, MOST_PROMPTS), tokenizer, settings.max_prompt_tokens)
    return ids[: len(ids) // 5], ids[len(ids) // 5 :]


def make_plan(seen: list[list[int]], attention: str, redundant: int, folder: Path) -> Path:
    """A plan of the shipped model."""
    trace, path = record(load_model(str(MODEL)), str(MODEL), seen, folder / "trace"), folder / f"plan-{attention}"
    topology = Topology.for_attention(attention, RANKS)
    save_plan(solve(trace, topology, SolveSettings(redundant_experts=redundant)), path)
    return path


@contextlib.contextmanager
def serving(
    engine: Engine, up: SetUp, folder: Path, options: dict[str, Any] | None = None, network: Network | None = None,
    timeout: float = 600, place: int = 0,
) -> Iterator[Server]:  # fmt: skip
    """A server that answers, in one process group here or a node on each host of the network. Raises ServerError.

    place: 0, 1, ... tells servers apart that are alive on a network at the same time.
    """
    port = PORT + place * APART if network else _free_port()
    prefix = ["ip", "netns", "exec", network.namespace(0)] if network else []
    server = Server([], prefix, folder, port)
    try:
        for left in reversed(range(STARTS)):
            try:
                _start_nodes(server, engine, up, options or {}, network, place)
                _wait(server, timeout)
                break
            except ServerError as error:
                if not left:
                    raise
                print(f"  a server is started once more: {error}", file=sys.stderr, flush=True)
                _end(server, engine.GRACE)
        yield server
    finally:
        _end(server, engine.GRACE)


def _start_nodes(
    server: Server, engine: Engine, up: SetUp, options: dict[str, Any], network: Network | None, place: int
) -> None:
    """Start a process for each node, with a folder that holds nothing else."""
    shutil.rmtree(server.folder, ignore_errors=True)
    server.folder.mkdir(parents=True, mode=0o700)
    server.processes.clear()
    command = engine.serve(up, server.folder, server.port, options)
    for node in range(network.hosts if network else 1):
        log = server.folder / f"node-{node}.log"
        more = engine.on_node(up, network, node, MEETING_PORT + place * APART) if network else Command([], {})
        server.processes.append(_start(command, more, log, network, node))


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def _start(command: Command, more: Command, log: Path, network: Network | None, node: int) -> subprocess.Popen:
    words, environment = command.words + more.words, dict(os.environ)
    if network is not None:
        words, environment = command_on(network, node, words), environment_of(network, node)
    environment |= command.environment | more.environment
    with log.open("w") as file:
        return subprocess.Popen(words, env=environment, stdout=file, stderr=file, start_new_session=True)


def _wait(server: Server, timeout: float) -> None:
    probe = [*server.prefix, sys.executable, "-I", "-S", "-c", PROBE, server.url + "/health"]
    end = time.monotonic() + timeout
    while subprocess.run(probe, capture_output=True, check=False).returncode:
        server.check()
        if f"{server.port}): address already in use" in server.log(0):  # its other processes stay, and never answer
            raise ServerError(f"port {server.port} was taken meanwhile")
        if time.monotonic() > end:
            raise ServerError(f"no answer within {timeout:.0f} s\n{server.log(0)}")
        time.sleep(1)


def _end(server: Server, grace: float) -> None:
    server.resume()  # what is stopped cannot end by itself
    processes = server.tree()
    for process in server.processes if grace else ():
        process.terminate()
    psutil.wait_procs(processes, timeout=grace)
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
    """What the hosts have sent so far: all traffic, the engine's own too."""
    path = f"/sys/class/net/{DEVICE}/statistics/tx_bytes"
    read = [["ip", "netns", "exec", network.namespace(h), "cat", path] for h in range(network.hosts)]
    return sum(int(subprocess.run(r, capture_output=True, text=True, check=True).stdout) for r in read)
