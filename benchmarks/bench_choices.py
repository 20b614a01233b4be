"""The figures behind docs/reading-the-paper.md: what each choice in reading the paper is worth on a trace.

    python benchmarks/bench_choices.py TRACE

20/80 by request (seed 0), batches of 1,024 mixed; attention-TP at EP8, attention-DP at EP4, means over solver seeds.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from semmoe.affinity import build_affinity
from semmoe.core import PROFILED, Plan, RoutingTrace
from semmoe.methods import paper
from semmoe.methods.paper_policies import PaperTable
from semmoe.placement.linear import vanilla_plan
from semmoe.replayer import replay
from semmoe.settings import PaperSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import split
from semmoe.topology import Topology
from semmoe.trace import open_trace

SEEDS = range(3)
WEIGHTS = [
    {}, {"expert_load": 0.1}, {"expert_load": 2.0}, {"expert_affinity": 0.0}, {"expert_affinity": 1.0},
    {"request_affinity": 0.0}, {"request_affinity": 0.5}, {"steps": 4}, {"steps": 40}, {"theta": 0.1}, {"theta": 0.9},
]  # fmt: skip


def measure(evaluation: RoutingTrace, plans: list[Plan]) -> dict[str, float]:
    results = [replay(evaluation, plan, ReplaySettings()) for plan in plans]
    return {
        "lar": float(np.mean([r.total.lar for r in results])),
        "remote_ranks_per_token": float(np.mean([r.total.remote_ranks_per_token for r in results])),
        "load_max_over_mean": float(np.mean([r.load_max_over_mean.mean() for r in results])),
    }


def weights(profile: RoutingTrace, evaluation: RoutingTrace, attention: str, ep_size: int, changed: dict):
    topology = Topology.for_attention(attention, ep_size)
    settings = [SolveSettings(method="paper", seed=seed, paper=PaperSettings(**changed)) for seed in SEEDS]
    return measure(evaluation, [solve(profile, topology, s) for s in settings])


def request_tables(profile: RoutingTrace, evaluation: RoutingTrace) -> dict[str, dict[str, float]]:
    """Attention-DP's T built from other counts, on the same co-clusterings."""
    topology = Topology.for_attention("dp", 4)
    affinity = build_affinity(profile)
    seeds = [paper.cluster(profile, affinity, topology, PaperSettings(), seed) for seed in SEEDS]
    prompt_requests = np.repeat(np.arange(profile.num_requests), np.diff(profile.prompt_offsets))
    prompts = (profile.prompt_ids, prompt_requests)
    routed = (profile.token_ids, profile.request_of_token())
    both = tuple(np.concatenate(pair) for pair in zip(prompts, routed, strict=True))
    out = {}
    for name, (tokens, requests), normalise in (
        ("prompts, rows normalised", prompts, True), ("prompts and generated", both, True),
        ("generated", routed, True), ("prompts, raw counts", prompts, False),
    ):  # fmt: skip
        plans = []
        for clusters in seeds:
            counts = np.zeros((profile.fingerprint.vocab_size + 1, 4), np.float32)
            np.add.at(counts, (tokens, clusters.request_groups[requests]), 1)
            scores = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1) if normalise else counts
            source = np.full(len(scores), PROFILED, np.uint8)
            table = PaperTable(request_scores=scores, request_source=source)
            plan = vanilla_plan(profile.fingerprint, topology)
            plans.append(replace(plan, placement=clusters.placement, requests=table, method="paper"))
        out[name] = measure(evaluation, plans)
    return out


def show(name: str, metrics: dict[str, float]) -> None:
    print(f"  {name:36} LAR {metrics['lar']:.3f}  remote ranks {metrics['remote_ranks_per_token']:.3f}  "
          f"load {metrics['load_max_over_mean']:.3f}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    profile, evaluation = split(open_trace(parser.parse_args().trace), 0.2, 0)
    results: dict[str, dict] = {}
    for attention, ep_size in (("tp", 8), ("dp", 4)):
        print(f"attention-{attention}, EP{ep_size}, mean of {len(SEEDS)} seeds")
        results[attention] = {}
        for changed in WEIGHTS:
            name = ", ".join(f"{k} {v}" for k, v in changed.items()) or "defaults"
            results[attention][name] = weights(profile, evaluation, attention, ep_size, changed)
            show(name, results[attention][name])
    print("attention-dp, EP4, table T counted from")
    results["request_table"] = request_tables(profile, evaluation)
    for name, metrics in results["request_table"].items():
        show(name, metrics)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
