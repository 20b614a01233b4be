"""The command import: what an engine wrote about experts, as a plan or a trace."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.bounds import number
from semmoe.cli.app import OFFLINE, app, refuse_given
from semmoe.cli.form import takes
from semmoe.cli.options import INPUT, OFFLINE_RANKS, OUTPUT, Force, GivenTopology, Json, model_path, resolve_topology
from semmoe.topology import Fingerprint

PLANNED = ["ep_size", "attention", "dp_size", "num_nodes", "redundant_experts"]
Strict = Annotated[
    bool, typer.Option("--strict", help="Of answers: fail at the first bad line.", rich_help_panel=INPUT)
]


@dataclass(frozen=True, kw_only=True)
class Copies:
    redundant_experts: int = number(0, 0, 1 << 20, help="Of counts: redundant experts over all ranks.")


@app.command("import", rich_help_panel=OFFLINE)
@takes(given=GivenTopology, copies=Copies)
def import_(
    ctx: typer.Context,
    file: Annotated[Path, typer.Argument(help="A map, counts, records or answers.", show_default=False)],
    model: Annotated[str, typer.Option(help="The model that they are of.", rich_help_panel=INPUT, callback=model_path)],
    out: Annotated[Path, typer.Option(help="The plan or trace directory.", rich_help_panel=OUTPUT)],
    given: Any = None,
    copies: Any = None,
    strict: Strict = False,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Read what an engine or EPLB wrote about experts.

    A map of physical experts (SGLang's, vLLM-Ascend's or TensorRT-LLM's file, .npy, .pt) becomes a plan, and so
    do counts of activations (SGLang's expert distribution), by EPLB: counts do not say which tokens or requests use an
    expert, so the plan balances load and schedules nothing. SGLang's records of passes, and answers of vLLM or SGLang
    with routed experts (.jsonl), become a trace for `semmoe solve`.

    Lines that hold no answer, and tokens that name an expert twice, are left out and counted.

    Examples: `semmoe import map.json --model MODEL --ep-size 8 --out plan` and
    `semmoe import answers.jsonl --model MODEL --out trace`
    """
    from semmoe.checkpoint import engine_maps
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.files import check_output

    check_output(out, directory=True, force=force, inputs=(file, model))
    found, fingerprint = engine_maps.read_engine_file(file), fingerprint_of(model)
    if found.kind in (engine_maps.MAP, engine_maps.COUNTS):
        refuse_given(ctx, ["strict"], "there are no lines of which one could be left out")
        if found.kind == engine_maps.MAP:
            refuse_given(ctx, ["redundant_experts"], "a map has the copies that it has")
        result = _plan(found, file, Path(model), fingerprint, given(), copies().redundant_experts, out)
    else:
        refuse_given(ctx, PLANNED, "a trace is of no topology: give it to semmoe solve")
        result = _trace(found, file, Path(model), fingerprint, strict, out)
    result = {"from": found.kind, "out": str(out), "note": found.note, **result}
    if as_json:
        console.print_json(result)
    else:
        _tell(result)


def _plan(
    found: Any, file: Path, model: Path, fingerprint: Fingerprint, given: GivenTopology, copies: int, out: Path
) -> dict[str, Any]:
    from semmoe.checkpoint.engine_maps import plan_of
    from semmoe.plan import save_plan

    topology = resolve_topology(None, given, OFFLINE_RANKS)
    try:
        plan = plan_of(found, model, fingerprint, topology, copies)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    save_plan(plan, out)
    return {
        "method": plan.method,
        "layers": fingerprint.num_layers,
        "ep_size": topology.ep_size,
        "redundant_experts": plan.placement.redundant_experts,
    }


def _trace(found: Any, file: Path, model: Path, fingerprint: Fingerprint, strict: bool, out: Path) -> dict[str, Any]:
    from semmoe.checkpoint.engine_routes import write_requests
    from semmoe.dataset import LeftOut
    from semmoe.files import atomic_directory
    from semmoe.streams import check_tokens
    from semmoe.trace import TraceHeader, TraceWriter

    left_out = LeftOut(file, strict)
    header = TraceHeader(fingerprint=fingerprint, dataset_hash=f"imported:{file.name}", settings={"from": found.kind})
    with atomic_directory(out, private=True) as staged:
        with TraceWriter(staged, header, private=True) as writer:
            counts = write_requests(writer, found, file, model, left_out)
        check_tokens(staged, str(file))
    return {**counts, "lines": left_out.counts(), "left_out_lines": str(left_out) if left_out.reasons else ""}


def _tell(result: dict[str, Any]) -> None:
    for words in (result["note"], result.get("left_out_lines"), _left_out_tokens(result)):
        if words:
            console.warn(words)
    if "tokens" in result:
        console.out.print(f"{result['out']}: {result['requests']:,} requests, {result['tokens']:,} tokens")
        return
    words = f"a plan for {result['ep_size']} ranks with {result['redundant_experts']} redundant experts"
    console.out.print(f"{result['out']}: {words}, by {result['method']}; it schedules no request and no token")


def _left_out_tokens(result: dict[str, Any]) -> str:
    """Why tokens are left out, and how many; empty if none is."""
    reasons = (
        ("unassigned_tokens", "SGLang's records do not say of which request they are"),
        ("impossible_tokens", "they name an expert twice in a layer, which no router does"),
    )
    words = [f"{result[name]:,} tokens are left out: {why}" for name, why in reasons if result.get(name)]
    return "; ".join(words)
