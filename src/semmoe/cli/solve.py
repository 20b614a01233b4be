"""The command solve: make a plan from a trace."""

from dataclasses import replace
from pathlib import Path
from time import monotonic
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.calibration import PhaseLinks, load_links
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, app, refuse_given, was_given
from semmoe.cli.forecast import ShareOption, gain_of_pass, layer_shape, print_expected, print_gain_of_pass
from semmoe.cli.form import takes, with_changes
from semmoe.core import Plan, RoutingTrace
from semmoe.cost import LayerShape
from semmoe.methods import METHODS, check_applies, find_method
from semmoe.rowcosts import RowCosts
from semmoe.settings import QUICK, THOROUGH, CoclusterSettings, ReplaySettings, RunningSettings, SolveSettings
from semmoe.topology import Fingerprint, Topology

PhaseCosts = tuple[RowCosts, RowCosts]
EFFORT = ["quick", "thorough", "budget"]
METHOD_NAMES = ", ".join(METHODS) + ", or a module by its dotted name"
DecodeLinksOption = Annotated[
    str | None, options.links("The same of decoding, where its all-to-all is another, such as h200-400g-ll.")
]
ModelOption = Annotated[
    str | None, options.method("Match unprofiled tokens by this model's embeddings.", callback=options.model_path)
]
SetOption = Annotated[
    list[str] | None,
    options.method(
        "NAME=VALUE, a setting without an option, such as cocluster.remote_rank=0; may be repeated.", "--set"
    ),
]


@app.command(rich_help_panel=OFFLINE)
@takes(given=options.GivenTopology, settings=SolveSettings, widths=options.Widths, served=RunningSettings)
def solve(
    ctx: typer.Context,
    trace: options.TraceArgument,
    out: Annotated[Path, options.output("The plan directory.")],
    force: options.Force = False,
    given: Any = None,
    method: Annotated[str, options.method(f"One of {METHOD_NAMES}.")] = "semmoe",
    settings: Any = None,
    changes: SetOption = None,
    links: options.LinksOption = None,
    decode_links: DecodeLinksOption = None,
    share: ShareOption = None,
    widths: Any = None,
    served: Any = None,
    model: ModelOption = None,
    begin: Annotated[Path | None, options.method("Begin at this plan and move only what pays.", "--from")] = None,
    quick: Annotated[bool, options.method("semmoe: half the time, up to 3 % more traffic.", "--quick")] = False,
    thorough: Annotated[bool, options.method("semmoe: twice the time, up to 1 % less traffic.", "--thorough")] = False,
    as_json: options.Json = False,
) -> None:
    """Decide where experts go and build the tables that send tokens after them.

    At the end it shows what the plan should do for held-out requests, beside other methods, and whether it is worth it.

    Examples: `semmoe solve trace --ep-size 8 --attention tp --out plan`, for 16 GPUs on two nodes
    `semmoe solve trace --ep-size 16 --num-nodes 2 --attention dp --links h100-400g --out plan` and, for new traffic,
    `semmoe solve newer --from plan --out next`
    """
    from semmoe.plan import check_plan_output, save_plan
    from semmoe.solver import moved_experts

    check_plan_output(out, force, (trace, begin, model, links, decode_links))
    solving = _with_effort(with_changes(settings(method=method), changes or []), quick, thorough)
    previous, solving = _begin(ctx, begin, solving)
    topology = options.resolve_topology(previous, given(), options.OFFLINE_RANKS)
    check_applies(solving.method, topology, solving.redundant_experts)
    refuse_idle(ctx, [solving.method], topology)
    charged = phase_links(links, decode_links, topology)
    opened = options.read_trace(trace, solving.seed)
    shape = layer_shape(opened.fingerprint, widths(), share)
    costs = phase_costs(ctx, charged, topology, solving.cocluster)
    measure = ReplaySettings(batch_tokens=solving.cocluster.batch_tokens, seed=solving.seed, running=served().running)
    plan = _solve(opened, topology, solving, charged, costs, shape, model, previous, measure)
    save_plan(plan, out)
    counts = {"scheduled_by_answers": warn_of_answers(opened, topology)}
    result = {"plan": str(out), **counts, **gain_of_pass(plan.expected, share)}
    if previous is not None:
        result["moved_experts"], result["experts"] = moved_experts(plan, previous)
    _warn_of_plan(plan, opened, solving.cocluster.load_limit, measure, shape)
    console.tell(as_json, result | {"expected": plan.expected}, lambda: _print(plan, result, begin, out))


def _print(plan: Plan, result: dict[str, Any], begin: Path | None, out: Path) -> None:
    if begin is not None:
        counts = f"{result['moved_experts']:,} of {result['experts']:,}"
        console.out.print(f"{counts} experts move to another rank, from {begin}", markup=False, soft_wrap=True)
    print_expected(out, plan.method, plan.expected)
    print_gain_of_pass(result)


def phase_links(links: str | None, decode: str | None, topology: Topology) -> PhaseLinks:
    """The links given, or the default ones; decoding has those of prefill unless it has its own."""
    prefill = load_links(links or ("h200-nvlink" if topology.num_nodes == 1 else "h200-400g"), topology)
    return PhaseLinks(prefill, prefill if decode is None else load_links(decode, topology))


def phase_costs(
    ctx: typer.Context, links: PhaseLinks, topology: Topology, settings: CoclusterSettings
) -> PhaseCosts | None:
    """What the search weighs: rows as the links charge them, or the weight of a row to another node if it is given."""
    if was_given(ctx, "cocluster.remote_node"):
        refuse_given(ctx, ["decode_links"], "cocluster.remote_node weighs rows in place of what links charge")
        return None
    return links.costs(topology, settings.activation, settings.remote_rank)


def _begin(ctx: typer.Context, begin: Path | None, solving: SolveSettings) -> tuple[Plan | None, SolveSettings]:
    """The plan to begin from, and the settings with its redundant experts unless others are given."""
    from semmoe.plan import load_plan

    if begin is None:
        refuse_given(ctx, ["cocluster.move_cost"], "there is no plan to begin from: give --from")
        return None, solving
    previous = load_plan(begin)
    if was_given(ctx, "redundant_experts"):
        return previous, solving
    return previous, replace(solving, redundant_experts=previous.placement.redundant_experts)


def _warn_of_plan(
    plan: Plan, trace: RoutingTrace, limit: float | None, measure: ReplaySettings, shape: LayerShape | None
) -> None:
    """Warn of what the plan cannot say or do."""
    from semmoe.expectation import excess_load

    if shape is None:
        console.warn(
            "no time is predicted: the trace does not say how wide the model is; give --hidden-size and --expert-size"
        )
    if plan.method == "semmoe" and limit is not None:
        for words in excess_load(trace, plan, limit, measure):
            console.warn(words)


def _with_effort(solving: SolveSettings, quick: bool, thorough: bool) -> SolveSettings:
    if quick and thorough:
        raise ValueError("--quick and --thorough exclude each other")
    effort: dict[str, Any] = QUICK if quick else THOROUGH if thorough else {}
    return replace(solving, cocluster=replace(solving.cocluster, **effort))


def _with_budget(solving: SolveSettings, seconds: float) -> SolveSettings:
    return replace(solving, cocluster=replace(solving.cocluster, budget=seconds))


def _solve(
    trace: RoutingTrace,
    topology: Topology,
    solving: SolveSettings,
    links: PhaseLinks,
    costs: PhaseCosts | None,
    shape: LayerShape | None,
    model: str | None,
    previous: Plan | None,
    measure: ReplaySettings,
) -> Plan:
    """Solve the plan, and estimate what it does for held-out requests."""
    from semmoe.expectation import expect
    from semmoe.placement.problem import Problem
    from semmoe.solver import check_inputs, solve_problem

    check_inputs(trace, topology, solving, previous)
    embeddings = _embeddings(model, trace.fingerprint) if model else None
    layers, begun, budget = trace.fingerprint.num_layers, monotonic(), solving.cocluster.budget
    if budget is not None:
        solving = _with_budget(solving, budget / 2)
    with console.bars() as bars:
        advance = bars.task("solving without held-out requests", layers)
        problem = Problem(trace=trace, topology=topology, settings=solving, previous=previous, costs=costs)
        expected = expect(replace(problem, progress=advance), measure, links, shape)
        advance(0 if expected else layers)
        advance = bars.task("solving", layers)
        if budget is not None:
            solving = _with_budget(solving, max(budget - (monotonic() - begun), 0))
        plan = solve_problem(replace(problem, settings=solving, embeddings=embeddings, progress=advance))
    charged = {"charged": links.described()} if costs is not None and plan.method == "semmoe" else {}
    least = (expected or {}).get("shuffle_from")
    plan = replace(plan, shuffle_from=least or plan.shuffle_from)
    return replace(plan, expected=expected, settings=plan.settings | charged)


def refuse_idle(ctx: typer.Context, methods: list[str], topology: Topology) -> None:
    """Raise ValueError for given options that have no effect on any of `methods`."""
    names = " and ".join(methods)
    if not {"paper", "semmoe"} & set(methods):
        refuse_given(ctx, ["predictor.", "model"], f"method {names} schedules no tokens")
    if "paper" not in methods:
        refuse_given(ctx, ["paper."], "only the paper's method has it")
        if topology.attn_tp_size == 1:
            refuse_given(ctx, ["predictor.", "model"], "with attention dp semmoe reads prompts only")
    if "semmoe" not in methods:
        refuse_given(ctx, ["load_limit", "phase", "cocluster."], f"{names} has an objective of its own")
        refuse_given(ctx, EFFORT, f"{names} does not search as semmoe does")
    if topology.num_nodes == 1:
        refuse_given(ctx, ["cocluster.remote_node", "cocluster.groups"], "all ranks are on one node")
    refuse_unscheduled(ctx, topology.dp_size > 1 and any(m == "semmoe" or find_method(m).needs_groups for m in methods))


def refuse_unscheduled(ctx: typer.Context, scheduled: bool) -> None:
    if not scheduled:
        refuse_given(ctx, ["running"], "no requests are scheduled by their work")


def _embeddings(model: str, expected: Fingerprint) -> Any:
    """(V, H) float32 input embeddings of the model that the trace was profiled on."""
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.model import load_model

    difference = expected.mismatch(fingerprint_of(model))
    if difference is not None:
        raise ValueError(f"the trace was profiled on another model than {model}: {difference}")
    return load_model(model).get_input_embeddings().weight.detach().numpy()


def warn_of_answers(trace: RoutingTrace, topology: Topology) -> int:
    """The number of requests scheduled by their answers, which a server would not know; a warning is printed."""
    from semmoe.replayer import scheduled_by_answers

    by_answers = scheduled_by_answers(trace, topology)
    if by_answers:
        words = (
            f"{by_answers:,} of {trace.num_requests:,} requests have their answers for prompts, and attention "
            "groups are chosen by these, which no server knows: figures flatter every plan that reads prompts; "
            "give prompt_ids"
        )
        console.warn(words)
    return by_answers
