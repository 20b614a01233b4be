"""A server on two nodes that share nothing but a network, as users start it; what is asked, recorded and counted there.

    python benchmarks/prove_nodes.py --engine vllm|sglang [--attention dp|tp] [--out FILE]

In the engine's own environment, as root. The nodes are network namespaces; each has its own copy of the plan, its own
control folder and its own `semmoe serve` with the engine's options for several nodes (vLLM's second node is
`--headless`). Then: every answer is the plain model's; what both nodes recorded, joined by `semmoe trace merge`, has
every request once; `semmoe watch --also` sees the ranks of both, on one plan. Prints what was found and one JSON line;
exit code 1 if anything of this does not hold.
"""

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
from serving.engine import Engine, ServerError, SetUp, add_engine, engine
from serving.network import Network, NetworkError, command_on, environment_of, slow_network
from serving.server import PROBE, prompts

from semmoe.cli.demo import MODEL
from semmoe.engines.launch import command_line
from semmoe.engines.transformers import verify
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.plan import load_plan, save_plan
from semmoe.settings import GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.trace import open_trace

NODES, PORT, MEETING, REQUESTS, NEW_TOKENS = 2, 30000, 20000, 64, 8
SEMMOE = [sys.executable, "-c", "from semmoe.cli import main; main()"]


class Nodes:
    """The two nodes of one server. home: a folder for each node's plan, control folder and log."""

    def __init__(self, network: Network, home: Path) -> None:
        self.network, self.home = network, home
        self.processes: list[subprocess.Popen] = []

    def folder(self, node: int) -> Path:
        return self.home / f"node-{node}"

    def url(self, node: int) -> str:
        return f"http://{self.network.address(node)}:{PORT}"

    def on(self, node: int, *words: str, given: str = "") -> str:
        """What a command prints that runs on a node. Raises ServerError."""
        prefix = ["ip", "netns", "exec", self.network.namespace(node)]
        done = subprocess.run([*prefix, *words], input=given, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ServerError(f"{' '.join(words[:6])}: {done.stdout[-500:]} {done.stderr[-1500:]}")
        return done.stdout

    def start(self, served: Engine, attention: str, node: int) -> None:
        folder, up = self.folder(node), SetUp(name="nodes", attention=attention)
        at = served.on_node(up, self.network, node, MEETING)
        words = [*SEMMOE, "serve", str(MODEL), "--engine", served.NAME, "--plan", str(folder / "plan")]
        words += ["--control", str(folder / "control"), "--host", self.network.address(node), "--port", str(PORT)]
        words += ["--"]
        words += command_line({name: value for name, value in served.OPTIONS.items() if name != "enable_metrics"})
        words += at.words
        environment = environment_of(self.network, node) | at.environment
        with (folder / "log").open("w") as log:
            self.processes.append(
                subprocess.Popen(command_on(self.network, node, words), env=environment, stdout=log, stderr=log)
            )

    def wait(self, seconds: float = 300) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for node, process in enumerate(self.processes):
                if process.poll() is not None:
                    raise ServerError(f"node {node} ended: {(self.folder(node) / 'log').read_text()[-3000:]}")
            try:
                self.on(0, sys.executable, "-I", "-S", "-c", PROBE, self.url(0) + "/health")
                return
            except ServerError:
                time.sleep(2)
        raise ServerError(f"no answer: {[(self.folder(n) / 'log').read_text()[-2000:] for n in range(NODES)]}")

    def ask(self, given: list[list[int]]) -> list[list[int]]:
        job = json.dumps({"url": self.url(0), "prompts": given})
        return json.loads(self.on(0, sys.executable, __file__, "--engine", "vllm", "--ask", given=job))

    def end(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def started(served: Engine, attention: str, plan: Path, home: Path) -> Iterator[Nodes]:
    with slow_network(NODES, "1gbit") as network:
        nodes = Nodes(network, home)
        try:
            for node in range(NODES):
                nodes.folder(node).mkdir()
                shutil.copytree(plan, nodes.folder(node) / "plan")
                nodes.start(served, attention, node)
            nodes.wait()
            yield nodes
        finally:
            nodes.end()


def make_plan(seen: list[list[int]], attention: str, home: Path) -> Path:
    """A plan for two nodes; an attention-TP group over both is one node to it."""
    trace, dp = record(load_model(str(MODEL)), str(MODEL), seen, home / "profile"), attention == "dp"
    topology = Topology(ep_size=NODES, dp_size=NODES, num_nodes=NODES) if dp else Topology(ep_size=NODES)
    save_plan(solve(trace, topology, SolveSettings(redundant_experts=8 if dp else 0)), home / "plan")
    return home / "plan"


async def ask(job: dict[str, Any]) -> list[list[int]]:
    """Runs on node 0: all prompts at once."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as session:

        async def one(prompt: list[int]) -> list[int]:
            body = {"model": str(MODEL), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0,
                    "return_token_ids": True}  # fmt: skip
            async with session.post(job["url"] + "/v1/completions", json=body) as answer:
                told = await answer.json()
                return told["choices"][0]["token_ids"]

        return await asyncio.gather(*(one(prompt) for prompt in job["prompts"]))


def prove(nodes: Nodes, given: list[list[int]], attention: str) -> dict[str, Any]:
    model = load_model(str(MODEL))
    expected = verify.plain_generate(model, given, GenerateSettings(max_new_tokens=NEW_TOKENS))
    controls = [str(nodes.folder(node) / "control") for node in range(NODES)]
    recording = controls if attention == "dp" else controls[:1]  # of attention-TP the first rank of the group records
    for node, control in enumerate(recording):
        nodes.on(node, *SEMMOE, "record", "start", control)
    watch = [*SEMMOE, "watch", nodes.url(0), "--also", nodes.url(1), "--once", "--window", "12", "--json"]
    prefix = ["ip", "netns", "exec", nodes.network.namespace(0)]
    watching = subprocess.Popen([*prefix, *watch], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    time.sleep(3)
    told = nodes.ask(given)
    seen, problem = watching.communicate(timeout=120)
    traces = []
    for node, control in enumerate(recording):
        traces.append(str(nodes.folder(node) / "trace"))
        nodes.on(node, *SEMMOE, "record", "stop", control, "--out", traces[-1])
    nodes.on(0, *SEMMOE, "trace", "merge", *traces, "--out", str(nodes.home / "trace"))
    joined, own = open_trace(nodes.home / "trace"), [open_trace(trace).num_requests for trace in traces]
    agreement = verify.compare_outputs(model, given, expected, told)
    view = json.loads(seen) if seen else {"ranks": problem}
    return {
        "answers": len(told), "identical": agreement.identical, "outputs hold": agreement.holds,
        "requests recorded by node": own, "requests joined": joined.num_requests,
        "prompts joined": len({tuple(joined.prompt(r).tolist()) for r in range(joined.num_requests)}),
        "ranks watched": view["ranks"], **{name: view.get(name) for name in ("plans", "lar", "degraded")},
    }  # fmt: skip


def holds(found: dict[str, Any]) -> bool:
    """Whether everything is as it must be; all prompts are different."""
    nodes = found["requests recorded by node"]
    once = all(nodes) and found["requests joined"] == found["prompts joined"] == found["answers"] == sum(nodes)
    counted = found["ranks watched"] == NODES and len(found["plans"]) == 1 and found["lar"] is not None
    return found["outputs hold"] and once and counted and not found["degraded"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--attention", choices=["dp", "tp"], default="dp")
    parser.add_argument("--out", type=Path, help="append the JSON line to this file too")
    parser.add_argument("--ask", action="store_true", help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.ask:
        json.dump(asyncio.run(ask(json.load(sys.stdin))), sys.stdout)
        return 0
    served, (seen, asked) = engine(a.engine), prompts()
    given = list({tuple(prompt): prompt for prompt in asked}.values())[:REQUESTS]
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch)
        plan = make_plan(seen, a.attention, home)
        print(f"{served}, attention {a.attention}, {NODES} nodes, plan {load_plan(plan).method}", flush=True)
        try:
            with started(served, a.attention, plan, home) as nodes:
                found = prove(nodes, given, a.attention)
        except (NetworkError, ServerError) as error:
            print(f"prove_nodes.py: {error}", file=sys.stderr)
            return 1
    for name, value in found.items():
        print(f"  {name:28}{value}")
    right = holds(found)
    line = json.dumps({"engine": str(served), "attention": a.attention, "holds": right, **found})
    print("\n" + line)
    if a.out:
        with a.out.open("a") as file:
            file.write(line + "\n")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
