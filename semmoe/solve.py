"""RoutingTrace + Topology -> Plan, by one of the methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from semmoe.affinity import build_affinity
from semmoe.core import CoClustering, Plan, RoutingTrace, Topology, require
from semmoe.placement import eplb, linear, paper
from semmoe.replay import replay
from semmoe.schedule import build_schedule
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.split import near_duplicates, split


def solve(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, embeddings: np.ndarray | None = None
) -> Plan:
    """A plan for `topology` from a profile. The same trace, settings and seed give the same plan.

    embeddings: (V, H) the model's input embeddings, if tokens that were not profiled should be served by their nearest
    profiled neighbour. Raises ValueError where sizes do not divide or the profile is too small.
    """
    clusters = _cluster(trace, topology, settings)
    return Plan(
        topology=topology, placement=clusters.placement,
        schedule=build_schedule(trace, clusters, topology, settings.lookback, embeddings),
        fingerprint=trace.fingerprint, method=settings.method, trace_hash=trace.digest(),
        settings=_used_settings(settings),
    )  # fmt: skip


def _cluster(trace: RoutingTrace, topology: Topology, settings: SolveSettings) -> CoClustering:
    f, redundant = trace.fingerprint, settings.redundant_experts
    require(trace.num_tokens > 0, "the trace holds no routed token: profile something first")
    if settings.method == "linear":
        return CoClustering(placement=linear.place(f.num_layers, f.num_experts, topology.ep_size, redundant))
    affinity = build_affinity(trace)
    if settings.method == "eplb":
        load = affinity.expert_load.astype(np.float64)
        return CoClustering(placement=eplb.place(load, topology.ep_size, redundant, f.num_groups, topology.num_nodes))
    return paper.cluster(trace, affinity, topology, settings.paper, settings.seed)


def _used_settings(settings: SolveSettings) -> dict[str, Any]:
    """What shaped the plan; settings that its method does not read are left out."""
    out = asdict(settings)
    for name in () if settings.method == "paper" else ("paper", "lookback", "seed"):
        out.pop(name)
    return out


def expect(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, measure: ReplaySettings, holdout: float = 0.2
) -> dict[str, Any] | None:
    """What a plan so made gains on requests that it has not seen: solve on 1 - `holdout`, replay on the rest.

    Returns None where the trace has too few requests, or too few that differ, to hold any out.
    """
    smallest = max(2, topology.dp_size + 1)
    if trace.num_requests * (1 - holdout) < smallest or near_duplicates(trace).max() == 0:
        return None
    held_out, profile = split(trace, holdout, settings.seed)
    result = replay(held_out, solve(profile, topology, settings), measure).as_dict()
    del result["layers"], result["rows_per_rank_pair"]
    return {"holdout": holdout, "requests": held_out.num_requests, **asdict(measure), **result}


def solve_methods(
    profile: RoutingTrace,
    topology: Topology,
    methods: Sequence[str],
    redundant_experts: int,
    seed: int,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Plan], dict[str, float]]:
    """A plan by each of `methods`, and by linear, which others are measured by; and the seconds that each took."""
    plans, seconds = {}, {}
    for method in dict.fromkeys(["linear", *methods]):
        settings = SolveSettings(method=method, redundant_experts=redundant_experts, seed=seed)
        started = time.perf_counter()
        plans[method] = solve(profile, topology, settings)
        seconds[method] = time.perf_counter() - started
        progress(int(method in methods))
    return plans, seconds


def score(evaluation: RoutingTrace, plans: dict[str, Plan], measure: ReplaySettings) -> dict[str, dict[str, Any]]:
    """Metrics of each plan on requests to evaluate; `bytes_ratio` is all-to-all bytes over those of `linear`."""
    results = {name: replay(evaluation, plan, measure) for name, plan in plans.items()}
    reference = max(int(results["linear"].total.rows.sum()), 1)
    return {
        name: {**result.as_dict(), "bytes_ratio": float(result.total.rows.sum() / reference)}
        for name, result in results.items()
    }
