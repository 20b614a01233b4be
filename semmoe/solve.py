"""RoutingTrace + Topology -> Plan, by one of the methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from semmoe import baselines, cost, request_map
from semmoe import predictor as predict
from semmoe.affinity import build_affinity
from semmoe.core import CoClustering, Placement, Plan, RoutingTrace, Schedule, Topology, require
from semmoe.placement import cocluster, eplb, exflow, grace, linear, moetuner, paper
from semmoe.placement.requests import cocluster_requests
from semmoe.replay import ReplayResult, replay, scheduled_by_answers
from semmoe.schedule import build_schedule
from semmoe.scheduler import CapacityScheduler
from semmoe.settings import REQUEST_METHODS, ReplaySettings, SolveSettings, obstacle
from semmoe.split import near_duplicates, split

Progress = Callable[[int], None]  # told of layers that are done


def solve(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, embeddings: np.ndarray | None = None,
    progress: Progress = lambda layers: None,
) -> Plan:  # fmt: skip
    """A plan for `topology` from a profile. The same trace, settings and seed give the same plan.

    embeddings: (V, H) the model's input embeddings, if tokens that were not profiled should be served by their nearest
    profiled neighbour. Raises ValueError where sizes do not divide, the profile is too small or the method does not
    apply. (MoETuner's plan is the same only as far as its time limit does not strike.)
    """
    reason = obstacle(settings.method, topology, settings.redundant_experts)
    require(reason is None, f"method {settings.method} does not apply: {reason}")
    require(trace.num_tokens > 0, "the trace holds no routed token: profile something first")
    used = _used_settings(settings)
    if settings.method == "semmoe":
        placement, schedule = _semmoe(trace, topology, settings, embeddings, progress)
    else:
        clusters = _cluster(trace, topology, settings)
        placement = clusters.placement
        schedule = build_schedule(trace, clusters, topology, settings.paper.lookback, embeddings)
        if settings.method in REQUEST_METHODS:
            table = baselines.request_map(settings.method, trace, topology.dp_size, settings.seed)
            schedule = Schedule(requests=table, shuffle=None)
        if clusters.gap is not None:
            used["gap"] = clusters.gap
        progress(trace.fingerprint.num_layers)
    return Plan(
        topology=topology, placement=placement, schedule=schedule, fingerprint=trace.fingerprint,
        method=settings.method, trace_hash=trace.digest(), settings=used,
        profiled_requests=np.unique(trace.request_hashes()),
    )  # fmt: skip


def _semmoe(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, embeddings: np.ndarray | None, progress: Progress
) -> tuple[Placement, Schedule | None]:
    """semmoe's own method: requests by a learned map, experts by `cocluster`, tokens by the path predictor."""
    D, S = topology.dp_size, topology.attn_tp_size
    groups = start = rates = predictor = None
    if D > 1:
        rates = request_map.fit_request_rates(trace, near_duplicates(trace), seed=settings.seed)
        groups, start = _request_groups(trace, rates, topology, settings.seed)
    if S > 1:
        predictor = predict.fit(trace, settings.predictor, settings.seed)
    placement = cocluster.place(
        trace, topology, predictor, settings.redundant_experts, settings.cocluster, settings.seed, groups, start,
        progress,
    )  # fmt: skip
    if rates is None and predictor is None:
        return placement, None
    by_group = placement.hosts.reshape(-1, D, S, trace.fingerprint.num_experts)
    hosted = np.swapaxes(np.any(by_group, axis=2), 1, 2)  # (L, E, D)
    return placement, Schedule(
        requests=request_map.project(rates, hosted) if rates else None,
        shuffle=predict.project(predictor, trace, placement, embeddings) if predictor else None,
    )


def _request_groups(
    trace: RoutingTrace, rates: request_map.RequestRates, topology: Topology, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The group (R,) of each request, clustered jointly over all layers, and rank labels (L, E) to begin from."""
    D, S = topology.dp_size, topology.attn_tp_size
    expert_groups, of_fitted = cocluster_requests(rates.planning_rates, rates.lengths, D, seed=seed)
    scheduler = CapacityScheduler(request_map.project(rates, expert_groups[..., None] == np.arange(D)))
    groups = np.array([np.argmax(scheduler.score(trace.prompt(r))) for r in range(trace.num_requests)])
    groups[rates.requests] = of_fitted
    within = np.argsort(np.argsort(expert_groups, axis=1, kind="stable"), axis=1)  # place of each expert, by group
    return groups, expert_groups * S + within % S


def _cluster(trace: RoutingTrace, topology: Topology, settings: SolveSettings) -> CoClustering:
    f, redundant = trace.fingerprint, settings.redundant_experts
    if settings.method == "grace":
        return CoClustering(placement=grace.place(trace, topology, redundant, settings.seed))
    if settings.method == "linear" or settings.method in REQUEST_METHODS:
        return CoClustering(placement=linear.place(f.num_layers, f.num_experts, topology.ep_size, redundant))
    affinity = build_affinity(trace)
    if settings.method == "eplb":
        load = affinity.expert_load.astype(np.float64)
        return CoClustering(placement=eplb.place(load, topology.ep_size, redundant, f.num_groups, topology.num_nodes))
    if settings.method == "exflow":
        return CoClustering(placement=exflow.place(affinity.path_counts, f.num_experts, topology, settings.seed))
    if settings.method == "moetuner":
        tuned = moetuner.place(affinity.expert_load, affinity.path_counts, topology, settings.moetuner.time_limit)
        return CoClustering(placement=tuned.placement, gap=tuned.gap)
    return paper.cluster(trace, affinity, topology, settings.paper, settings.seed)


def _used_settings(settings: SolveSettings) -> dict[str, Any]:
    """What shaped the plan; settings that its method does not read are left out."""
    read = {
        "paper": {"paper", "seed"}, "semmoe": {"predictor", "cocluster", "seed"},
        "eldr": {"seed"}, "exflow": {"seed"}, "moetuner": {"moetuner"}, "grace": {"seed"},
    }.get(settings.method, set())  # fmt: skip
    return {k: v for k, v in asdict(settings).items() if k in read | {"method", "redundant_experts"}}


def expect(
    trace: RoutingTrace, topology: Topology, settings: SolveSettings, measure: ReplaySettings,
    links: cost.Links | None = None, shape: cost.LayerShape | None = None, holdout: float = 0.2,
    progress: Progress = lambda layers: None,
) -> dict[str, Any] | None:  # fmt: skip
    """What a plan so made gains on requests that it has not seen: solve on 1 - `holdout`, replay on the rest.

    With the metrics of the plan, those of `linear` and `eplb` under "others"; with links and shape the predicted times
    and the verdict. Returns None where the trace has too few requests, or too few that differ, to hold any out.
    """
    smallest = max(2, topology.dp_size + 1)
    if trace.num_requests * (1 - holdout) < smallest or near_duplicates(trace).max() == 0:
        return None
    held_out, profile = split(trace, holdout, settings.seed)
    replayed = {}
    for method in dict.fromkeys((settings.method, "linear", "eplb")):
        watched = progress if method == settings.method else lambda layers: None
        plan = solve(profile, topology, replace(settings, method=method), progress=watched)
        replayed[method] = replay(held_out, plan, measure)
    # Bytes per rank pair say the same where links are known, and of one batch.
    figures = {name: {k: v for k, v in result.as_dict().items() if k != "rows_per_rank_pair"}
               for name, result in replayed.items()}  # fmt: skip
    timed = _time(figures, replayed, settings.method, topology, links, shape) if links and shape else {"verdict": None}
    own = figures.pop(settings.method)
    by_answers = scheduled_by_answers(held_out, topology)
    about = {"holdout": holdout, "requests": held_out.num_requests, "scheduled_by_answers": by_answers}
    return {**about, **asdict(measure), **own, "others": figures, **timed}


def _time(
    figures: dict[str, dict[str, Any]], replayed: dict[str, ReplayResult], method: str, topology: Topology,
    links: cost.Links, shape: cost.LayerShape,
) -> dict[str, Any]:  # fmt: skip
    """Adds predicted times and bytes to each method's figures; returns the verdict on `method` and what it rests on."""
    predictions = {
        name: cost.predict(name, result.rows_per_batch, result.busiest_pairs, shape, topology, links)
        for name, result in replayed.items()
    }
    for name, prediction in predictions.items():
        sent = cost.all_to_all_bytes(prediction.rows, shape, links)
        figures[name] |= cost.microseconds(prediction.time) | {"bytes_per_rank_pair": np.rint(sent).tolist()}
    without = None
    if topology.attention == "tp" and topology.ep_size > 1:
        # Where no row travels, locality counts for nothing: this rival takes the best balanced of the placements.
        balanced = min(prediction.busiest_pairs for prediction in predictions.values())
        without = cost.all_reduce_time(replayed[method].tokens_per_batch, balanced, shape, topology, links)
    others = [prediction for name, prediction in predictions.items() if name != method]
    return {
        "links": {"name": links.name, "kind": links.kind, "source": links.source},
        "without_all_to_all": cost.microseconds(without) if without else None,
        "verdict": asdict(cost.verdict(predictions[method], others, without)),
    }


def solve_methods(
    profile: RoutingTrace,
    topology: Topology,
    methods: Sequence[str],
    settings: SolveSettings,
    progress: Callable[[int], None] = lambda done: None,
) -> tuple[dict[str, Plan], dict[str, float]]:
    """A plan by each of `methods`, and by linear, which others are measured by; and the seconds that each took.

    settings: all but the method, which is set in turn.
    """
    plans, seconds = {}, {}
    for method in dict.fromkeys(["linear", *methods]):
        started = time.perf_counter()
        plans[method] = solve(profile, topology, replace(settings, method=method))
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
