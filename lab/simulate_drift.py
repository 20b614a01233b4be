"""The loop of `semmoe adapt` beside a simulated server: in minutes what `bench_drift.py` measures on an engine.

    OMP_NUM_THREADS=1 python -m lab.simulate_drift [--shape gradual] [--requests 2400] [--blocks 4] [--rate 12]
        [--schedule 10] [--seed 0] [--seconds 8] [--adapt "--requests 80 --window 8 ..."]

The loop is the real one: its decisions, recordings, solver and scores. Simulated are time and the server: `--rate`
requests end a second, each is assigned by the plan's own tables as an engine of two ranks in attention-DP assigns it,
and keeps the routing that the model chose for its prompt. A swap takes effect at once; solving takes `--seconds`.
What it cannot show is what solver and server take from each other. Prints what `bench_drift.py` prints.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from lab import drift
from lab.node_traffic import local_pairs
from lab.save import save_trace
from semmoe.cli.demo import MODEL
from semmoe.core import Plan, RoutingTrace
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.evaluation.online import live_settings, start
from semmoe.live import watch
from semmoe.live.adapt import Adapter, Found, find
from semmoe.live.status import SwapStatus, plan_number
from semmoe.plan import load_plan
from semmoe.requests.scheduler import RequestScheduler
from semmoe.settings import AdaptSettings, SwapSettings

RUNNING, PARTS, ATTENTION = 8, 12, "dp"


def scheduler_of(plan: Plan) -> RequestScheduler:
    """A scheduler of a live engine."""
    return start(plan.requests, live_settings(plan.topology.dp_size))


@dataclass
class Simulated:
    """A server of which `rate` requests a second end, in the trace's order."""

    trace: RoutingTrace
    rate: float
    plan: Plan
    at: dict[int, Plan]  # plans that are swapped in when so many have ended
    folder: Path  # in place of a control folder
    now: float = 0.0
    local: list[float] = field(default_factory=list)  # of each that has ended, its local pairs per layer and choice

    def __post_init__(self) -> None:
        self.running: list = []
        self.rng = np.random.default_rng(0)  # which request ends
        self.scheduler = scheduler_of(self.plan)
        self.pairs = local_pairs(self.trace, self.plan)

    def swap(self, plan: Plan, settings: SwapSettings) -> SwapStatus:
        before, self.plan = self.scheduler, plan
        self.scheduler = scheduler_of(plan)
        self.scheduler.follow(before)
        self.pairs = local_pairs(self.trace, plan)
        return SwapStatus(rank=0, plan=plan_number(plan), state="done")

    def sleep(self, seconds: float) -> None:
        """Let time pass; what ends meanwhile is counted."""
        self.now += seconds
        while len(self.local) < min(int(self.now * self.rate), self.trace.num_requests):
            self._one()

    def _one(self) -> None:
        r = len(self.local)
        if r in self.at:
            self.swap(self.at[r], SwapSettings())
        while len(self.running) >= RUNNING:
            self.scheduler.finish(self.running.pop(self.rng.integers(len(self.running))), 0.0)
        self.running.append(self.scheduler.admit([self.trace.prompt(r)])[0])
        self.local.append(float(self.pairs[r, self.running[-1].group]))

    def clock(self) -> float:
        return self.now

    def look(self) -> watch.Look:
        f, ended = self.trace.fingerprint, len(self.local)
        tokens = int(self.trace.request_offsets[ended]) * f.num_layers
        local, pairs = sum(self.local) * f.num_layers * f.top_k, tokens * f.top_k
        labels = {name: frozenset({("local", name), ("ep_rank", "0")}) for name in ("true", "false")}
        counted = {("pairs", labels["true"]): local, ("pairs", labels["false"]): pairs - local}
        counted |= {("routed_tokens", frozenset()): tokens, ("active", frozenset({("engine", "simulated")})): 1}
        return watch.Look(self.now, counted)

    def record(self, target: Path, requests: int, timeout: float) -> None:
        begun, end = len(self.local), self.now + timeout
        while len(self.local) < min(begun + requests, self.trace.num_requests) and self.now < end:
            self.sleep(0.5)
        if len(self.local) == begun:
            raise ValueError("no request that has ended")
        save_trace(self.trace.select(np.arange(begun, len(self.local))), target)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=drift.SHAPES, default="gradual")
    parser.add_argument("--requests", type=int, default=2400)
    parser.add_argument("--blocks", type=int, default=4, help="of the shape `alternating`")
    parser.add_argument("--rate", type=float, default=12.0)
    parser.add_argument("--seconds", type=float, default=8.0, help="that a solve takes beside the server")
    parser.add_argument("--schedule", type=float, default=10.0)
    parser.add_argument("--redundant-experts", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--adapt", default=" ".join(drift.ADAPT), help="options of semmoe adapt")
    return parser.parse_args()


def adapt_settings(a: argparse.Namespace) -> AdaptSettings:
    words = shlex.split(a.adapt)
    pairs = zip(words[::2], words[1::2], strict=True)  # each option and its value
    given = {name.removeprefix("--").replace("-", "_"): json.loads(value) for name, value in pairs}
    return AdaptSettings(**{"schedule": a.schedule} | given)


def adapted(server: Simulated, a: argparse.Namespace, report: Callable) -> None:
    """Run the loop until the last request has ended."""

    def solve(*job) -> Found:
        found = find(*job)
        server.sleep(a.seconds)
        return found

    served: Any = server  # it has what the loop uses of a `Served`
    settings = adapt_settings(a)
    adapter = Adapter(served, server.plan, settings, solve, report, clock=server.clock, sleep=server.sleep)
    while len(server.local) < a.requests:
        adapter.turn()


def main() -> int:
    a = parse()
    print(vars(a), flush=True)
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        folder, texts = Path(scratch), drift.texts(load_tokenizer(str(MODEL)))
        plans = drift.make_plans(texts, ATTENTION, a.redundant_experts, folder)
        prompts, _ = drift.draw(texts, a.shape, a.requests, a.seed, a.blocks)
        trace = record(load_model(str(MODEL)), str(MODEL), prompts, folder / "served")
        first = plans["all" if a.shape == "stable" else "first"]
        rates: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        told: list[Any] = []
        for name in ("frozen", "known", "adapt"):
            turns = drift.changes(a.shape, a.requests, a.blocks)
            at = {i: load_plan(plans[plan]) for i, plan in turns} if name == "known" else {}
            server = Simulated(trace, a.rate, load_plan(first), at, folder)
            if name == "adapt":
                adapted(server, a, told.append)
            else:
                server.sleep(a.requests / a.rate + 1)
            rates[name] = np.array(server.local), np.diff(trace.request_offsets)
        show(rates, turns[0][0] if turns else 0, a.requests, told)
    return 0


def show(rates: dict, begins: int, requests: int, told: list) -> None:
    def rate(name: str, low: int, high: int) -> float:
        local, tokens = rates[name]
        return local[low:high].sum() / tokens[low:high].sum()

    for decision in told:
        if decision.action in ("keep", "swap", "back", "stay", "fail"):
            print(f"  adapt: {decision.action:7}{decision.why}")
    edges = [round(i * requests / PARTS) for i in range(PARTS + 1)]
    for name in rates:
        print(f"  {name:8}" + "".join(f"{rate(name, low, high):8.3f}" for low, high in pairwise(edges)))
    after = {name: float(rate(name, begins, requests)) for name in rates}
    lost = after["known"] - after["frozen"]
    after["recovered"] = (after["adapt"] - after["frozen"]) / lost if lost else 0.0
    print(json.dumps({"shares": after, "decisions": [asdict(decision) for decision in told]}))
    print("  ".join(f"{name} {value:.3f}" for name, value in after.items()))


if __name__ == "__main__":
    sys.exit(main())
