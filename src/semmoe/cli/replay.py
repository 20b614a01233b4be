"""`semmoe replay`: score plans on a trace, without a model."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console, tables
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, app, refuse_given
from semmoe.cli.form import finite, options_of, takes, with_changes
from semmoe.cli.solve import (
    METHOD_NAMES,
    DecodeLinksOption,
    PhaseCosts,
    SetOption,
    phase_costs,
    phase_links,
    refuse_idle,
    refuse_unscheduled,
    warn_of_answers,
)
from semmoe.core import Plan, RoutingTrace
from semmoe.methods import METHODS, check_applies, obstacle
from semmoe.results import ReplayFile
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.topology import Topology

SOLVING = {*options_of(options.GivenTopology), *options_of(SolveSettings)} - {*options_of(ReplaySettings)}
DECIDED = [*sorted(SOLVING), "method", "profile_share", "changes", "links", "decode_links"]


@app.command(rich_help_panel=OFFLINE)
@takes(given=options.GivenTopology, measure=ReplaySettings, solving=SolveSettings)
def replay(
    ctx: typer.Context,
    trace: options.TraceArgument,
    given: Any = None,
    plan: Annotated[Path | None, options.method("Score this plan on the whole trace.")] = None,
    method: Annotated[
        str | None,
        options.method(f"One of {METHOD_NAMES}, or all, the default: profile on a share, score on the rest."),
    ] = None,
    profile_share: Annotated[
        float, options.method("Share of the requests to profile on.", min=0.001, max=0.999, callback=finite)
    ] = 0.2,
    measure: Any = None,
    solving: Any = None,
    changes: SetOption = None,
    links: options.LinksOption = None,
    decode_links: DecodeLinksOption = None,
    out: options.ResultOut = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Score plans on a trace, without a model: the offline experiment.

    Examples: `semmoe replay trace.npz --method all` and `semmoe replay heldout --plan plan --json`
    """
    options.check_result(out, force, (trace, plan, links, decode_links))
    scoring: ReplaySettings = measure()
    settings: dict[str, Any] = {"trace": str(trace), **asdict(scoring)}
    if plan is not None:
        refuse_given(ctx, DECIDED, "--plan decides it")
        opened = options.read_trace(trace, scoring.seed)
        topology, methods = _replay_plan(ctx, opened, plan, scoring, settings)
    else:
        refuse_given(ctx, ["cocluster.move_cost"], "plans of a replay begin from no other")
        topology, solve_by = (
            options.resolve_topology(None, given(), options.OFFLINE_RANKS),
            with_changes(solving(), changes or []),
        )
        costs = phase_costs(ctx, phase_links(links, decode_links, topology), topology, solve_by.cocluster)
        settings |= asdict(topology) | {"profile_share": profile_share} | _described(solve_by)
        refuse_idle(ctx, chosen := _applicable(method or "all", topology, solve_by.redundant_experts), topology)
        opened = options.read_trace(trace, scoring.seed)
        methods = _replay_methods(opened, chosen, topology, scoring, solve_by, profile_share, costs)
    settings["scheduled_by_answers"] = warn_of_answers(opened, topology)
    if options.tell_result(ReplayFile, {"settings": settings, "methods": methods}, out, as_json):
        return
    title = f"{trace.name}: {opened.num_requests} requests, {opened.num_tokens:,} routed tokens"
    console.print_table(title, *tables.metrics(methods))
    for name, figures in methods.items():
        tables.print_prediction(name, figures)


def _described(solving: SolveSettings) -> dict[str, Any]:
    """What a replay's JSON says of how its plans were solved."""
    return {
        "redundant_experts": solving.redundant_experts,
        "load_limit": solving.cocluster.load_limit,
        "remote_rank_cost": solving.cocluster.remote_rank,
        "remote_node_cost": solving.cocluster.remote_node,
    }


def _replay_plan(
    ctx: typer.Context, trace: RoutingTrace, path: Path, measure: ReplaySettings, settings: dict[str, Any]
) -> tuple[Topology, dict[str, dict[str, Any]]]:
    from semmoe.online import start
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan
    from semmoe.replayer import profiled_requests
    from semmoe.solver import score

    plan = load_plan(path)
    refuse_unscheduled(ctx, start(plan.requests).keeps_ledger)
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
    costs: PhaseCosts | None,
) -> dict[str, dict[str, Any]]:
    from semmoe.solver import score, solve_methods
    from semmoe.splitter import split

    profile, evaluation = split(trace, share, measure.seed)
    with console.bars() as bars:
        advance = bars.task("solving and replaying", len(methods) + 1)
        plans, seconds = solve_methods(profile, topology, methods, solving, advance, costs)
        scores = score(evaluation, plans, measure)
        advance(1)
    return {name: {**scores[name], "solve_seconds": seconds[name]} for name in methods}
