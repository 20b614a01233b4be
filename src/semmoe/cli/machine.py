"""The commands calibrate and doctor: the costs of links and experts on this machine, and its engines."""

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from semmoe.cli import options
from semmoe.cli.app import TOOLS, command, refuse_given
from semmoe.costs.links import Links
from semmoe.engines.doctor import ENGINES, EngineState, examine, supported, versions
from semmoe.io import console
from semmoe.io.bounds import choice
from semmoe.io.files import check_output, save_json
from semmoe.settings import CalibrateSettings


@command(TOOLS)
def calibrate(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    out: Annotated[Path, options.output("The links file, JSON, for `semmoe solve --links`.")],
    force: options.Force = False,
    name: Annotated[str, options.output("What to call these links.")] = "this machine",
    as_json: options.Json = False,
    settings: CalibrateSettings,
) -> None:
    """Measure what links and experts cost, with real all-to-alls and the model's own experts.

    Run it on an idle machine.

    Examples: `semmoe calibrate MODEL --ep-size 4 --out links.json` measures local processes, and on every node
    `torchrun --nnodes 2 --nproc-per-node 8 ... --no-python semmoe calibrate MODEL --out links.json` also measures links
    between nodes; rank 0 writes the file
    """
    from semmoe.engines.transformers import calibrate as measuring
    from semmoe.engines.transformers.config import fingerprint_of

    fingerprint_of(model)  # refuses a model before ranks start
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    if launched:
        refuse_given(ctx, ["ep_size"], "torchrun decides the ranks")
    if not launched or os.environ["RANK"] == "0":
        check_output(out, force=force, inputs=(model,))
    ranks = settings.ep_size
    links = measuring.calibrate_launched(model, name) if launched else measuring.calibrate(model, ranks, name)
    if links is None:  # another rank of torchrun's has the result
        return
    save_json(out, links)
    title = f"{out}: {links.name}"
    result = {"out": str(out), "links": links.model_dump()}
    console.tell(as_json, result, lambda: console.print_table(title, ["", "latency", "speed"], _speeds(links)))


def _speeds(links: Links) -> list[list[str]]:
    """Rows of what, latency and speed."""
    rows = []
    for where, tier in (("inside nodes", links.inside_node), ("between nodes", links.between_nodes)):
        if tier is not None:
            speed = f"{tier.gigabytes_per_second:.3g} GB/s"
            rows.append([f"all-to-all {where}", f"{tier.dispatch_latency_us:,.0f} us", speed])
    return [*rows, ["experts of a rank", "", f"{links.experts.teraflops:.3g} Tflop/s"]]


@dataclass(frozen=True, kw_only=True)
class Engine:
    engine: str | None = choice(None, ENGINES, panel="Input", help="Check only this engine, which must be installed.")


@command(TOOLS)
def doctor(
    *,
    given: Engine,
    model: Annotated[str | None, options.model("List the plans that engines serve for this model.")] = None,
    as_json: options.Json = False,
) -> None:
    """List installed versions, whether semmoe's hooks fit them, and the plans that engines serve for a model.

    Engines are imported, never started. The exit code is 1 if a hook does not resolve. Whether a plan fits a model and
    an engine's options, `semmoe serve --dry-run` says.

    Examples: `semmoe doctor` and `semmoe doctor --engine sglang --model MODEL`
    """
    found = versions()
    chosen = ENGINES if given.engine is None else (given.engine,)
    uses = supported(Path(model), chosen) if model else []
    engines = [examine(name, found[name], needed=given.engine is not None) for name in chosen]
    problems = [text for state in engines for text in state.problems]
    if as_json:
        states = {"engines": list(map(asdict, engines)), "supported": uses}
        console.print_json({"versions": found, **states, "problems": problems})
    else:
        console.print_table("Installed", ["package", "version"], [[k, v or "not installed"] for k, v in found.items()])
        for state in engines:
            _print_engine(state)
        if uses:
            _say(f"{model}, by its configuration:")
            for use in uses:
                _say(f"    {use['engine']}, {use['use']}: {use['state']}; {use['note']}")
        _say(f"problems: {len(problems)}" if problems else "no problem found")
    if problems:
        raise typer.Exit(1)


def _print_engine(state: EngineState) -> None:
    if state.version is None and not state.problems:
        return
    good = sum(hook.problem is None for hook in state.hooks)
    name = f"{state.engine} {state.version}" if state.version else state.engine
    _say(f"{name}: {state.note or f'{good} of {len(state.hooks)} hooks resolve'}")
    if state.tried:
        _say(f"    tried on {state.tried}, this is another version: compare its outputs with vanilla's first")
    for hook in state.hooks:
        _say(f"    FAIL  {hook.problem}" if hook.problem else f"    ok    {hook.target}: {hook.purpose}")


def _say(text: str) -> None:
    """Print plain text, since names in plans and messages of engines may contain markup."""
    console.out.print(console.plain(text))
