"""Compute a plan from a routing trace and a topology by one of the methods, and compare methods."""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from threadpoolctl import threadpool_limits

from semmoe.core import Plan, RoutingTrace
from semmoe.costs.rows import RowCosts
from semmoe.evaluation.replay import ReplayResult, replay
from semmoe.placement.methods import check_applies, find_method
from semmoe.placement.problem import Problem, Progress, Solution, weighed_tokens
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.topology import Fingerprint, Topology


def solve(
    trace: RoutingTrace,
    topology: Topology,
    settings: SolveSettings | None = None,
    embeddings: np.ndarray | None = None,
    progress: Progress = lambda layers: None,
    previous: Plan | None = None,
    costs: tuple[RowCosts, RowCosts] | None = None,
) -> Plan:
    """Compute a plan for `topology` from a profile. The same trace, settings and seed give the same plan.

    embeddings: (V, H) the model's input embeddings; with them, tokens that were not profiled use the table rows of
    their nearest profiled neighbour. previous: a plan to begin from, whose experts move only where that pays
    (`settings.cocluster.move_cost`), and whose `shuffle_from` stays. costs: what the all-to-all charges prefill and
    decode tokens, which the method semmoe weighs in place of the weights in the settings. Raises ValueError if sizes do
    not divide, the profile is too small or the method does not apply.
    """
    problem = Problem(
        trace=trace,
        topology=topology,
        settings=settings or SolveSettings(),
        embeddings=embeddings,
        progress=progress,
        previous=previous,
        costs=costs,
    )
    return solve_problem(problem)


def solve_problem(problem: Problem) -> Plan:
    """Compute a plan as `solve` does."""
    check_problem(problem)
    settings = problem.settings
    with threadpool_limits(1):  # layers run side by side already, and sums depend on how many threads share them
        found: Solution = find_method(settings.method).load()(problem)
    used = _used_settings(settings) | ({} if found.gap is None else {"gap": found.gap})
    return found.plan(
        problem.topology,
        problem.trace.fingerprint,
        settings.method,
        trace_hash=problem.trace.digest(),
        settings=used,
        profiled_requests=np.unique(problem.trace.request_hashes()),
        shuffle_from=1 if problem.previous is None else problem.previous.shuffle_from,
    )


def check_problem(problem: Problem) -> None:
    """Raise ValueError unless a plan can be solved, before the work begins."""
    trace, topology = problem.trace, problem.topology
    settings = problem.settings
    check_applies(settings.method, topology, settings.redundant_experts)
    if trace.num_tokens <= 0:
        raise ValueError("the trace holds no routed token: profile something first")
    if settings.method == "semmoe" and not weighed_tokens(trace, settings.phase).any():
        raise ValueError(f"phase is {settings.phase}, of which the trace has no token")
    if problem.previous is not None:
        check_previous(problem.previous, trace.fingerprint, topology, settings)


def check_previous(previous: Plan, model: Fingerprint, topology: Topology, settings: SolveSettings) -> None:
    """Raise ValueError unless a solve with these settings can begin from a plan."""
    if settings.method != "semmoe":
        raise ValueError(f"only the method semmoe begins from a plan, not {settings.method}")
    previous.check(model)
    if previous.topology != topology:
        raise ValueError(f"the plan to begin from is for {previous.topology}, not for {topology}")
    copies = previous.placement.redundant_experts
    if copies != settings.redundant_experts:
        raise ValueError(f"the plan to begin from has {copies} redundant experts, not {settings.redundant_experts}")


def moved_experts(plan: Plan, previous: Plan) -> tuple[int, int]:
    """(copies of experts on a rank that did not hold the expert in `previous`, all copies), over all layers."""
    new = plan.placement.hosts & ~previous.placement.hosts
    return int(new.sum()), int(plan.placement.hosts.sum())


def _used_settings(settings: SolveSettings) -> dict[str, Any]:
    """The settings that the plan's method reads, by name."""
    read = {"method", "redundant_experts", *find_method(settings.method).reads}
    return {k: v for k, v in asdict(settings).items() if k in read}


@dataclass(frozen=True)
class Comparison:
    """Plans by several methods, scored on the same requests."""

    plans: dict[str, Plan]
    results: dict[str, ReplayResult]

    def __repr__(self) -> str:
        return "\n".join(f"{name}: {result!r}" for name, result in self.results.items())


def compare(
    profile: RoutingTrace,
    evaluation: RoutingTrace,
    topology: Topology,
    methods: Sequence[str] = ("eplb", "semmoe"),
    settings: SolveSettings | None = None,
    measure: ReplaySettings | None = None,
) -> Comparison:
    """Solve `profile` by `linear` and each of `methods`, and replay the plans on `evaluation`."""
    plans, _ = solve_methods(profile, topology, methods, settings or SolveSettings())
    return Comparison(plans, {name: replay(evaluation, plan, measure) for name, plan in plans.items()})


def solve_methods(
    profile: RoutingTrace,
    topology: Topology,
    methods: Sequence[str],
    settings: SolveSettings,
    progress: Callable[[int], None] = lambda done: None,
    costs: tuple[RowCosts, RowCosts] | None = None,
) -> tuple[dict[str, Plan], dict[str, float]]:
    """A plan by `linear`, the baseline, and by each of `methods`; and the seconds that each took.

    settings: used for every method; its own method is replaced. costs: see `solve`.
    """
    plans, seconds = {}, {}
    for method in dict.fromkeys(["linear", *methods]):
        started = time.perf_counter()
        plans[method] = solve(profile, topology, replace(settings, method=method), costs=costs)
        seconds[method] = time.perf_counter() - started
        progress(int(method in methods))
    return plans, seconds


def score(evaluation: RoutingTrace, plans: dict[str, Plan], measure: ReplaySettings) -> dict[str, dict[str, Any]]:
    """Metrics of each plan on the trace `evaluation`; `bytes_ratio` is all-to-all bytes over those of `linear`."""
    results = {name: replay(evaluation, plan, measure) for name, plan in plans.items()}
    reference = max(int(results["linear"].total.rows.sum()), 1)
    return {
        name: {**result.as_dict(), "bytes_ratio": float(result.total.rows.sum() / reference)}
        for name, result in results.items()
    }
