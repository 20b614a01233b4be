"""The command report: a plan and its measurements as one page."""

from pathlib import Path
from typing import Annotated, Any

from semmoe.cli import options
from semmoe.cli.app import TOOLS, command
from semmoe.io import console
from semmoe.io.files import check_output


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
    console.tell(as_json, _described(written), lambda: _print(written))


def _print(written: Any) -> None:
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
