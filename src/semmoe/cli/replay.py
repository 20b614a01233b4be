"""`semmoe replay`: score plans on a trace, without a model."""

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe.cli import options, solve, tables
from semmoe.cli.app import OFFLINE, command, refuse_given
from semmoe.cli.form import options_of, with_changes
from semmoe.core import Plan, RoutingTrace
from semmoe.evaluation.results import ReplayFile, checked
from semmoe.io import console
from semmoe.io.bounds import number
from semmoe.placement.methods import METHODS, check_applies, obstacle
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class MethodOptions(options.LinksOptions):
    """The methods to replay, and how they solve."""

    method: Annotated[
        str | None,
        options.method(f"One of {solve.METHOD_NAMES}, or all, the default: profile on a share, score on the rest."),
    ] = None
    # plans are scored on the rest
    profile_share: float = number(0.2, 0.001, 0.999, help="Share of the requests to profile on.")
    settings: SolveSettings = field(default_factory=SolveSettings)
    changes: solve.SetOption = None


DECIDED = sorted({*options_of(options.GivenTopology), *options_of(MethodOptions)} - {*options_of(ReplaySettings)})


@command(OFFLINE)
def replay(
    *,
    ctx: typer.Context,
    trace: options.TraceArgument,
    given: options.GivenTopology,
    plan: Annotated[Path | None, options.method("Score this plan on the whole trace.")] = None,
    solved: MethodOptions,
    measure: ReplaySettings,
    as_json: options.Json = False,
) -> None:
    """Score plans on a trace, without a model: the offline experiment.

    Examples: `semmoe replay trace.npz --method all` and `semmoe replay heldout --plan plan --json`
    """
    from semmoe.traces.streams import open_bounded

    settings: dict[str, Any] = {"trace": str(trace), **asdict(measure)}
    if plan is not None:
        refuse_given(ctx, DECIDED, "--plan decides it")
        opened = open_bounded(trace, measure.seed)
        topology, methods = _replay_plan(ctx, opened, plan, measure, settings)
    else:
        refuse_given(ctx, ["cocluster.move_cost"], "plans of a replay begin from no other")
        topology = given.resolve(None, options.OFFLINE_RANKS)
        solving = with_changes(solved.settings, solved.changes or [])
        costs = solve.phase_costs(ctx, solved.load(topology), topology, solving.cocluster)
        settings |= {
            **asdict(topology),
            "profile_share": solved.profile_share,
            "redundant_experts": solving.redundant_experts,
            "load_limit": solving.cocluster.load_limit,
            "remote_rank_cost": solving.cocluster.remote_rank,
            "remote_node_cost": solving.cocluster.remote_node,
        }
        chosen = _applicable(solved.method or "all", topology, solving.redundant_experts)
        solve.refuse_idle(ctx, chosen, topology)
        opened = open_bounded(trace, measure.seed)
        methods = _replay_methods(opened, chosen, topology, measure, solving, solved.profile_share, costs)
    settings["scheduled_by_answers"] = solve.warn_of_answers(opened, topology)
    title = f"{trace.name}: {opened.num_requests} requests, {opened.num_tokens:,} routed tokens"
    found = checked(ReplayFile, {"settings": settings, "methods": methods})
    console.tell(as_json, found, lambda: console.print_table(title, *tables.metrics(methods)))


def _replay_plan(
    ctx: typer.Context, trace: RoutingTrace, path: Path, measure: ReplaySettings, settings: dict[str, Any]
) -> tuple[Topology, dict[str, dict[str, Any]]]:
    from semmoe.evaluation.online import start
    from semmoe.evaluation.replay import profiled_requests
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan
    from semmoe.solver import score

    plan = load_plan(path)
    solve.refuse_unscheduled(ctx, start(plan.requests).keeps_ledger)
    settings |= {"plan": str(path), **asdict(plan.topology)}
    profiled = profiled_requests(trace, plan)
    settings |= {"profiled": bool(profiled), "profiled_requests": profiled, "requests": trace.num_requests}
    if profiled is None:
        console.warn(
            "the plan does not say which requests it was solved on: if they are among these, the figures flatter it"
        )
    elif profiled:
        console.warn(f"{profiled:,} of {trace.num_requests:,} requests were profiled: these figures flatter the plan")
    plans: dict[str, Plan] = {"linear": vanilla_plan(plan.fingerprint, plan.topology), plan.method: plan}
    return plan.topology, score(trace, plans, measure)


def _applicable(method: str, topology: Topology, redundant_experts: int) -> list[str]:
    """The methods to replay: the one named, or all that apply, with a warning that names the others and why."""
    if method != "all":
        check_applies(method, topology, redundant_experts)
        return [method]
    reasons = {name: obstacle(name, topology, redundant_experts) for name in METHODS}
    left_out: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            left_out.setdefault(reason.split(":")[0].removeprefix("it "), []).append(name)
    if left_out:
        words = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left_out.items())
        console.warn(f"left out: {words}")
    return [name for name, reason in reasons.items() if reason is None]


def _replay_methods(
    trace: RoutingTrace,
    methods: list[str],
    topology: Topology,
    measure: ReplaySettings,
    solving: SolveSettings,
    share: float,
    costs: solve.PhaseCosts | None,
) -> dict[str, dict[str, Any]]:
    from semmoe.solver import score, solve_methods
    from semmoe.traces.split import split

    profile, evaluation = split(trace, share, measure.seed)
    with console.bars() as bars:
        advance = bars.task("solving and replaying", len(methods) + 1)
        plans, seconds = solve_methods(profile, topology, methods, solving, advance, costs)
        scores = score(evaluation, plans, measure)
        advance(1)
    return {name: {**scores[name], "solve_seconds": seconds[name]} for name in methods}
