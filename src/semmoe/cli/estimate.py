"""The command estimate: the verdict for a whole model and a load, before anything runs."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semmoe import console
from semmoe.calibration import load_links, shipped
from semmoe.cli.app import OFFLINE, app, refuse_given
from semmoe.cli.form import takes
from semmoe.cli.links import LinksOption
from semmoe.cli.options import (
    LINKS,
    OFFLINE_RANKS,
    OUTPUT,
    Force,
    GivenTopology,
    Json,
    check_result,
    model_path,
    resolve_topology,
    tell_result,
)
from semmoe.core import Plan
from semmoe.estimate.settings import ROUTING, EstimateSettings
from semmoe.results import EstimateFile

if TYPE_CHECKING:
    from semmoe.estimate.forecast import Case

COLUMNS = {
    "ttft_ms": ("first\ntoken ms", 0),
    "tpot_ms": ("ms per\ntoken", 2),
    "tokens_per_second_per_gpu": ("tokens/s\nper GPU", 0),
    "with_prefill_tokens_per_second_per_gpu": ("with\nprefill", 0),
}


def config_path(name: str) -> str:
    """A model's directory, its `config.json`, or `tiny`."""
    found = name if Path(name).is_file() else model_path(name)
    assert found is not None
    return found


@app.command(rich_help_panel=OFFLINE)
@takes(given=GivenTopology, settings=EstimateSettings)
def estimate(
    ctx: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            help="A model directory or its config.json; weights are not read. `tiny` is the embedded one.",
            show_default=False,
            callback=config_path,
        ),
    ],
    given: Any = None,
    settings: Any = None,
    links: LinksOption = None,
    decode_links: Annotated[
        str | None,
        typer.Option(
            help="Links of decoding; by default the low-latency ones of the same name, where they are shipped.",
            rich_help_panel=LINKS,
            show_default=False,
        ),
    ] = None,
    plan: Annotated[
        Path | None,
        typer.Option(help="A plan for this model, whose expected traffic and load are used.", rich_help_panel=ROUTING),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write the result as JSON.", rich_help_panel=OUTPUT)] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Estimate time per output token, to the first token and throughput of a whole model, with a plan and without.

    Examples: `semmoe estimate MODEL --ep-size 64 --num-nodes 8 --attention dp --links h200-400g --saving 0.3` and, from
    a plan, `semmoe estimate MODEL --plan plan --batch 64`
    """
    from semmoe.estimate.answer import estimate as answer
    from semmoe.estimate.answer import other_model
    from semmoe.estimate.routing import assumed, planned, with_all_reduce

    check_result(out, force)
    asked, opened = _asked(ctx, settings(), plan)
    case = _case(model, opened, given(), asked, links, decode_links)
    kinds: set[str] = {case.links.all_to_all, case.decode_links.all_to_all}
    routings = (
        assumed(case.model, case.topology, kinds, asked) if opened is None else planned(opened, case.model, kinds)
    )
    routings = with_all_reduce(routings, case.topology)
    said, reason = other_model(case, Path(model))
    result = answer(replace(case, outside=said), routings, reason)
    if not tell_result(EstimateFile, result, out, as_json):
        _print(result, case)


def _asked(ctx: typer.Context, asked: EstimateSettings, path: Path | None) -> tuple[EstimateSettings, Plan | None]:
    """The settings, and the plan if one is given; no option is silently ignored."""
    from semmoe.plan import load_plan

    if path is None:
        if asked.saving is None:
            refuse_given(ctx, ["plan_load"], "there is no plan: give --plan or --saving")
        return asked, None
    refuse_given(ctx, ["saving", "load", "plan_load", "redundant_experts"], "--plan decides it")
    return asked, load_plan(path)


def _case(
    model: str,
    plan: Plan | None,
    given: GivenTopology,
    asked: EstimateSettings,
    links: str | None,
    decode_links: str | None,
) -> "Case":
    """What is to be estimated. Raises ValueError for sizes that do not fit together."""
    from semmoe.estimate.forecast import Case
    from semmoe.estimate.hardware import gpu_of
    from semmoe.estimate.model import read_model
    from semmoe.topology import physical_experts

    topology = resolve_topology(plan, given, OFFLINE_RANKS)
    sizes = read_model(Path(model), asked.weights)
    physical_experts(sizes.num_experts, asked.redundant_experts, topology.ep_size)
    name = links or ("h200-nvlink" if topology.num_nodes == 1 else "h200-400g")
    quick = decode_links or (f"{name}-ll" if f"{name}-ll" in shipped() else name)
    both = load_links(name, topology), load_links(quick, topology)
    gpu = gpu_of(asked.gpu, name, both[0])
    return Case(model=sizes, gpu=gpu, topology=topology, links=both[0], decode_links=both[1], settings=asked)


def _print(result: dict[str, Any], case: "Case") -> None:
    asked, topology = case.settings, case.topology
    nodes = "1 node" if topology.num_nodes == 1 else f"{topology.num_nodes} nodes"
    _say(
        f"{case.model.name} on {topology.ep_size} {case.gpu.name.upper()}, {nodes}, attention-{topology.attention}; "
        f"{asked.batch} requests per GPU of {asked.input_length:,} + {asked.output_length:,} tokens"
    )
    columns = ["", *(title for title, _ in COLUMNS.values()), "links'\nshare", "expert\nload", "routing"]
    console.print_table("Per method", columns, [_row(name, one) for name, one in result["methods"].items()])
    for phase, words in (("decode", "A decoding step, ms"), ("prefill", "A prefill, ms")):
        console.print_table(words, ["", *result["methods"], "found by"], _breakdown(result, phase))
    _print_notes(result, case)


def _row(name: str, one: dict[str, Any]) -> list[str]:
    figures = [f"{one[key]:,.{digits}f}" for key, (_, digits) in COLUMNS.items()]
    return [name, *figures, f"{one['communication_share']:.0%}", f"{one['load']:.2f}", one["label"]]


def _breakdown(result: dict[str, Any], phase: str) -> list[list[str]]:
    methods, labels = result["methods"].values(), result["labels"][phase]
    rows = [
        [part, *(f"{one[f'{phase}_ms'].get(part, 0):,.2f}" for one in methods), found] for part, found in labels.items()
    ]
    if any(one[f"{phase}_hidden_ms"] for one in methods):
        rows.append(["hidden by overlap", *(f"{-one[f'{phase}_hidden_ms']:,.2f}" for one in methods), ""])
    return rows


def _print_notes(result: dict[str, Any], case: "Case") -> None:
    """What the tables rest on, what copies cost, the verdict and where it turns."""
    from semmoe.estimate.answer import weakest

    performance, memory = result["performance"], result["memory"]
    why = f" (not aiconfigurator: {performance['reason']})" if performance["reason"] else ""
    found = {phase: weakest(labels.values()) for phase, labels in result["labels"].items()}
    _say(f"time per token: {found['decode']}; to the first token: {found['prefill']} (the weakest of its parts)")
    _say(f"compute by {performance['source']}{why}")
    _say(f"links of prefill: {case.links.name}; of decoding: {case.decode_links.name}")
    tokens, kept = memory["kv_tokens"], case.settings.batch * case.topology.attn_tp_size
    _say(f"memory of a GPU: {memory['weights_gb']:,.1f} GB of weights, KV cache for {tokens:,.0f} tokens")
    if memory["copies_gb"]:
        _say(f"copies take {memory['copies_gb']:,.2f} GB of each GPU: {memory['kv_lost']:.1%} of the KV cache is lost")
    needed = kept * (case.settings.input_length + case.settings.output_length)
    if needed > tokens:
        words = f"this batch needs {needed:,} tokens of KV cache, and there is room for {tokens:,.0f}"
        console.err.print(f"[yellow]warning:[/] {words}", soft_wrap=True, highlight=False)
    if result["verdict"] is None:
        _say("no plan was given: --plan DIR, or an assumption by --saving, says whether one is worth it")
        return
    console.out.print(result["verdict"]["sentence"], style="bold", markup=False)
    _print_break_even(result["break_even"], case)


def _print_break_even(found: dict[str, Any], case: "Case") -> None:
    from semmoe.estimate.answer import bandwidth_of

    where = "between nodes" if case.topology.num_nodes > 1 else "inside the node"
    speed, batch = found["bandwidth"], found["batch"]
    words = {
        "always": f"at any speed of the links {where}",
        "never": f"at no speed of the links {where}",
        "below": f"below {speed['value'] or 0:,.3g} GB/s {where}",
    }[speed["when"]]
    sizes = {
        "always": "at any batch",
        "never": "at no batch whose requests fit",
        "from": f"from {batch['value'] or 0:,} requests per GPU on",
    }[batch["when"]]
    _say(f"a plan with this traffic pays {words} (these have {bandwidth_of(case):,.3g}), and {sizes}")


def _say(words: str) -> None:
    console.out.print(words, markup=False, soft_wrap=True)
