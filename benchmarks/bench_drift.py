"""Traffic that drifts, served on a plan that stays, one that `semmoe adapt` lets follow, and one that knew the future.

    PYTHONPATH=. OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_drift.py --engine sglang|vllm
        [--attention dp|tp] [--shape block] [--requests 2400] [--schedule 0] [--profiled 200]
        [--only frozen adapt known eplb] [--out FILE]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1). The plan is profiled on the first kinds of text
(`drift.FIRST`; for the shape `stable` on all), from documents that are never served. `known` swaps, when kinds change,
to a plan profiled on what comes, without detecting, recording or solving anything. `eplb` is SGLang's own rebalance,
which moves experts by load. All get the same requests in the same order from 8 clients that wait for each answer.

What counts is the local activation rate and the bytes of the all-to-all per token and layer, over time, by the ranks'
own counters; times are not compared, since the solver takes a core of two. Recovered: how much of what the frozen plan
loses to `known` the adapting one makes good, averaged over all requests after the first change, detection and solving
included. Prints configuration, tables, one JSON line.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path

import aiohttp
from serving.engine import RANKS, Engine, ServerError, SetUp, add_engine, engine
from serving.server import Server, counters, serving

from lab import drift
from semmoe.cli.demo import MODEL
from semmoe.core import Plan
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.live.client import Served
from semmoe.settings import SwapSettings

CLIENTS, NEW_TOKENS, PERIOD, PARTS = 8, 16, 2.0, 12
COMMAND = [sys.executable, "-c", "from semmoe.cli import main; main()"]
NAMES = ("frozen", "adapt", "known", "eplb")
# Its recorder counts in this mode of its dispatcher; on a CPU rows go through ours all the same.
EPLB = {"enable_eplb": True, "eplb_rebalance_num_iterations": 200, "ep_dispatch_algorithm": "static",
        "deepep_mode": "normal"}  # fmt: skip


@dataclass
class Samples:
    """Counters of all ranks over time, and how many requests had ended."""

    rows: list[tuple[float, int, dict[str, float]]] = field(default_factory=list)

    def between(self, low: int, high: int) -> dict[str, float]:
        """The local activation rate and bytes per token and layer from one number of requests to another."""
        inside = [row for row in self.rows if low <= row[1] <= high]
        first, last = inside[0][2], inside[-1][2]
        grown = {name: last.get(name, 0) - first.get(name, 0) for name in last}
        return {
            "lar": grown["pairs.local=true"] / max(grown["pairs"], 1),
            "bytes": grown.get("all_to_all_bytes", 0) / max(grown["routed_tokens"], 1),
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--attention", choices=["dp", "tp"], default="dp")
    parser.add_argument("--shape", choices=drift.SHAPES, default="block")
    parser.add_argument("--requests", type=int, default=2400)
    parser.add_argument("--redundant-experts", type=int, default=8)
    parser.add_argument("--schedule", type=float, default=0, help="seconds; adapt also solves as often, 0: on drift")
    parser.add_argument("--profiled", type=int, default=200, help="prompts that each plan is profiled on")
    parser.add_argument("--profiled-answers", type=int, default=0, help="tokens of their answers")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES[:3]))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append the JSON line to this file too")
    return parser.parse_args()


async def drive(server: Server, prompts: list[list[int]], samples: Samples, at: dict[int, Callable[[], None]]) -> None:
    """Send all prompts from CLIENTS clients in order; call what stands at a request's place when it is sent."""
    waiting, done = iter(enumerate(prompts)), 0
    # A server may close a connection that it kept while the next request is on its way.
    timeout, connector = aiohttp.ClientTimeout(total=120), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:

        async def client() -> None:
            nonlocal done
            for i, prompt in waiting:
                if i in at:
                    threading.Thread(target=at[i], daemon=True).start()
                body = {"model": str(MODEL), "prompt": prompt, "max_tokens": NEW_TOKENS, "temperature": 0}
                async with session.post("/v1/completions", json=body) as answer:
                    if answer.status != 200:
                        raise ServerError(f"request {i}: {answer.status} {(await answer.text())[:300]}")
                    await answer.read()
                done += 1

        async def watch() -> None:
            while True:
                samples.rows.append((time.monotonic(), done, counters(server.folder)))
                await asyncio.sleep(PERIOD)

        watching = asyncio.create_task(watch())
        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        await asyncio.sleep(PERIOD)  # counters are published every second
        watching.cancel()
        samples.rows.append((time.monotonic(), done, counters(server.folder)))


@contextlib.contextmanager
def adapting(server: Server, plan: Path, a: argparse.Namespace, asked: bool) -> Iterator[None]:
    """`semmoe adapt` beside the server, if it is asked for."""
    if not asked:
        yield
        return
    words = [*COMMAND, "adapt", server.url]
    words += ["--control", str(server.folder), *drift.ADAPT, "--schedule", str(a.schedule), "--json"]
    words += ["--links", str(links_file(plan.parent))]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        yield
        if process.poll() is not None:
            raise ServerError(f"semmoe adapt ended: {process.stderr.read()[-1000:] if process.stderr else ''}")
    finally:
        process.terminate()
        process.wait()


def run(name: str, served: Engine, plans: dict[str, Path], prompts: list[list[int]], a: argparse.Namespace,
        scratch: Path) -> tuple[Samples, list[dict]]:  # fmt: skip
    """One configuration from the first request to the last; its counters over time, and adapt's decisions."""
    first = plans["all" if a.shape == "stable" else "first"]
    up = SetUp(name=name, attention=a.attention, plan=None if name == "eplb" else first)
    options = dict(served.UNCACHED)  # prompts come again, and what is cached is routed by nobody
    options |= EPLB | {"ep_num_redundant_experts": a.redundant_experts} if name == "eplb" else {}
    samples, folder = Samples(), scratch / f"server-{name}"
    with serving(served, up, folder, options) as server:
        at = {}
        if name == "known":
            at = {i: swapping(server, plans[plan]) for i, plan in drift.changes(a.shape, len(prompts))}
        with adapting(server, first, a, name == "adapt"):
            asyncio.run(drive(server, prompts, samples, at))
        log = folder / "adapt.jsonl"
        told = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
        return samples, told


def links_file(folder: Path) -> Path:
    """What links and experts cost on this machine; measured once, while no server is alive."""
    path = folder / "links.json"
    if not path.exists():
        words = [sys.executable, "-m", "lab", "calibrate", str(MODEL), "--ep-size", str(RANKS), "--out", str(path)]
        subprocess.run(words, check=True, stdout=subprocess.DEVNULL, cwd=Path(__file__).parents[1])
    return path


def swapping(server: Server, plan: Path) -> Callable[[], None]:
    from semmoe.plan import load_plan

    loaded: Plan = load_plan(plan)
    served = Served(server.url, server.folder)
    return lambda: print("  known:", served.swap(loaded, SwapSettings()).state, flush=True)


def show(found: dict[str, Samples], requests: int) -> dict[str, dict[str, list[float]]]:
    """Tables by twelfths of the requests."""
    edges = [round(i * requests / PARTS) for i in range(PARTS + 1)]
    table = {
        name: {figure: [samples.between(low, high)[figure] for low, high in pairwise(edges)]
               for figure in ("lar", "bytes")}
        for name, samples in found.items()
    }  # fmt: skip
    for figure, digits in (("lar", 3), ("bytes", 0)):
        print(f"\n  {figure} by twelfths of the requests")
        for name, figures in table.items():
            print(f"  {name:8}" + "".join(f"{value:8.{digits}f}" for value in figures[figure]))
    return table


def recovered(found: dict[str, Samples], a: argparse.Namespace) -> dict[str, float]:
    """Shares from the first change on: what the frozen plan loses of the gain, and what adapt makes good of that."""
    turns = drift.changes(a.shape, a.requests)
    start = turns[0][0] if turns else 0
    rates = {name: samples.between(start, a.requests) for name, samples in found.items()}
    out = {f"lar of {name}": rate["lar"] for name, rate in rates.items()}
    if {"frozen", "known"} <= rates.keys():
        lost = rates["known"]["lar"] - rates["frozen"]["lar"]
        out["lost of the gain"] = lost / (rates["known"]["lar"] - 1 / RANKS)
        if "adapt" in rates:
            out["recovered"] = (rates["adapt"]["lar"] - rates["frozen"]["lar"]) / lost if lost else 0.0
            sent = rates["frozen"]["bytes"] - rates["known"]["bytes"]
            out["recovered of the bytes"] = (rates["frozen"]["bytes"] - rates["adapt"]["bytes"]) / sent if sent else 0.0
    return out


def main() -> int:
    a = parse()
    served = engine(a.engine)
    print(f"{served}, torch {version('torch')}, embedded model, {RANKS} ranks on {os.cpu_count()} cores, "
          f"{platform.machine()}; {vars(a)}; adapt {' '.join(drift.ADAPT)}", flush=True)  # fmt: skip
    found, told = {}, []
    try:
        with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
            texts = drift.texts(load_tokenizer(str(MODEL)))
            plans = drift.make_plans(
                texts, a.attention, a.redundant_experts, Path(scratch), a.profiled, a.profiled_answers
            )
            if "adapt" in a.only:
                links_file(plans["first"].parent)
            prompts, _ = drift.draw(texts, a.shape, a.requests, a.seed)
            for name in a.only:
                found[name], decisions = run(name, served, plans, prompts, a, Path(scratch))
                told += decisions
                print(f"  {name}: {found[name].rows[-1][0] - found[name].rows[0][0]:.0f} s", flush=True)
    except (ServerError, ValueError, aiohttp.ClientError) as error:
        print(f"bench_drift.py: {error}", file=sys.stderr)
        return 1
    table, shares = show(found, a.requests), recovered(found, a)
    print()
    for name, value in shares.items():
        print(f"  {name:24}{value:8.3f}")
    for decision in told:
        print(f"  adapt: {decision['action']:7}{decision['why']}")
    line = {"settings": vars(a), "adapt": drift.ADAPT, "twelfths": table, "shares": shares, "decisions": told}
    line = json.dumps(line, default=str)
    print("\n" + line)
    if a.out:
        with a.out.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
