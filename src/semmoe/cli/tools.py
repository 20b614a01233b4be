"""The commands doctor and report: what this machine has, and a page on a plan."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from semmoe.cli import options
from semmoe.cli.app import TOOLS, command
from semmoe.engines.doctor import ENGINES, EngineState, examine, supported, versions
from semmoe.io import console
from semmoe.io.files import check_output


@command(TOOLS)
def doctor(
    *,
    engine: Annotated[
        Literal["sglang", "vllm", "deepspeed", "transformers"] | None,
        options.inputs("Check only this engine, which must be installed."),
    ] = None,
    model: Annotated[str | None, options.model("List the plans that engines serve for this model.")] = None,
    as_json: options.Json = False,
) -> None:
    """List installed versions, whether semmoe's hooks fit them, and the plans that engines serve for a model.

    Engines are imported, never started. The exit code is 1 if a hook does not resolve. Whether a plan fits a model and
    an engine's options, `semmoe serve --dry-run` says.

    Examples: `semmoe doctor` and `semmoe doctor --engine sglang --model MODEL`
    """
    found = versions()
    chosen = ENGINES if engine is None else (engine,)
    uses = supported(Path(model), chosen) if model else []
    engines = [examine(name, found[name], needed=engine is not None) for name in chosen]
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


@command(TOOLS)
def report(
    directory: Annotated[
        Path,
        options.argument(
            "A plan, or a directory of plans and of what `demo`, `generate` and `replay` wrote.", metavar="DIR"
        ),
    ],
    out: Annotated[
        Path | None,
        options.output("The page; by default DIR/report.html, beside DIR if it is itself a plan: DIR-report.html."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Write one HTML page on a plan and its measurements: the verdict, the reasons, and the sources.

    The page needs no network and no other file. A plan alone is enough; in place of missing parts the page names the
    command that makes them. Files that it cannot use are listed at its end.

    Example: `semmoe report out` after `semmoe demo --out out`
    """
    from semmoe.report.gather import is_plan
    from semmoe.report.page import write

    beside = directory.resolve().with_name(f"{directory.resolve().name}-report.html")
    page = out or (beside if is_plan(directory) else directory / "report.html")
    if not directory.is_dir():
        raise ValueError(f"{directory} is not a directory")
    read = [directory] if is_plan(directory) else [one for one in directory.iterdir() if one.suffix != ".html"]
    check_output(page, force=True, inputs=read)  # a report is made again from the same directory
    written = write(directory, page, f"semmoe report {directory}" + (f" --out {out}" if out else ""))
    console.tell(as_json, _described(written), lambda: _print_report(written))


def _print_report(written: Any) -> None:
    for plan, card in zip(written.inputs.plans, written.cards, strict=True):
        console.out.print(f"{console.plain(plan.path)}: [bold]{card.badge.lower()}[/]")
    for entry in written.inputs.left_out:
        console.warn(f"{entry.path}: {entry.why}", "not used")
    console.say(f"report: {written.path}")


def _described(written: Any) -> dict[str, Any]:
    inputs = written.inputs
    verdicts = [
        {"plan": plan.path, "verdict": card.state, "sentences": card.sentences}
        for plan, card in zip(inputs.plans, written.cards, strict=True)
    ]
    return {
        "page": str(written.path),
        "bytes": written.size,
        "verdicts": verdicts,
        "sources": [{"file": source.path, "what": source.what} for source in inputs.sources],
        "left_out": [{"file": entry.path, "why": entry.why} for entry in inputs.left_out],
    }
