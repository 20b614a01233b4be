"""The command solve: make a plan from a trace."""

from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semmoe.cli import options, tables
from semmoe.cli.app import OFFLINE, as_given, command, refuse_given
from semmoe.cli.form import with_changes
from semmoe.core import Plan, RoutingTrace
from semmoe.costs.links import PhaseLinks
from semmoe.costs.rows import RowCosts
from semmoe.costs.timing import LayerShape, end_to_end
from semmoe.io import console
from semmoe.io.bounds import number
from semmoe.placement.methods import METHODS, check_applies, find_method
from semmoe.settings import QUICK, THOROUGH, CoclusterSettings, ReplaySettings, RunningSettings, SolveSettings
from semmoe.topology import Fingerprint, Topology

if TYPE_CHECKING:
    from semmoe.placement.problem import Problem, Progress

PhaseCosts = tuple[RowCosts, RowCosts]
METHOD_NAMES = ", ".join(METHODS) + ", or a module by its dotted name"
SetOption = Annotated[
    list[str] | None,
    options.method(
        "NAME=VALUE, a setting without an option, such as cocluster.remote_rank=0; may be repeated.", "--set"
    ),
]

width = partial(number, None, 0, 1 << 24, panel="Links")


@dataclass(frozen=True, kw_only=True)
class SolveOptions:
    """How a plan is solved."""

    method: Annotated[str, options.method(f"One of {METHOD_NAMES}.")] = "semmoe"
    settings: SolveSettings = field(default_factory=SolveSettings)
    changes: SetOption = None
    model: Annotated[
        str | None, options.method("Match unprofiled tokens by this model's embeddings.", callback=options.model_path)
    ] = None
    begin: Annotated[Path | None, options.method("Begin at this plan and move only what pays.", "--from")] = None
    quick: Annotated[bool, options.method("semmoe: half the time, up to 3 % more traffic.", "--quick")] = False
    thorough: Annotated[bool, options.method("semmoe: twice the time, up to 1 % less traffic.", "--thorough")] = False

    def solving(self) -> SolveSettings:
        """The settings by all options together."""
        changed = with_changes(replace(self.settings, method=self.method), self.changes or [])
        if self.quick and self.thorough:
            raise ValueError("--quick and --thorough exclude each other")
        effort: dict[str, Any] = QUICK if self.quick else THOROUGH if self.thorough else {}
        return replace(changed, cocluster=replace(changed.cocluster, **effort))


@dataclass(frozen=True, kw_only=True)
class ForecastOptions(options.LinksOptions, RunningSettings):
    """The server that a plan is judged for; None: not given."""

    share: float | None = number(
        None,
        0.001,
        0.999,
        panel="Links",
        help="Share of a pass that all-to-alls take on your server, measured without a plan: also print the gain of a "
        "pass. At 0.4, a plan that saves 30 % of this time on --links makes it 1 / (1 - 0.4 * 0.3) = 1.136 times as "
        "fast.",
    )
    hidden_size: int | None = width(help="Width of the model, if the trace does not say.")
    expert_size: int | None = width(help="Width of an expert, if the trace does not say.")

    def layer_shape(self, f: Fingerprint) -> LayerShape | None:
        """The shape of a layer from the trace and the given widths; None if a width is unknown.

        Raises ValueError if widths contradict the trace, or if one is unknown and a share of the time is given.
        """
        widths = {name: getattr(self, name) or getattr(f, name) for name in ("hidden_size", "expert_size")}
        for name, width in widths.items():
            if getattr(f, name) not in (0, width):
                option = f"--{name.replace('_', '-')}"
                raise ValueError(f"{option} is {width}, but the trace was profiled with {getattr(f, name)}")
        if self.share is not None and not all(widths.values()):
            raise ValueError("--share needs the widths of the model: give --hidden-size and --expert-size")
        return LayerShape(**widths, top_k=f.top_k) if all(widths.values()) else None


@command(OFFLINE)
def solve(
    *,
    ctx: typer.Context,
    trace: options.TraceArgument,
    out: Annotated[Path, options.output("The plan directory.")],
    force: options.Force = False,
    given: options.GivenTopology,
    how: SolveOptions,
    server: ForecastOptions,
    as_json: options.Json = False,
) -> None:
    """Decide where experts go and build the tables that send tokens after them.

    At the end it shows what the plan should do for held-out requests, beside other methods, and whether it is worth it.

    Examples: `semmoe solve trace --ep-size 8 --attention tp --out plan`, for 16 GPUs on two nodes
    `semmoe solve trace --ep-size 16 --num-nodes 2 --attention dp --links h100-400g --out plan` and, for new traffic,
    `semmoe solve newer --from plan --out next`
    """
    from semmoe.placement.problem import Problem
    from semmoe.plan import check_plan_output, save_plan
    from semmoe.solver import check_problem, moved_experts
    from semmoe.traces.streams import open_bounded

    check_plan_output(out, force, (trace, how.begin, how.model, server.links, server.decode_links))
    previous, solving = _begin(ctx, how.begin, how.solving())
    topology = given.resolve(previous, options.OFFLINE_RANKS)
    check_applies(solving.method, topology, solving.redundant_experts)
    refuse_idle(ctx, [solving.method], topology)
    links = server.load(topology)
    opened = open_bounded(trace, solving.seed)
    shape = server.layer_shape(opened.fingerprint)
    costs = phase_costs(ctx, links, topology, solving.cocluster)
    problem = Problem(trace=opened, topology=topology, settings=solving, previous=previous, costs=costs)
    measure = ReplaySettings(batch_tokens=solving.cocluster.batch_tokens, seed=solving.seed, running=server.running)
    check_problem(problem)
    problem = _with_embeddings(problem, how.model)
    with console.bars() as bars:
        plan = solve_expected(problem, measure, links, shape, bars)
    save_plan(plan, out)
    counts = {"scheduled_by_answers": warn_of_answers(opened, topology)}
    result = {"plan": str(out), **counts, **gain_of_pass(plan.expected, server.share)}
    if previous is not None:
        result["moved_experts"], result["experts"] = moved_experts(plan, previous)
    if shape is None:
        words = "the trace does not say how wide the model is; give --hidden-size and --expert-size"
        console.warn(f"no time is predicted: {words}")
    _warn_of_load(plan, problem, measure)
    console.tell(as_json, result | {"expected": plan.expected}, lambda: _print(plan, result, how.begin, out))


def _print(plan: Plan, result: dict[str, Any], begin: Path | None, out: Path) -> None:
    if begin is not None:
        counts = f"{result['moved_experts']:,} of {result['experts']:,}"
        console.say(f"{counts} experts move to another rank, from {begin}")
    tables.print_expected(out, plan.method, plan.expected)
    tables.print_gain_of_pass(result)


def gain_of_pass(expected: dict[str, Any] | None, share: float | None) -> dict[str, Any]:
    """The gain of a whole pass over one on the linear placement, by name; nothing without a share or a forecast."""
    if share is None or expected is None:
        return {}
    linear = expected["others"].get("linear", expected)["all_to_all_us"]
    saving = 1 - expected["all_to_all_us"] / linear if linear > 0 else 0.0
    gain = {"share": share, "saving": saving, "gain": end_to_end(share, saving), "links": expected["links"]["name"]}
    return {"end_to_end": gain}


def phase_costs(
    ctx: typer.Context, links: PhaseLinks, topology: Topology, settings: CoclusterSettings
) -> PhaseCosts | None:
    """What the search weighs: rows as the links charge them, or the weight of a row to another node if it is given."""
    if as_given(ctx, "cocluster.remote_node"):
        refuse_given(ctx, ["decode_links"], "cocluster.remote_node weighs rows in place of what links charge")
        return None
    return links.costs(topology, settings.activation, settings.remote_rank)


def _begin(ctx: typer.Context, begin: Path | None, solving: SolveSettings) -> tuple[Plan | None, SolveSettings]:
    """The plan to begin from, and the settings with its redundant experts unless others are given."""
    from semmoe.plan import load_plan

    if begin is None:
        refuse_given(ctx, ["cocluster.move_cost"], "experts move only from a previous plan: give --from")
        return None, solving
    previous = load_plan(begin)
    if not as_given(ctx, "redundant_experts"):
        solving = replace(solving, redundant_experts=previous.placement.redundant_experts)
    return previous, solving


def _warn_of_load(plan: Plan, problem: "Problem", measure: ReplaySettings) -> None:
    from semmoe.evaluation.forecast import excess_load

    limit = problem.settings.cocluster.load_limit
    if plan.method == "semmoe" and limit is not None:
        for words in excess_load(problem.trace, plan, limit, measure):
            console.warn(words)


def solve_expected(
    problem: "Problem", measure: ReplaySettings, links: PhaseLinks, shape: LayerShape | None, bars: console.Bars
) -> Plan:
    """Estimate the plan's figures for held-out requests, which gets half of the time, and solve it."""
    from semmoe.evaluation.forecast import expect
    from semmoe.solver import solve_problem

    layers = problem.trace.fingerprint.num_layers
    budget = problem.settings.cocluster.budget
    begun = monotonic()
    advance = bars.task("solving without held-out requests", layers)
    half = None if budget is None else budget / 2
    _warn_of_budget(problem)
    expected = expect(_within(problem, half, advance), measure, links, shape)
    advance(0 if expected else layers)
    advance = bars.task("solving", layers)
    rest = None if budget is None else max(budget - (monotonic() - begun), 0)
    plan = solve_problem(_within(problem, rest, advance))
    charged = {"charged": links.described()} if problem.costs is not None and plan.method == "semmoe" else {}
    least = (expected or {}).get("shuffle_from") or plan.shuffle_from
    return replace(plan, shuffle_from=least, expected=expected, settings=plan.settings | charged)


def _warn_of_budget(problem: "Problem") -> None:
    from semmoe.tokens.predictor import least_seconds

    budget, f = problem.settings.cocluster.budget, problem.trace.fingerprint
    if budget is None or problem.topology.attn_tp_size == 1:
        return
    least = 2 * least_seconds(f)
    if least > budget:
        words = f"the least solve of {f.num_layers} layers of {f.num_experts} experts takes about {least:.0f} s"
        console.warn(f"--budget {budget:g} is too short: {words}")


def _within(problem: "Problem", seconds: float | None, progress: "Progress") -> "Problem":
    """The problem with this time to solve it in; None: any."""
    cocluster = replace(problem.settings.cocluster, budget=seconds)
    return replace(problem, settings=replace(problem.settings, cocluster=cocluster), progress=progress)


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
        refuse_given(ctx, ["load_limit", "phase", "cocluster."], f"{names} has its own objective")
        refuse_given(ctx, ["quick", "thorough", "budget"], f"{names} does not search as semmoe does")
    if topology.num_nodes == 1:
        refuse_given(ctx, ["cocluster.remote_node"], "all ranks are on one node")
    refuse_unscheduled(ctx, topology.dp_size > 1 and any(m == "semmoe" or find_method(m).needs_groups for m in methods))


def refuse_unscheduled(ctx: typer.Context, scheduled: bool) -> None:
    if not scheduled:
        refuse_given(ctx, ["running"], "no requests are scheduled by their work")


def _with_embeddings(problem: "Problem", model: str | None) -> "Problem":
    """The problem with the (V, H) float32 input embeddings of the model; unchanged without a model."""
    if model is None:
        return problem
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.model import load_model

    what = f"the trace was profiled on another model than {model}:"
    problem.trace.fingerprint.check_same(fingerprint_of(model), what)
    embeddings = load_model(model).get_input_embeddings().weight.detach().numpy()
    return replace(problem, embeddings=embeddings)


def warn_of_answers(trace: RoutingTrace, topology: Topology) -> int:
    """The number of requests scheduled by their answers, which a server would not know; a warning is printed."""
    from semmoe.evaluation.replay import scheduled_by_answers

    by_answers = scheduled_by_answers(trace, topology)
    if by_answers:
        words = (
            f"{by_answers:,} of {trace.num_requests:,} requests have their answers for prompts, and attention "
            "groups are chosen by these, which no server knows: figures flatter every plan that reads prompts; "
            "give prompt_ids"
        )
        console.warn(words)
    return by_answers
