"""The command apply: write a plan as files that engines read without semmoe."""

import importlib.util
import shlex
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from semmoe.checkpoint.engine_files import WRITTEN
from semmoe.checkpoint.relabel import plan_digest, relabel
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, command
from semmoe.core import Plan
from semmoe.io import console
from semmoe.io.bounds import choice
from semmoe.io.files import check_output

CHECKPOINT = "checkpoint"


@dataclass(frozen=True, kw_only=True)
class Target:
    to: str = choice(
        CHECKPOINT,
        (CHECKPOINT, *WRITTEN),
        panel="Output",
        help=f"checkpoint: experts renumbered, for any engine; or the own file of {', '.join(WRITTEN)}.",
    )


@command(OFFLINE)
def apply(
    *,
    plan: Annotated[Path, options.argument("A plan directory.")],
    model: Annotated[str, options.model("The model that the plan was made for.")],
    out: Annotated[Path, options.output("The new model directory, or a .json file.")],
    target: Target,
    as_json: options.Json = False,
) -> None:
    """Turn a plan into files that an engine reads by itself.

    `checkpoint` renumbers the experts so that an engine's contiguous placement is the plan's, and verifies the copy.
    `sglang` writes where each expert lies and prints the flags that go with it. Without semmoe in the engine
    neither requests nor tokens follow the experts.

    Example: `semmoe apply plan --model model --to checkpoint --out relabelled`
    """
    from semmoe.plan import load_plan

    started = time.perf_counter()
    whole = target.to == CHECKPOINT
    if not whole and out.suffix != ".json":
        raise ValueError(f"{out} must end in .json: an engine recognises the format by it")
    check_output(out, directory=whole, inputs=(model, plan))
    loaded = load_plan(plan)
    _check_fingerprint(loaded, Path(model))
    done = _checkpoint(loaded, plan, Path(model), out) if whole else _engine_file(target.to, loaded, Path(model), out)
    seconds = round(time.perf_counter() - started, 3)
    result = {"plan": str(plan), "to": target.to, "out": str(out), **done, "seconds": seconds}
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
    flags = WRITTEN[name](plan, model, out)
    scheduled = [name for name, one in (("requests", plan.requests), ("tokens", plan.tokens)) if one.by_tables]
    return {"flags": flags, "redundant_experts": plan.placement.redundant_experts, "left_to_the_engine": scheduled}


def _print_checkpoint(result: dict[str, Any]) -> None:
    layers = ", ".join(map(str, result["verification"]["layers"]))
    size = f"{console.megabytes(result['bytes'])} MB in {result['seconds']:.1f} s"
    console.out.print(
        f"{result['out']}: {result['layers']} MoE layers relabelled, {result['tensors_renamed']:,} tensors renamed, "
        f"{result['tensors_permuted']:,} reordered, {size}"
    )
    console.out.print(f"verified: the bytes of every router, and of every expert in layers {layers}")


def _print_flags(result: dict[str, Any]) -> None:
    console.out.print(f"{result['out']}: start the engine with")
    console.say("    " + shlex.join(result["flags"]))
    if result["left_to_the_engine"]:
        what = " and ".join(result["left_to_the_engine"])
        console.out.print(f"The plan's tables for {what} are not in the file: only semmoe in the engine follows them.")
    if result["redundant_experts"]:
        console.out.print("Choose a --moe-a2a-backend too: without one, older releases of SGLang compute copies twice.")
