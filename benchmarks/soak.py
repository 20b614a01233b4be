"""A soak of one engine's server on a plan: thousands of requests, some bad, every answer checked, memory watched.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/soak.py --engine sglang|vllm
        [--requests 10000] [--concurrency 1000] [--attention dp|tp] [--plan DIR | --vanilla] [--out FILE]
        [--swap-every 200]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1). OpenAI's interface and SGLang's own, streaming
and not, short prompts of real text, greedy in float32. Some clients hang up and some requests are malformed. Checked at
the end, exit code 1 if any of it fails: every answer's tokens are those of plain transformers, but for near-ties of its
arg-max; every request ended, in an answer, the hang-up that was meant or an HTTP error; no good request was refused;
memory is flat after the first tenth; the plug-in's counters add up; the server is idle then, and answers. Raises the
limit of open files as --concurrency needs. Prints configuration, tables, one JSON line.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import resource
import sys
import tempfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from serving.engine import RANKS, Engine, ServerError, SetUp, add_engine, engine
from serving.requests import (
    ACCEPTED,
    HUNG_UP,
    LOST,
    MALFORMED,
    NEAR_TIE,
    RIGHT,
    WRONG,
    Request,
    make_references,
    make_requests,
    send,
)
from serving.server import Server, counters, make_plan, prompts, serving

from semmoe.checkpoint.directory import config_count, read_config
from semmoe.cli.demo import MODEL
from semmoe.core import Plan
from semmoe.live.client import Served
from semmoe.live.status import SwapStatus
from semmoe.plan import load_plan
from semmoe.settings import SwapSettings

PERIOD = 5.0  # seconds between samples of memory
LEAST_REQUESTS = 2000  # fewer do not tell a leak from a cache that fills


@dataclass
class Record:
    """What has been seen so far."""

    total: int
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)  # by kind of request and outcome
    tokens: int = 0  # that answers took at least: one of the prompt, whose rest may be cached, and all new but the last
    memory: list[tuple[int, float]] = field(default_factory=list)  # requests ended, MB of all processes
    begin: float = field(default_factory=time.monotonic)

    @property
    def ended(self) -> int:
        return sum(self.outcomes.values())

    def note(self, request: Request, outcome: str) -> None:
        self.outcomes[request.kind, outcome] += 1
        if outcome in (RIGHT, NEAR_TIE, WRONG):
            self.tokens += request.new_tokens

    def count(self, outcome: str, kind: str = "") -> int:
        return sum(n for (k, o), n in self.outcomes.items() if o.startswith(outcome) and kind in ("", k))

    def growth(self) -> dict[str, float]:
        """MB after the first tenth of the requests and at the end, and per 1,000 requests by a linear fit."""
        after = [(n, mb) for n, mb in self.memory if n >= self.total / 10]
        if len(after) < 2 or after[0][0] == after[-1][0]:
            return {"first_mb": self.memory[0][1], "last_mb": self.memory[-1][1], "mb_per_1000_requests": 0.0}
        slope = float(np.polyfit(*zip(*after, strict=True), 1)[0])
        return {"first_mb": after[0][1], "last_mb": after[-1][1], "mb_per_1000_requests": 1000 * slope}


async def soak(server: Server, requests: list[Request], concurrency: int, patience: float, swaps: "Swaps") -> Record:
    record, waiting = Record(len(requests)), iter(requests)
    timeout, connector = aiohttp.ClientTimeout(total=patience), aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(server.url, timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for request in waiting:
                record.note(request, await send(session, request))
                swaps.count(record.ended)

        watch = asyncio.create_task(_watch(server, record))
        await asyncio.gather(*(client() for _ in range(concurrency)))
        await asyncio.to_thread(swaps.wait)
        watch.cancel()
    record.memory.append((record.ended, _memory(server)))
    return record


class Swaps:
    """Swaps to one plan after another, each when so many more requests have ended; in a thread of its own."""

    def __init__(self, server: Server, plans: list[Plan], every: int) -> None:
        self._server, self._plans, self._every = server, plans, every
        self._pool, self._asked = ThreadPoolExecutor(1), []

    def count(self, ended: int) -> None:
        if self._every and ended // self._every > len(self._asked):
            plan = self._plans[len(self._asked) % len(self._plans)]
            layers = len(self._asked) % 4
            self._asked.append(self._pool.submit(self._swap, plan, layers))

    def _swap(self, plan: Plan, layers: int) -> SwapStatus:
        served = Served(self._server.url, self._server.folder)
        return served.swap(plan, SwapSettings(layers_per_pass=layers))

    def wait(self) -> None:
        self._pool.shutdown()

    def judged(self) -> tuple[bool, str]:
        """Whether all are done, and how long passes waited for one step of them."""
        failed = [error for one in self._asked if (error := one.exception()) is not None]
        done = [one.result() for one in self._asked if one.exception() is None]
        longest = max((status.longest for status in done), default=0.0)
        good = not failed and all(status.state == "done" for status in done)
        return good, f"{len(done)} of {len(self._asked)}, longest step {1000 * longest:.0f} ms; {failed[:1] or ''}"


def other_plans(path: Path, number: int = 4) -> list[Plan]:
    """The plan at `path` with its copies at other places, at random, and the other copy choice in turn."""
    plan, out = load_plan(path), []
    for seed in range(number):
        rng = np.random.default_rng(seed)
        rows = np.stack([rng.permutation(row) for row in plan.placement.physical_to_logical_map])
        choice = ("static", "cover")[seed % 2]
        placement = replace(plan.placement, physical_to_logical_map=rows, static_dispatch=None, copy_choice=choice)
        out.append(replace(plan, placement=placement))
    return out


async def _watch(server: Server, record: Record) -> None:
    while True:
        record.memory.append((record.ended, _memory(server)))
        seconds, alive = time.monotonic() - record.begin, all(p.poll() is None for p in server.processes)
        print(f"  {record.ended} of {record.total} requests, {seconds:.0f} s, {record.memory[-1][1]:.0f} MB, "
              f"{record.count(WRONG)} wrong, {record.count(LOST)} lost{'' if alive else ', THE SERVER ENDED'}",
              file=sys.stderr, flush=True)  # fmt: skip
        await asyncio.sleep(PERIOD)


def _memory(server: Server) -> float:
    total = 0
    for process in server.tree():
        try:
            total += process.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return total / 1e6


async def last_answers(engine: Engine, server: Server, requests: list[Request]) -> tuple[list[str], list[int]]:
    """What becomes of a few good requests now, and then how many each rank has."""
    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(server.url, timeout=timeout) as session:
        outcomes = [await send(session, request) for request in requests]
        await asyncio.sleep(2)  # until counters and loads are published
        return outcomes, await engine.busy(session)


def checks(
    record: Record, outcomes: list[str], busy: list[int], found: dict[str, float], a: argparse.Namespace
) -> dict[str, tuple[bool, str]]:
    """By name: whether it holds, and figures."""
    answers, ended = record.count(RIGHT) + record.count(NEAR_TIE) + record.count(WRONG), record.ended
    refused, growth = record.count("HTTP") - sum(record.count("HTTP", k) for k in MALFORMED), record.growth()
    slope, enough = growth["mb_per_1000_requests"], record.total >= LEAST_REQUESTS
    return {
        "answers are right": (not record.count(WRONG), f"{record.count(RIGHT)} right, {record.count(NEAR_TIE)} "
                              f"near-ties, {record.count(WRONG)} wrong"),
        "none is lost": (ended == record.total and not record.count(LOST), f"{ended} of {record.total} ended: "
                         f"{answers} answers, {record.count(HUNG_UP)} hang-ups, {record.count('HTTP')} HTTP errors, "
                         f"{record.count(ACCEPTED)} malformed but accepted, {record.count(LOST)} lost"),
        "no good request is refused": (not refused, f"{refused} refused"),
        "memory is flat": (slope <= a.growth or not enough, f"{growth['first_mb']:.0f} MB after a tenth, "
                           f"{growth['last_mb']:.0f} MB at the end, {slope:+.2f} MB per 1,000 requests, "
                           + (f"at most {a.growth:g}" if enough else f"not judged under {LEAST_REQUESTS} requests")),
        "the server answers": (set(outcomes) <= {RIGHT, NEAR_TIE}, ", ".join(outcomes)),
        "the server is idle": (bool(busy) and not any(busy), f"{busy} requests on the ranks"),
        "the counters add up": counters_add_up(record, answers, len(outcomes), found, a),
    }  # fmt: skip


def counters_add_up(
    record: Record, answers: int, more: int, found: dict[str, float], a: argparse.Namespace
) -> tuple[bool, str]:
    """Every answer's tokens were routed; attention-DP: every answer was scheduled, `more` too, and no request twice."""
    routed = found.get("routed_tokens", 0) / config_count(read_config(MODEL), "num_hidden_layers")
    words, good = [f"{routed:.0f} tokens routed, {record.tokens} for answers at least"], routed >= record.tokens
    if a.attention == "dp" and not a.vanilla:
        scheduled, failures = found.get("scheduled_requests", 0), found.get("schedule_failures", 0)
        good = good and answers + more <= scheduled <= record.total + more and not failures
        by = {key.split(".")[1]: int(n) for key, n in found.items() if key.startswith("scheduled_requests.")}
        words += [f"{scheduled:.0f} requests scheduled {by}, {failures:.0f} failures"]
    return good, "; ".join(words)


def show(record: Record, judged: dict[str, tuple[bool, str]]) -> None:
    print(f"\n  {'request':34}{'outcome':34}{'count':>8}")
    for (kind, outcome), count in sorted(record.outcomes.items()):
        print(f"  {kind:34}{outcome:34}{count:8}")
    print()
    for name, (good, words) in judged.items():
        print(f"  {'ok  ' if good else 'FAIL'}  {name:30}{words}")


def raise_open_files(wanted: int) -> None:
    """Every client and the server's end of it needs a file. Raises ValueError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < wanted:
        raise ValueError(f"{wanted} open files are needed, {hard} allowed: raise `ulimit -Hn` or lower --concurrency")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--concurrency", type=int, default=1_000)
    parser.add_argument("--attention", choices=["dp", "tp"], default="dp")
    parser.add_argument("--redundant-experts", type=int, default=0, help="of the plan")
    parser.add_argument("--plan", type=Path, help="a plan of the embedded model, instead of making one")
    parser.add_argument("--vanilla", action="store_true", help="without a plan, to compare with")
    parser.add_argument("--swap-every", type=int, default=0, help="swap the plan whenever so many requests have ended")
    parser.add_argument("--prompts", type=int, default=200, help="distinct ones")
    parser.add_argument("--hang-ups", type=float, default=0.05, help="share of requests")
    parser.add_argument("--malformed", type=float, default=0.02, help="share of requests")
    parser.add_argument("--growth", type=float, default=5.0, help="most MB per 1,000 requests, of all processes")
    parser.add_argument("--patience", type=float, default=900.0, help="seconds until a request is lost")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    return parser.parse_args()


def run(served: Engine, a: argparse.Namespace, scratch: Path) -> tuple[Record, dict[str, tuple[bool, str]]]:
    seen, held_out = prompts()
    plan = a.plan.resolve() if a.plan else None
    if plan is None and not a.vanilla:
        plan = make_plan(seen, a.attention, a.redundant_experts, scratch)
    references = make_references(held_out, a.prompts, random.Random(a.seed))
    requests = make_requests(served, references, a.requests, a.hang_ups, a.malformed, a.seed)
    good = make_requests(served, references, 8, 0, 0, a.seed + 1)
    up = SetUp(name="soak", attention=a.attention, plan=plan)
    with serving(served, up, scratch / "server") as server:
        time.sleep(2)  # until counters are published
        before = counters(server.folder)
        swaps = Swaps(server, other_plans(plan) if plan and a.swap_every else [], a.swap_every)
        record = asyncio.run(soak(server, requests, a.concurrency, a.patience, swaps))
        seconds = time.monotonic() - record.begin
        print(f"\n{record.ended} requests in {seconds:.0f} s, {record.ended / seconds:.1f} a second")
        server.check()
        outcomes, busy = asyncio.run(last_answers(served, server, good))
        counted = {name: n - before.get(name, 0) for name, n in counters(server.folder).items()}
        judged = checks(record, outcomes, busy, counted, a)
        return record, judged | ({"swaps are done": swaps.judged()} if a.swap_every else {})


def main() -> int:
    a = parse()
    served = engine(a.engine)
    print(f"{served}, torch {version('torch')}, embedded model, {RANKS} ranks on {os.cpu_count()} "
          f"cores, {platform.machine()}; {vars(a)}; {served.OPTIONS}", flush=True)  # fmt: skip
    try:
        raise_open_files(4 * a.concurrency + 1000)
        with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
            record, judged = run(served, a, Path(scratch))
    except (ServerError, ValueError, aiohttp.ClientError) as error:
        print(f"soak.py: {error}", file=sys.stderr)
        return 1
    show(record, judged)
    outcomes = {f"{kind}: {outcome}": count for (kind, outcome), count in sorted(record.outcomes.items())}
    line = json.dumps({"settings": vars(a), "outcomes": outcomes, "memory": record.growth(),
                       "checks": {name: good for name, (good, _) in judged.items()}}, default=str)  # fmt: skip
    print("\n" + line)
    if a.out:
        a.out.write_text(line + "\n")
    return 0 if all(good for good, _ in judged.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
