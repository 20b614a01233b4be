"""The command import: what an engine wrote about experts, as a plan or a trace."""

from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe.checkpoint.engine_files import FORMATS, Format, load
from semmoe.checkpoint.engine_maps import Model, plan_of
from semmoe.checkpoint.engine_routes import Source, write_requests
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, command, refuse_given
from semmoe.io import console
from semmoe.io.files import atomic_directory, check_output
from semmoe.topology import Topology
from semmoe.traces.dataset import LeftOut
from semmoe.traces.trace import TraceHeader, TraceWriter

PLANNED = ["ep_size", "attention", "dp_size", "num_nodes", "redundant_experts"]


@command(OFFLINE, name="import")
def import_(
    *,
    ctx: typer.Context,
    file: Annotated[Path, options.argument(f"One of {', '.join(one.name for one in FORMATS)}.")],
    model: Annotated[str, options.model("The model that they are of.")],
    out: Annotated[Path, options.output("The plan or trace directory.")],
    given: options.GivenTopology,
    redundant_experts: Annotated[
        int, options.method("Of counts: redundant experts over all ranks.", min=0, max=1 << 20)
    ] = 0,
    strict: Annotated[bool, options.inputs("Of answers: fail at the first bad line.", "--strict")] = False,
    force: options.Force = False,
    as_json: options.Json = False,
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
    from semmoe.engines.transformers.config import fingerprint_of

    check_output(out, directory=True, force=force, inputs=(file, model))
    form, content = load(file)
    described = Model(Path(model), fingerprint_of(model))
    if form.kind in ("map", "counts"):
        refuse_given(ctx, ["strict"], "there are no lines of which one could be left out")
        if form.kind == "map":
            refuse_given(ctx, ["redundant_experts"], "a map has the copies that it has")
        topology = given.resolve(None, options.OFFLINE_RANKS)
        result = _plan(form, content, file, described, topology, redundant_experts, out)
    else:
        refuse_given(ctx, PLANNED, "a trace is of no topology: give it to semmoe solve")
        result = _trace(form, content, Source(file, described, LeftOut(file, strict)), out)
    result = {"from": form.kind, "out": str(out), **result}
    console.tell(as_json, result, lambda: _print(result))


def _plan(form: Format, content: Any, file: Path, model: Any, topology: Topology, copies: int, out: Path) -> dict:
    from semmoe.plan import save_plan

    try:
        experts = form.read(content)
        plan = plan_of(form.kind, experts, model, topology, copies)
    except ValueError as error:
        raise ValueError(f"{file}: {error}") from None
    save_plan(plan, out)
    return {
        "note": experts.note,
        "method": plan.method,
        "layers": plan.fingerprint.num_layers,
        "ep_size": topology.ep_size,
        "redundant_experts": plan.placement.redundant_experts,
    }


def _trace(form: Format, content: Any, source: Source, out: Path) -> dict[str, Any]:
    from semmoe.traces.streams import check_tokens

    name, settings = f"imported:{source.path.name}", {"from": form.kind}
    header = TraceHeader(fingerprint=source.model.fingerprint, dataset_hash=name, settings=settings)
    with atomic_directory(out, private=True) as staged:
        with TraceWriter(staged, header, private=True) as writer:
            counts = write_requests(writer, form.read(content, source), source)
        check_tokens(staged, str(source.path))
    left_out = source.left_out
    return {
        "note": "",
        **counts,
        "lines": left_out.counts(),
        "left_out_lines": str(left_out) if left_out.reasons else "",
    }


def _print(result: dict[str, Any]) -> None:
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
    reasons = {
        "unassigned_tokens": "SGLang's records do not say of which request they are",
        "impossible_tokens": "they name an expert twice in a layer, which no router does",
    }
    words = [f"{result[name]:,} tokens are left out: {why}" for name, why in reasons.items() if result.get(name)]
    return "; ".join(words)
