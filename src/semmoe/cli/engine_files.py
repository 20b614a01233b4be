"""The commands apply and import: write a plan as files of engines, and read plans and traces from them."""

import importlib.util
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from semmoe.checkpoint.engine_files import FORMATS, NO_FILE, WRITTEN, Format, load
from semmoe.checkpoint.engine_maps import Model, plan_of
from semmoe.checkpoint.engine_routes import Source, write_requests
from semmoe.checkpoint.relabel import plan_digest, relabel
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, command, refuse_given
from semmoe.core import Plan
from semmoe.io import console
from semmoe.io.files import atomic_directory, check_output
from semmoe.topology import Topology
from semmoe.traces.dataset import LeftOut
from semmoe.traces.trace import TraceHeader, TraceWriter

PLANNED = ["ep_size", "attention", "dp_size", "num_nodes", "redundant_experts"]


@command(OFFLINE)
def apply(
    *,
    plan: Annotated[Path, options.argument("A plan directory.")],
    model: Annotated[str, options.model("The model that the plan was made for.")],
    out: Annotated[Path, options.output("The new model directory, or the map's file.")],
    to: Annotated[
        Literal["checkpoint", "sglang", "ascend", "trtllm", "eplb", "vllm"],
        options.output("checkpoint: experts renumbered, for any engine; or the map that this engine reads."),
    ] = "checkpoint",
    as_json: options.Json = False,
) -> None:
    """Turn a plan into files that an engine reads by itself.

    `checkpoint` renumbers the experts so that an engine's contiguous placement is the plan's, and verifies the copy.
    The others write where each expert lies, and print the options that go with it. Without semmoe in the engine neither
    requests nor tokens follow the experts.

    Example: `semmoe apply plan --model model --to checkpoint --out relabelled`
    """
    from semmoe.plan import load_plan

    started = time.perf_counter()
    if to in NO_FILE:
        raise ValueError(NO_FILE[to])
    whole = to == "checkpoint"
    if not whole and out.suffix != WRITTEN[to].suffixes[0]:
        raise ValueError(f"{out} must end in {WRITTEN[to].suffixes[0]}: the format is recognized by it")
    check_output(out, directory=whole, inputs=(model, plan))
    loaded = load_plan(plan)
    _check_fingerprint(loaded, Path(model))
    done = _checkpoint(loaded, plan, Path(model), out) if whole else _engine_file(to, loaded, Path(model), out)
    seconds = round(time.perf_counter() - started, 3)
    result = {"plan": str(plan), "to": to, "out": str(out), **done, "seconds": seconds}
    console.tell(as_json, result, partial(_print_checkpoint if whole else _print_flags, result))


def _check_fingerprint(plan: Plan, model: Path) -> None:
    """Check that the plan is for this model. Without transformers only the sizes in config.json are compared."""
    if importlib.util.find_spec("transformers") is None:
        text = "transformers is not installed: the plan is checked against sizes in config.json, not by its hashes"
        console.warn(text)
        return
    from semmoe.engines.transformers.config import fingerprint_of

    plan.check(fingerprint_of(str(model)))


def _checkpoint(plan: Plan, plan_path: Path, model: Path, out: Path) -> dict[str, Any]:
    with console.bars() as bars:
        done = relabel(plan, model, out, plan_hash=plan_digest(plan_path), stage=partial(_stage, bars))
    if done.left_out:
        console.warn(f"not copied, since they number experts the old way: {', '.join(done.left_out)}")
    return asdict(done)


def _stage(bars: console.Bars, what: str, total: int) -> Callable[[int], None]:
    """A progress bar in megabytes; the returned function advances it by bytes."""
    advance = bars.task(f"{what}, MB", max(1, total // 10**6))
    return lambda count: advance(count / 1e6)


def _engine_file(name: str, plan: Plan, model: Path, out: Path) -> dict[str, Any]:
    write = WRITTEN[name].write
    assert write is not None
    flags = write(plan, model, out)
    copies = plan.placement.redundant_experts
    nodes, attention = plan.topology.num_nodes, plan.topology.attention
    lost = {
        "which rank serves a request": plan.requests.by_tables,
        "which rank computes a token": plan.tokens.by_tables,
        "which copy of an expert a rank uses": copies > 0,
        f"which ranks share one of {nodes} nodes": nodes > 1,
        f"attention {attention} (TensorRT-LLM heeds a map in attention-DP only)": name == "trtllm"
        and attention != "dp",
    }
    lost_names = [what for what, is_lost in lost.items() if is_lost]
    return {"flags": flags, "redundant_experts": copies, "left_to_the_engine": lost_names}


def _print_checkpoint(result: dict[str, Any]) -> None:
    layers = ", ".join(map(str, result["verification"]["layers"]))
    size = f"{console.megabytes(result['bytes'])} MB in {result['seconds']:.1f} s"
    console.out.print(
        f"{result['out']}: {result['layers']} MoE layers relabelled, {result['tensors_renamed']:,} tensors renamed, "
        f"{result['tensors_permuted']:,} reordered, {size}"
    )
    console.out.print(f"verified: the bytes of every router, and of every expert in layers {layers}")


def _print_flags(result: dict[str, Any]) -> None:
    flags = result["flags"]
    console.out.print(f"{result['out']}: {WRITTEN[result['to']].start}")
    for line in [shlex.join(flags)] if flags[0].startswith("--") else flags:
        console.say("    " + line)
    if result["left_to_the_engine"]:
        console.out.print(f"Not in the file, so left to the engine: {'; '.join(result['left_to_the_engine'])}.")
    if result["redundant_experts"] and result["to"] == "sglang":
        console.out.print("Choose a --moe-a2a-backend too: without one, older releases of SGLang compute copies twice.")


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
    expert, so the plan balances load and schedules nothing. Answers of vLLM or SGLang with routed experts (.jsonl)
    become a trace for `semmoe solve`.

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
    for words in (result["note"], result.get("left_out_lines")):
        if words:
            console.warn(words)
    if result.get("impossible_tokens"):
        words = "tokens are left out: they name an expert twice in a layer, which no router does"
        console.warn(f"{result['impossible_tokens']:,} {words}")
    if "tokens" in result:
        console.out.print(f"{result['out']}: {result['requests']:,} requests, {result['tokens']:,} tokens")
        return
    words = f"a plan for {result['ep_size']} ranks with {result['redundant_experts']} redundant experts"
    console.out.print(f"{result['out']}: {words}, by {result['method']}; it schedules no request and no token")
