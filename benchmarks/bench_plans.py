"""semmoe's plans beside the paper's and EPLB's under equal constraints, over seeds: figures of docs/measurements.md.

    PYTHONPATH=. python benchmarks/bench_plans.py TRACE [--seeds 3] [--redundant 0 8 16 32] [--ep-size 8]
        [--attention dp]

Attention-TP: 20/80 by request, near-duplicates on one side, batches of 1,024, mixed and prefill, load limit 1.15, with
true routing on the same placement beside each of semmoe's plans. Attention-DP: EP4
and EP8, placements of the field, then ours without and with a load limit, for locality alone and for few rows, requests
assigned as they arrive, and with their true routing known. Cost: remote ranks less local pairs per token, the
objective of the plans with rank cost 1; in attention-DP consecutive batches (`--batches prefill`) change loads alone.
Prints configuration, bounds, a table as it goes and one JSON line.
"""

import argparse
import json
import platform
import resource
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from lab.node_traffic import local_pairs
from lab.true_routing import TrueRouting
from semmoe.core import Plan, RoutingTrace
from semmoe.costs.metrics import max_over_mean, uniform_remote_ranks
from semmoe.evaluation.online import schedule_with
from semmoe.evaluation.replay import replay
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import PromptScores
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.split import split
from semmoe.traces.trace import open_trace

AT_ONCE, KNOWN = "at once", "true routing"  # requests by their prompts, or by their routing, known as they arrive
# methods of the field whose placements attention-DP can take
FIELD = ("eplb", "lab.methods.moetuner", "lab.methods.exflow", "lab.methods.grace", "paper")
# predicted_lar is 0 for plans without semmoe's tables.
FIGURES = ("lar", "remote_ranks_per_token", "load_max_over_mean", "token_max_over_mean", "predicted_lar")


def measure(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, seeds: int, ways=(AT_ONCE,), batches="mixed"
):
    """Return mean figures over seeds of split and solver, and the seconds of a solve, by way to schedule requests."""
    rows: dict[str, list[list[float]]] = {way: [] for way in ways}
    for seed in range(seeds):
        profile, evaluation = split(trace, 0.2, seed)
        started = time.perf_counter()
        plan = solve(profile, topology, replace(settings, seed=seed))
        seconds = time.perf_counter() - started
        for way in ways:
            if way == KNOWN:
                rows[way].append([*known_routing(evaluation, plan), seconds])
                continue
            result = replay(evaluation, plan, ReplaySettings(seed=seed, batches=batches)).as_dict()
            rows[way].append([result[name] or 0.0 for name in FIGURES] + [seconds])
    return {way: dict(zip((*FIGURES, "solve_seconds"), np.mean(r, axis=0).tolist(), strict=True))
            for way, r in rows.items()}  # fmt: skip


class KnownRouting(CapacityScheduler):
    """Prompts are request numbers, scores their true shares: what perfect prediction gives under the same bound."""

    shares: np.ndarray  # (R, D)

    def score(self, prompt_ids: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.shares[int(prompt_ids[0])].copy()


def known_routing(trace: RoutingTrace, plan: Plan) -> list[float]:
    """FIGURES (0 for those that do not apply) with each request's true routing known, requests assigned at once."""
    assert isinstance(plan.requests, PromptScores)
    D, lengths = plan.topology.dp_size, np.diff(trace.request_offsets)
    pairs = local_pairs(trace, plan)
    scheduler = KnownRouting(plan.requests)
    scheduler.shares = pairs / lengths[:, None]
    groups = schedule_with(scheduler, [[r] for r in range(len(lengths))], lengths, ReplaySettings().unfinished)
    lar = pairs[np.arange(len(groups)), groups].sum() / lengths.sum()
    return [lar, 0.0, 0.0, max_over_mean(np.bincount(groups, lengths, D)), 0.0]


def attention_tp(trace: RoutingTrace, G: int, seeds: int, copies: list[int]) -> list[dict[str, object]]:
    """Rows for one attention group of G ranks, without and with redundant experts."""
    f = trace.fingerprint
    print(f"attention-tp, EP{G}: uniform routing LAR {1 / G:.3f}, remote ranks "
          f"{uniform_remote_ranks(G, f.num_experts, f.top_k):.3f}")  # fmt: skip
    runs = [(method, SolveSettings(method=method)) for method in ("linear", "eplb", "paper")]
    for redundant in copies:
        for method in ("eplb", "semmoe") if redundant else ("semmoe",):
            settings = SolveSettings(method=method, redundant_experts=redundant)
            runs.append((f"{method}, {redundant} redundant", settings))
    out: list[dict[str, object]] = []
    for name, settings in runs:
        for way, figures in measure_tp(trace, Topology(ep_size=G), settings, seeds).items():
            out.append({"attention": "tp", "ep_size": G, **show(f"{name}, {way}", figures)})
    return out


def measure_tp(trace: RoutingTrace, topology: Topology, settings: SolveSettings, seeds: int) -> dict[str, Any]:
    """Mean figures over seeds in both kinds of batches; of semmoe's plans also with true routing on the placement."""
    found: dict[str, list[list[float]]] = {}
    for seed in range(seeds):
        profile, evaluation = split(trace, 0.2, seed)
        started = time.perf_counter()
        plan = solve(profile, topology, replace(settings, seed=seed))
        seconds = time.perf_counter() - started
        ways = {"plan": plan}
        if settings.method == "semmoe":
            ways["true routing"] = replace(plan, tokens=TrueRouting())
        for (way, one), batches in product(ways.items(), ("mixed", "prefill")):
            result = replay(evaluation, one, ReplaySettings(seed=seed, batches=batches)).as_dict()
            row = [result[name] or 0.0 for name in (*FIGURES, "load_max_layer")]
            found.setdefault(f"{way}, {batches}", []).append([*row, seconds])
    names = (*FIGURES, "load_max_layer", "solve_seconds")
    return {way: dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True)) for way, rows in found.items()}


def attention_dp(trace: RoutingTrace, D: int, seeds: int, batches: str) -> list[dict[str, object]]:
    """Rows for D attention groups of one rank each."""
    print(f"attention-dp, EP{D}, {batches} batches: uniform routing LAR {1 / D:.3f}")
    topology, out, top_k = Topology(ep_size=D, dp_size=D), [], trace.fingerprint.top_k
    runs = [(method.rpartition(".")[2], SolveSettings(method=method), (AT_ONCE,)) for method in FIELD]
    for limit, rank_cost in ((None, 0.0), (None, 1.0), (1.15, 0.0), (1.15, 1.0)):
        objective = CoclusterSettings(load_limit=limit, remote_rank=rank_cost)
        runs.append(
            (f"semmoe, limit {limit}, rank cost {rank_cost}", SolveSettings(cocluster=objective), (AT_ONCE, KNOWN))
        )
    for name, settings, ways in runs:
        for way, figures in measure(trace, topology, settings, seeds, ways, batches).items():
            figures["cost"] = figures["remote_ranks_per_token"] - top_k * figures["lar"] if way == AT_ONCE else 0.0
            out.append({"attention": "dp", "ep_size": D, "batches": batches, **show(f"{name}, {way}", figures)})
    return out


def show(name: str, figures: dict[str, float]) -> dict[str, object]:
    end = f" s  cost {figures['cost']:.3f}" if "cost" in figures else " s"
    if "load_max_layer" in figures:
        end += f"  highest layer {figures['load_max_layer']:.3f}"
    print(f"  {name:46} LAR {figures['lar']:.3f} (expected {figures['predicted_lar']:.3f})  remote ranks "
          f"{figures['remote_ranks_per_token']:.3f}  load {figures['load_max_over_mean']:.3f}  tokens "
          f"{figures['token_max_over_mean']:.3f}  solve {figures['solve_seconds']:.1f}{end}", flush=True)  # fmt: skip
    return {"name": name, **figures}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ep-size", type=int, default=8)
    parser.add_argument("--redundant", type=int, nargs="*", default=[0, 8, 16, 32])
    parser.add_argument("--dp", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--attention", choices=("tp", "dp", "both"), default="both")
    parser.add_argument("--batches", choices=("mixed", "prefill"), default="mixed", help="of attention-DP")
    arguments = parser.parse_args()
    trace, G = open_trace(arguments.trace), arguments.ep_size
    f = trace.fingerprint
    print(f"{f.model}: {trace.num_requests} requests, {trace.num_tokens:,} tokens, {f.num_layers} layers, "
          f"top-{f.top_k} of {f.num_experts}; mean of {arguments.seeds} seeds; {platform.machine()}")  # fmt: skip
    out: list[dict[str, object]] = []
    if arguments.attention != "dp":
        out += attention_tp(trace, G, arguments.seeds, arguments.redundant)
    for D in arguments.dp if arguments.attention != "tp" else ():
        out += attention_dp(trace, D, arguments.seeds, arguments.batches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print("\n" + json.dumps({"trace": f.model, "seeds": arguments.seeds, "peak_gib": round(peak, 2), "results": out}))


if __name__ == "__main__":
    main()
