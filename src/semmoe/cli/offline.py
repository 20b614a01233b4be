"""Commands that need no model: affinity, solve, replay."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console, tables
from semmoe.cli.app import OFFLINE, app, refuse_given
from semmoe.cli.form import takes
from semmoe.cli.options import (
    METHOD,
    OFFLINE_RANKS,
    OUTPUT,
    Force,
    GivenTopology,
    Json,
    LinksOption,
    ResultOut,
    TraceArgument,
    Widths,
    check_result,
    model_path,
    resolve_topology,
    tell_result,
)
from semmoe.core import Plan, RoutingTrace
from semmoe.cost import LayerShape, Links, load_links
from semmoe.methods import METHODS, check_applies, obstacle
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings, SplitSettings
from semmoe.topology import Fingerprint, Topology

OBJECTIVE = ["load_limit", "remote_rank_cost", "remote_node_cost"]
DECIDED = [
    "method",
    "profile_share",
    "ep_size",
    "attention",
    "dp_size",
    "num_nodes",
    "redundant_experts",
    "time_limit",
    "lookback",
    "theta",
    "steps",
    "model",
    *OBJECTIVE,
]
METHOD_NAMES = ", ".join(METHODS)
ModelOption = Annotated[
    str | None,
    typer.Option(
        help="Match unprofiled tokens by this model's embeddings.", rich_help_panel=METHOD, callback=model_path
    ),
]


@app.command(rich_help_panel=OFFLINE)
def affinity(
    trace: TraceArgument,
    prediction: Annotated[bool, typer.Option(help="Also predict held-out routing.", rich_help_panel=METHOD)] = True,
    out: ResultOut = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Show how concentrated the routing of a trace is: the statistics of the paper's Table 1 and appendix A.2.

    Example: `semmoe affinity trace`
    """
    from semmoe import concentration
    from semmoe.affinity import build_affinity
    from semmoe.trace import describe, open_trace

    check_result(out, force)
    opened = open_trace(trace)
    result: dict[str, Any] = {"trace": describe(opened)}
    with console.bars() as bars:
        advance = bars.task("measuring", 3)
        result["concentration"] = concentration.concentration(opened, build_affinity(opened))
        advance(1)
        if prediction:
            result["static_top_k"] = concentration.prediction(opened)
            advance(1)
            result["next_layer"] = concentration.next_layer_hit_rate(opened)
        advance(2 - int(prediction))
    if not tell_result(result, out, as_json):
        tables.print_affinity(result)


@app.command(rich_help_panel=OFFLINE)
@takes(given=GivenTopology, settings=SolveSettings, widths=Widths)
def solve(
    ctx: typer.Context,
    trace: TraceArgument,
    out: Annotated[Path, typer.Option(help="The plan directory.", rich_help_panel=OUTPUT)],
    force: Force = False,
    given: Any = None,
    method: Annotated[
        str | None, typer.Option(help=f"One of {METHOD_NAMES}; by default semmoe.", rich_help_panel=METHOD)
    ] = None,
    settings: Any = None,
    links: LinksOption = None,
    widths: Any = None,
    model: ModelOption = None,
    as_json: Json = False,
) -> None:
    """Decide where experts go and build the tables that send tokens after them.

    At the end it shows what the plan is expected to do for held-out requests, compared with contiguous placement and
    EPLB, and whether that is worth it on your links.

    Examples: `semmoe solve trace --ep-size 8 --attention tp --out plan` and
    `semmoe solve trace --links pcie5 --out plan`
    """
    from semmoe.plan import check_plan_output, save_plan
    from semmoe.trace import open_trace

    check_plan_output(out, force)
    solving: SolveSettings = settings(method=method or SolveSettings().method)
    topology = resolve_topology(None, given(), OFFLINE_RANKS)
    check_applies(solving.method, topology, solving.redundant_experts)
    _refuse_idle(ctx, [solving.method], topology)
    chosen_links = load_links(links or ("h200-nvlink" if topology.num_nodes == 1 else "h200-400g"), topology.num_nodes)
    opened = open_trace(trace)
    shape = _layer_shape(opened.fingerprint, widths())
    embeddings = _embeddings(model, opened.fingerprint) if model else None
    plan = _solve(opened, topology, solving, chosen_links, shape, embeddings)
    save_plan(plan, out)
    by_answers = _warn_of_answers(opened, topology)
    if shape is None:
        console.err.print(
            "[yellow]warning:[/] no time is predicted: the trace does not say how wide the model is; "
            "give --hidden-size and --expert-size",
            soft_wrap=True,
        )
    if as_json:
        console.print_json({"plan": str(out), "scheduled_by_answers": by_answers, "expected": plan.expected})
    else:
        _print_expected(out, solving.method, plan.expected)


def _solve(
    trace: RoutingTrace,
    topology: Topology,
    solving: SolveSettings,
    links: Links,
    shape: LayerShape | None,
    embeddings: Any,
) -> Plan:
    """Solve the plan, and estimate what it does for held-out requests."""
    from semmoe.solver import expect
    from semmoe.solver import solve as solve_plan

    layers = trace.fingerprint.num_layers
    measure = ReplaySettings(batch_tokens=solving.cocluster.batch_tokens, seed=solving.seed)
    with console.bars() as bars:
        advance = bars.task("solving without held-out requests", layers)
        expected = expect(trace, topology, solving, measure, links, shape, progress=advance)
        advance(0 if expected else layers)
        advance = bars.task("solving", layers)
        return replace(solve_plan(trace, topology, solving, embeddings, advance), expected=expected)


def _layer_shape(f: Fingerprint, widths: Widths) -> LayerShape | None:
    """The shape of a layer from the trace and the given widths; None if a width is unknown."""
    sizes = []
    for name in ("hidden_size", "expert_size"):
        given, known = getattr(widths, name) or 0, getattr(f, name)
        if 0 not in (given, known) and given != known:
            raise ValueError(f"--{name.replace('_', '-')} is {given}, but the trace was profiled with {known}")
        sizes.append(given or known)
    return LayerShape(hidden_size=sizes[0], expert_size=sizes[1], top_k=f.top_k) if all(sizes) else None


def _print_expected(out: Path, method: str, expected: dict[str, Any] | None) -> None:
    if expected is None:
        console.out.print(f"{out}: too few requests to hold any out, so nothing can be expected of this plan")
        return
    title = f"{out}: expected, from {expected['requests']} held-out requests"
    console.print_table(title, *tables.metrics({method: expected, **expected["others"]}))
    tables.print_prediction(method, {**expected, "layers": []})  # single layers are for the report
    _print_verdict(expected)


def _print_verdict(expected: dict[str, Any]) -> None:
    if expected["verdict"] is None:
        return
    links, without = expected["links"], expected["without_all_to_all"]
    words = f"on {links['name']} ({links['kind']}), {expected['tokens_per_batch']:,.0f} tokens a batch"
    if without is not None:
        words += f"; without all-to-all a layer takes {without['layer_us']:,.0f} us"
    console.out.print(f"{words}:", markup=False)
    console.out.print(expected["verdict"]["sentence"], style="bold", markup=False)


def _refuse_idle(ctx: typer.Context, methods: list[str], topology: Topology) -> None:
    """Raise ValueError for given options that have no effect on any of `methods`."""
    names = " and ".join(methods)
    if not {"paper", "semmoe"} & set(methods):
        refuse_given(ctx, ["lookback", "model"], f"method {names} schedules no tokens")
    if "paper" not in methods:
        refuse_given(ctx, ["theta", "steps"], "only the paper's method has it")
        if topology.attn_tp_size == 1:
            refuse_given(ctx, ["lookback", "model"], "with attention dp semmoe reads prompts only")
    if "semmoe" not in methods:
        refuse_given(ctx, OBJECTIVE, f"{names} has an objective of its own")
    if "moetuner" not in methods:
        refuse_given(ctx, ["time_limit"], f"no integer program is solved by {', '.join(methods)}")
    if topology.num_nodes == 1:
        refuse_given(ctx, ["remote_node_cost"], "all ranks are on one node")


def _embeddings(model: str, expected: Fingerprint) -> Any:
    """(V, H) float32 input embeddings of the model that the trace was profiled on."""
    from semmoe.engines.transformers.model import fingerprint_of, load_model

    difference = expected.mismatch(fingerprint_of(model))
    if difference is not None:
        raise ValueError(f"the trace was profiled on another model than {model}: {difference}")
    return load_model(model).get_input_embeddings().weight.detach().numpy()


@app.command(rich_help_panel=OFFLINE)
@takes(given=GivenTopology, measure=ReplaySettings, solving=SolveSettings, share=SplitSettings)
def replay(
    ctx: typer.Context,
    trace: TraceArgument,
    given: Any = None,
    plan: Annotated[
        Path | None, typer.Option(help="Score this plan on the whole trace.", rich_help_panel=METHOD)
    ] = None,
    method: Annotated[
        str | None,
        typer.Option(
            help=f"One of {METHOD_NAMES}, or all, the default: profile on a share, score on the rest.",
            rich_help_panel=METHOD,
        ),
    ] = None,
    share: Any = None,
    measure: Any = None,
    solving: Any = None,
    model: ModelOption = None,
    out: ResultOut = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Score plans on a trace, without a model: the offline experiment.

    Examples: `semmoe replay trace.npz --method all` and `semmoe replay heldout --plan plan --json`
    """
    from semmoe.trace import open_trace

    check_result(out, force)
    scoring: ReplaySettings = measure()
    settings: dict[str, Any] = {"trace": str(trace), **asdict(scoring)}
    if plan is not None:
        refuse_given(ctx, DECIDED, "--plan decides it")
        opened = open_trace(trace)
        topology, methods = _replay_plan(opened, plan, scoring, settings)
    else:
        topology, solve_by = resolve_topology(None, given(), OFFLINE_RANKS), solving()
        settings |= asdict(topology) | asdict(share()) | _said_of(solve_by)
        chosen = _applicable(method or "all", topology, solve_by.redundant_experts)
        _refuse_idle(ctx, chosen, topology)
        opened = open_trace(trace)
        embeddings = _embeddings(model, opened.fingerprint) if model else None
        methods = _replay_methods(opened, chosen, topology, scoring, solve_by, share().profile_share, embeddings)
    settings["scheduled_by_answers"] = _warn_of_answers(opened, topology)
    if tell_result({"settings": settings, "methods": methods}, out, as_json):
        return
    title = f"{trace.name}: {opened.num_requests} requests, {opened.num_tokens:,} routed tokens"
    console.print_table(title, *tables.metrics(methods))
    for name, figures in methods.items():
        tables.print_prediction(name, figures)


def _said_of(solving: SolveSettings) -> dict[str, Any]:
    """The entries of a replay's JSON that state how its plans were solved."""
    objective: CoclusterSettings = solving.cocluster
    return {
        "redundant_experts": solving.redundant_experts,
        "load_limit": objective.load_limit,
        "remote_rank_cost": objective.remote_rank,
        "remote_node_cost": objective.remote_node,
        "time_limit": solving.moetuner.time_limit,
    }


def _replay_plan(
    trace: RoutingTrace, path: Path, measure: ReplaySettings, settings: dict[str, Any]
) -> tuple[Topology, dict[str, dict[str, Any]]]:
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan
    from semmoe.replayer import profiled_requests
    from semmoe.solver import score

    plan = load_plan(path)
    settings |= {"plan": str(path), **asdict(plan.topology)}
    profiled = profiled_requests(trace, plan)
    settings |= {"profiled": bool(profiled), "profiled_requests": profiled, "requests": trace.num_requests}
    _warn_of_profiled(profiled, trace.num_requests)
    plans: dict[str, Plan] = {"linear": vanilla_plan(plan.fingerprint, plan.topology), plan.method: plan}
    return plan.topology, score(trace, plans, measure)


def _warn_of_profiled(profiled: int | None, requests: int) -> None:
    """Warn if the plan was solved on replayed requests; profiled: their number, None if the plan does not state it."""
    if profiled is None:
        words = "the plan does not say which requests it was solved on: if they are among these, the figures flatter it"
    else:
        words = f"{profiled:,} of {requests:,} requests were profiled: these figures flatter the plan"
    if profiled != 0:
        console.err.print(f"[yellow]warning:[/] {words}", soft_wrap=True, highlight=False)


def _warn_of_answers(trace: RoutingTrace, topology: Topology) -> int:
    """The number of requests scheduled by their answers, which a server would not know; a warning is printed."""
    from semmoe.replayer import scheduled_by_answers

    by_answers = scheduled_by_answers(trace, topology)
    if by_answers:
        words = (
            f"{by_answers:,} of {trace.num_requests:,} requests have their answers for prompts, and attention "
            "groups are chosen by these, which no server knows: figures flatter every plan that reads prompts; "
            "give prompt_ids"
        )
        console.err.print(f"[yellow]warning:[/] {words}", soft_wrap=True, highlight=False)
    return by_answers


def _applicable(method: str, topology: Topology, redundant_experts: int) -> list[str]:
    """The methods to replay: the one named, or all that apply, with a warning that names the others and why."""
    if method not in (*METHODS, "all"):
        raise ValueError(f"method must be one of {METHOD_NAMES} or all, not {method!r}")
    reasons = {name: obstacle(name, topology, redundant_experts) for name in METHODS if method in ("all", name)}
    if method != "all" and reasons[method] is not None:
        raise ValueError(f"method {method} does not apply: {reasons[method]}")
    left_out: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        if reason is not None:
            left_out.setdefault(reason.split(":")[0].removeprefix("it "), []).append(name)
    if left_out:
        words = "; ".join(f"{', '.join(names)} ({reason})" for reason, names in left_out.items())
        console.err.print(f"[yellow]warning:[/] left out: {words}", soft_wrap=True)
    return [name for name, reason in reasons.items() if reason is None]


def _replay_methods(
    trace: RoutingTrace,
    methods: list[str],
    topology: Topology,
    measure: ReplaySettings,
    solving: SolveSettings,
    share: float,
    embeddings: Any,
) -> dict[str, dict[str, Any]]:
    from semmoe.solver import score, solve_methods
    from semmoe.splitter import split

    profile, evaluation = split(trace, share, measure.seed)
    with console.bars() as bars:
        advance = bars.task("solving and replaying", len(methods) + 1)
        plans, seconds = solve_methods(profile, topology, methods, solving, advance, embeddings)
        scores = score(evaluation, plans, measure)
        advance(1)
    return {name: {**scores[name], "solve_seconds": seconds[name]} for name in methods}
