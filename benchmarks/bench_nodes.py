"""Rows between nodes, by method and at equal load, for traces of several nodes: synthetic ones of DeepSeek-V3's shape.

    PYTHONPATH=. python benchmarks/bench_nodes.py [--strengths benchmarks/results/routing_gpt-oss-20b.json]
        [--trace TRACE] [--cases 64:8:0 64:8:64 144:18:32 320:40:64] [--splits 3] [--requests 1500] [--layers 6]
        [--widen 8] [--coherence 0] [--methods linear eplb lab.methods.exflow semmoe] [--links h100-400g] [--tries 1]
        [--quick] [--out FILE]

A case is EP size:nodes:redundant experts. Attention is data-parallel: a request stays on its rank. Without --trace,
traces are drawn by `lab.synthetic_routing`, one per split, of so many layers at even depths of the model's 58, and
answers are measured (`--phase prefill`: prompts). Plans are solved on a share of the requests and replayed on the rest
in batches of 128 tokens per rank. eplb is hierarchical where groups divide evenly over nodes. semmoe's load limit is
what eplb's plan has on the held-out batches, then stricter or looser by what its own has more or less there (--tries),
so that both have equal load.

After the plan's figures stand those of `known`: the same placement with the routing of every request known when it is
given a rank. Where whole groups fit on nodes, the bound of such placements comes first: what a planner that knew the
future would be left with. Prints a line per plan, ratios to eplb with their spread, and appends JSON lines to --out.
"""

import argparse
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from lab.fit_routing import load_strengths
from lab.node_traffic import bound_of_groups, known_groups, measure, of_phase
from lab.synthetic_routing import DEEPSEEK_V3, draw
from semmoe.core import DECODE, PREFILL, RoutingTrace
from semmoe.costs.links import PhaseLinks, load_links
from semmoe.settings import QUICK, CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.split import split
from semmoe.traces.trace import open_trace

RESULTS = Path(__file__).parent / "results"
TOKENS_PER_RANK = 128
TOLERATED = 0.01  # load above or below eplb's that is left alone
COPIES = ("linear", "eplb", "semmoe")  # methods that take redundant experts
SHOWN = (
    "nodes",
    "ranks_inside",
    "ranks_between",
    "pairs_inside",
    "pairs_between",
    "lar",
    "load",
    "tokens",
)


def traces(given: argparse.Namespace, seed: int) -> tuple[RoutingTrace, RoutingTrace]:
    """The profile and what is held out, of one split."""
    if given.trace:
        return split(open_trace(given.trace), given.profile_share, seed)
    shape = replace(DEEPSEEK_V3, layers=given.layers, requests=given.requests, widen=given.widen,
                    prefill=given.phase == "prefill", coherence=given.coherence)  # fmt: skip
    trace = draw(load_strengths(given.strengths), shape, seed)
    trace = of_phase(trace, (PREFILL if given.phase == "prefill" else DECODE,))
    chosen = np.random.default_rng(seed).random(trace.num_requests) < given.profile_share
    return trace.select(np.flatnonzero(chosen)), trace.select(np.flatnonzero(~chosen))


def run_case(
    case: str, profile: RoutingTrace, held_out: RoutingTrace, given: argparse.Namespace, seed: int
) -> list[dict[str, Any]]:
    """The figures of all methods on one split."""
    ranks, nodes, redundant = map(int, case.split(":"))
    topology, batch = Topology(ep_size=ranks, dp_size=ranks, num_nodes=nodes), TOKENS_PER_RANK * ranks
    settings, limit, out = ReplaySettings(batch_tokens=batch, seed=seed), 1.15, []
    for method in given.methods:
        copies, name = redundant if method in COPIES else 0, method.rpartition(".")[2]
        if (profile.fingerprint.num_experts + copies) % ranks:
            continue  # without copies these experts cannot be spread evenly
        chosen = SolveSettings(
            method=method, redundant_experts=copies, seed=seed, cocluster=search(given, batch, limit)
        )
        try:
            plan, seconds = timed(profile, topology, chosen, given)
            for _ in range(given.tries if method == "semmoe" else 0):
                excess = measure(held_out, plan, settings).load - limit
                if abs(excess) <= TOLERATED:
                    break
                other = max(chosen.cocluster.load_limit - excess, 1.0)
                chosen = replace(chosen, cocluster=search(given, batch, other))
                plan, seconds = timed(profile, topology, chosen, given)
        except ValueError as error:
            print(f"  {case:10} {seed} {name:7} {error}", flush=True)
            continue
        known = known_groups(held_out, plan.placement, topology)
        for way, group in (("plan", None), ("known", known)):
            found = measure(held_out, plan, settings, group)
            limit = max(found.load, 1.0) if (method, way) == ("eplb", "plan") else limit
            out.append({"case": case, "split": seed, "method": name, "way": way, "seconds": seconds, **asdict(found)})
            print(f"  {case:10} {seed} {name:7} {way:5} " + " ".join(f"{k} {out[-1][k]:.3f}" for k in SHOWN)
                  + f" {seconds:.0f} s", flush=True)  # fmt: skip
    return out


def search(given: argparse.Namespace, batch: int, limit: float) -> CoclusterSettings:
    effort = QUICK if given.quick else {}
    return CoclusterSettings(load_limit=limit, batch_tokens=batch, **effort)


def timed(profile: RoutingTrace, topology: Topology, chosen: SolveSettings, given: argparse.Namespace):
    """The plan, charged by the links that are given, and the seconds that it took."""
    links, began = load_links(given.links, topology), time.perf_counter()
    plan = solve(profile, topology, chosen, costs=PhaseLinks(links, links).costs(topology, 1.0, 1.0))
    return plan, time.perf_counter() - began


def bound(case: str, held_out: RoutingTrace, seed: int) -> dict[str, Any] | None:
    """The bound of placements that keep groups whole, where these fit."""
    nodes, groups = int(case.split(":")[1]), held_out.fingerprint.num_groups
    if groups == 1 or groups != nodes:
        return None
    copies = int(case.split(":")[2]) // nodes
    reached, found = bound_of_groups(held_out, nodes, (copies,) if copies else (), seed)
    chance, left = reached * (1 - 1 / nodes), found[-1]
    print(f"  {case:10} {seed} whole groups: {reached:.3f} groups per token, {chance:.3f} on other nodes by chance, "
          f"{left:.3f} at best, {left / chance - 1:+.1%}", flush=True)  # fmt: skip
    return {"case": case, "split": seed, "method": "bound of whole groups", "groups": reached, "nodes": left}


def ratios(rows: list[dict[str, Any]], case: str, splits: int) -> None:
    """Rows between nodes of each method as ratios to eplb's plan, mean and range of splits."""
    own = {(r["method"], r["way"], r["split"]): r for r in rows if r["case"] == case and "way" in r}
    for method, way in dict.fromkeys(key[:2] for key in own):
        pairs = [(own[method, way, s], own["eplb", "plan", s]) for s in range(splits) if ("eplb", "plan", s) in own]
        ratio = [a["nodes"] / b["nodes"] - 1 for a, b in pairs]
        load = [a["load"] - b["load"] for a, b in pairs]
        if ratio:
            print(f"{case:10} {method:7} {way:5} rows between nodes {np.mean(ratio):+.1%} ({min(ratio):+.1%} to "
                  f"{max(ratio):+.1%}) of eplb's, load {np.mean(load):+.3f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strengths", type=Path, default=RESULTS / "routing_gpt-oss-20b.json")
    parser.add_argument("--trace", type=Path, help="a trace in place of a drawn one")
    parser.add_argument("--cases", nargs="+", default=["64:8:0", "64:8:64", "144:18:32", "320:40:64"])
    parser.add_argument("--methods", nargs="+", default=["linear", "eplb", "lab.methods.exflow", "semmoe"])
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--requests", type=int, default=1500)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--widen", type=float, help="factor on directions; by default experts / experts fitted on")
    parser.add_argument("--coherence", type=float, default=0.0, help="how alike the experts of a group are, 0 to 1")
    parser.add_argument("--phase", choices=("prefill", "decode"), default="decode")
    parser.add_argument("--profile-share", type=float, default=0.4)
    parser.add_argument("--links", default="h100-400g", help="what semmoe's search is charged")
    parser.add_argument("--tries", type=int, default=1, help="further load limits, for eplb's load")
    parser.add_argument("--quick", action="store_true", help="semmoe: one rough search per layer")
    parser.add_argument("--out", type=Path, help="append JSON lines to this file")
    given = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for seed in range(given.splits):
        profile, held_out = traces(given, seed)
        print(f"split {seed}: {profile.num_requests} + {held_out.num_requests} requests, {profile.num_tokens:,} + "
              f"{held_out.num_tokens:,} tokens, {profile.fingerprint.num_layers} layers", flush=True)  # fmt: skip
        for case in given.cases:
            found = bound(case, held_out, seed)
            done = ([found] if found else []) + run_case(case, profile, held_out, given, seed)
            rows += done
            append(given, done)
    for case in given.cases:
        ratios(rows, case, given.splits)


def append(given: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Add lines of JSON to the file that is asked for, if one is."""
    if given.out is None:
        return
    about = {name: getattr(given, name) for name in ("widen", "coherence", "quick", "layers", "phase", "links")}
    about["trace"] = given.trace.stem if given.trace else "drawn"
    with given.out.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps({**about, **row}) + "\n" for row in rows)


if __name__ == "__main__":
    main()
