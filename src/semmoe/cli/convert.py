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
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Read what an engine or EPLB wrote about experts.

    A map of physical experts (vLLM's or SGLang's JSON, .npy, .pt) becomes a plan, and so do counts of activations
    (SGLang's expert distribution, `semmoe record start --counts-only`), by EPLB: counts do not say which tokens or
    requests use an expert, so the plan balances load and schedules nothing. SGLang's records of passes and vLLM's
    answers with routed experts (.jsonl) become a trace for `semmoe solve`.

    Examples: `semmoe import map.json --model MODEL --ep-size 8 --out plan` and
    `semmoe import answers.jsonl --model MODEL --out trace`
    """
    from semmoe.checkpoint import engine_maps
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.files import check_output

    check_output(out, directory=True, force=force)
    found, fingerprint = engine_maps.read_engine_file(file), fingerprint_of(model)
    _check_model(found.fingerprint, fingerprint, file)
    if found.kind in (engine_maps.MAP, engine_maps.COUNTS):
        if found.kind == engine_maps.MAP:
            refuse_given(ctx, ["redundant_experts"], "a map has the copies that it has")
        result = _plan(found, Path(model), fingerprint, given(), copies().redundant_experts, out)
    else:
        refuse_given(ctx, PLANNED, "a trace is of no topology: give it to semmoe solve")
        result = _trace(found, file, Path(model), fingerprint, out)
    result = {"from": found.kind, "out": str(out), **result}
    if as_json:
        console.print_json(result)
    else:
        _tell(result)


def _check_model(known: Fingerprint | None, model: Fingerprint, file: Path) -> None:
    difference = None if known is None else known.mismatch(model)
    if difference is not None:
        raise ValueError(f"{file} is of another model or tokenizer: {difference}")


def _plan(found: Any, model: Path, fingerprint: Fingerprint, given: GivenTopology, copies: int, out: Path):
    from semmoe.checkpoint.engine_maps import plan_of
    from semmoe.plan import save_plan

    plan = plan_of(found, model, fingerprint, resolve_topology(None, given, OFFLINE_RANKS), copies)
    save_plan(plan, out)
    return {"method": plan.method, "layers": fingerprint.num_layers, "ep_size": plan.topology.ep_size,
            "redundant_experts": plan.placement.redundant_experts}  # fmt: skip


def _trace(found: Any, file: Path, model: Path, fingerprint: Fingerprint, out: Path):
    from semmoe.checkpoint.engine_maps import PASSES, prompts_of_passes, requests_of_answers
    from semmoe.files import atomic_directory
    from semmoe.trace import TraceHeader, TraceWriter

    requests, left_out = prompts_of_passes(found, model, fingerprint) if found.kind == PASSES else (None, 0)
    header = TraceHeader(fingerprint=fingerprint, dataset_hash=f"imported:{file.name}", settings={"from": found.kind})
    tokens = 0
    with atomic_directory(out, private=True) as staged:
        with TraceWriter(staged, header, private=True) as writer:
            for request in requests if requests is not None else requests_of_answers(file, model, fingerprint):
                writer.append(**vars(request))
                tokens += len(request.token_ids)
        if not tokens:
            raise ValueError(
                f"{file} has the routing of no whole prompt; with attention-TP and an all-to-all each rank of SGLang "
                "routes a part of the tokens: record with --enable-dp-attention, or by semmoe record"
            )
    return {"requests": writer.num_requests, "tokens": tokens, "left_out_tokens": left_out}


def _tell(result: dict[str, Any]) -> None:
    if "tokens" not in result:
        words = f"a plan for {result['ep_size']} ranks with {result['redundant_experts']} redundant experts"
        console.out.print(f"{result['out']}: {words}, by {result['method']}; it schedules no request and no token")
        return
    console.out.print(f"{result['out']}: {result['requests']:,} requests, {result['tokens']:,} tokens")
    if result["left_out_tokens"]:
        console.out.print(
            f"{result['left_out_tokens']:,} tokens are left out: SGLang's records do not say of which request they are"
        )
