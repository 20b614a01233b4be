"""Commands of a checkout: the paper's tables and figures, and what links and experts cost on this machine."""

import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from semmoe.cli import options
from semmoe.cli.app import new_app, refuse_given
from semmoe.cli.form import finite
from semmoe.costs.links import Links
from semmoe.io import console
from semmoe.io.bounds import MOST_RANKS
from semmoe.io.files import check_output, save_json
from semmoe.settings import SEED

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
app = new_app("The paper's tables and figures from what this machine can run, and the cost of its links.")


@app.command()
def reproduce(
    items: Annotated[list[str] | None, options.argument("Their names, of --list; none: all of them.")] = None,
    out: Annotated[Path, options.output("A folder for data and pictures.")] = Path("reproduced"),
    trace: Annotated[
        list[Path] | None,
        options.inputs("A trace to look at beside the shipped model's routing; may be given again."),
    ] = None,
    dataset: Annotated[
        list[Path] | None, options.inputs("table3: a kind of prompts, in a file; give two or more.")
    ] = None,
    results: Annotated[
        Path | None,
        options.inputs("What benchmarks wrote, for items that need an engine or root; without it, the checkout's."),
    ] = None,
    seed: Annotated[int, options.method("Seed of every random choice.", min=SEED[0], max=SEED[1], callback=finite)] = 0,
    list_items: Annotated[bool, typer.Option("--list", help="Say what there is, what it needs, and end.")] = False,
    as_json: options.Json = False,
) -> None:
    """Make the paper's tables and figures from what this machine can run, each beside what was published.

    Every item leaves NAME.csv, NAME.json and NAME.svg; summary.md has the table that is printed at the end. What the
    paper measured on eight GPUs with models of 16 to 30 billion weights is made here in a smaller form, from the
    shipped model or a trace of yours, and says so. What needs a serving engine or root comes from what the benchmarks
    wrote before.

    Examples: `python -m lab reproduce --list` and `python -m lab reproduce table1 figure5b --out reproduced`
    """
    from lab import run  # with matplotlib, which an error names where it is missing
    from lab.inputs import Inputs

    chosen = run.choose(items or [])
    if list_items:
        _print_items(chosen, as_json)
        return
    for path in [*(trace or []), *(dataset or []), *([results] if results else [])]:
        if not path.exists():
            raise ValueError(f"{path}: there is no such file")
    check_output(out, directory=True, force=True)  # items add to a folder
    with console.bars() as bars:
        inputs = Inputs(
            seed=seed, traces=trace or [], datasets=dataset or [], task=bars.task, results=results or RESULTS
        )
        made: list[dict[str, Any]] = []
        for item in chosen:
            advance = bars.task(item.name, 1)
            made.append(run.make(item, inputs, out))
            advance(1)
    summary = run.write_summary(made, out)
    if as_json:
        console.print_json(made)
        return
    _print_compared(run.compared(made))
    console.out.print(f"data and pictures: {out}; this table: {summary}", markup=False)


@app.command()
def calibrate(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    out: Annotated[Path, options.output("The links file, JSON, for `semmoe solve --links`.")],
    force: options.Force = False,
    name: Annotated[str, options.output("The links' name.")] = "this machine",
    as_json: options.Json = False,
    ep_size: Annotated[
        int, options.option(options.TOPOLOGY, "Expert-parallel ranks, each a local process.", min=2, max=MOST_RANKS)
    ] = options.PROCESSES,
) -> None:
    """Measure what links and experts cost, with real all-to-alls and the model's own experts.

    Run it on an idle machine.

    Examples: `python -m lab calibrate MODEL --ep-size 4 --out links.json` measures local processes, and on every node
    `torchrun --nnodes 2 --nproc-per-node 8 ... -m lab calibrate MODEL --out links.json` also measures links between
    nodes; rank 0 writes the file
    """
    from lab import calibrate as measuring
    from semmoe.engines.transformers.config import fingerprint_of

    fingerprint_of(model)  # refuses a model before ranks start
    launched = "TORCHELASTIC_RUN_ID" in os.environ  # by torchrun
    if launched:
        refuse_given(ctx, ["ep_size"], "torchrun decides the ranks")
    if not launched or os.environ["RANK"] == "0":
        check_output(out, force=force, inputs=(model,))
    links = measuring.calibrate_launched(model, name) if launched else measuring.calibrate(model, ep_size, name)
    if links is None:  # another rank of torchrun's has the result
        return
    save_json(out, links)
    title = f"{out}: {links.name}"
    result = {"out": str(out), "links": links.model_dump()}
    console.tell(as_json, result, lambda: console.print_table(title, ["", "latency", "speed"], _speeds(links)))


def _speeds(links: Links) -> list[list[str]]:
    """Rows of a part of the machine, its latency and its speed."""
    rows = []
    for where, tier in (("inside nodes", links.inside_node), ("between nodes", links.between_nodes)):
        if tier is not None:
            speed = f"{tier.gigabytes_per_second:.3g} GB/s"
            rows.append([f"all-to-all {where}", f"{tier.dispatch_latency_us:,.0f} us", speed])
    return [*rows, ["experts of a rank", "", f"{links.experts.teraflops:.3g} Tflop/s"]]


def _print_items(chosen: list[Any], as_json: bool) -> None:
    if as_json:
        console.print_json([{"item": i.name, "title": i.title, "needs": i.needs, "seconds": i.seconds} for i in chosen])
        return
    rows = [[item.name, item.title, item.needs, f"{item.seconds:.0f}"] for item in chosen]
    console.print_table("Items, on two cores and from the shipped model", ["name", "what", "needs", "seconds"], rows)


def _print_compared(rows: list[list[str]]) -> None:
    """Text in every column, so that lines break inside cells."""
    from lab.run import COLUMNS

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_lines=True)
    for column, share in zip(COLUMNS, (2, 5, 5, 5, 6), strict=True):
        table.add_column(column, ratio=share, overflow="fold")
    for row in rows:
        table.add_row(*(console.plain(cell) for cell in row))
    wide = console.out if console.out.is_terminal else console.Console(highlight=False, width=160)
    wide.print(table)


if __name__ == "__main__":
    app(prog_name="python -m lab")
