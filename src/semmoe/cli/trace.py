"""The commands trace info, affinity and merge; info and merge take traces that are larger than memory."""

from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console, tables
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, app
from semmoe.results import AffinityFile
from semmoe.trace import describe as described

trace_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look into traces and join them: info, affinity, merge.",
)
app.add_typer(trace_app, name="trace", rich_help_panel=OFFLINE)


@trace_app.command()
def info(trace: options.TraceArgument, as_json: options.Json = False) -> None:
    """List the contents of a trace.

    Example: `semmoe trace info trace`
    """
    from semmoe.streams import describe

    with console.bars() as bars:
        found = describe(trace, bars.task("reading tokens", _tokens(trace)))
    console.tell(as_json, found, lambda: console.print_table(str(trace), ["", ""], _contents(found)))


def _contents(found: dict[str, Any]) -> list[list[str]]:
    return [
        ["model", console.plain(found["model"])],
        ["layers x experts, experts of a token", f"{found['num_layers']} x {found['num_experts']}, {found['top_k']}"],
        ["requests", f"{found['requests']:,}"],
        ["routed tokens", f"{found['tokens']:,}"],
        ["of them decoded", f"{found['decode_tokens']:,}"],
        ["left out: an expert twice", f"{found['left_out_tokens']:,}"],
        ["with another token's experts", f"{found['identical_tokens']:,}"],
        ["prompt tokens", f"{found['prompt_tokens']:,}"],
        ["different token ids", f"{found['distinct_tokens']:,} of {found['vocab_size']:,}"],
        ["busiest expert over the mean", f"{found['busiest_expert']:.2f}"],
        ["files", f"{found['files']:,}, {console.megabytes(found['bytes'])} MB"],
    ]


@trace_app.command()
def affinity(
    trace: options.TraceArgument,
    out: options.ResultOut = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Show how concentrated the routing of a trace is: the statistics of the paper's Table 1.

    Example: `semmoe trace affinity trace`
    """
    from semmoe.concentration import concentration

    options.check_result(out, force, (trace,))
    opened = options.read_trace(trace)
    result = {"trace": described(opened), "concentration": concentration(opened)}
    if not options.tell_result(AffinityFile, result, out, as_json):
        tables.print_affinity(result)


@trace_app.command()
def merge(
    traces: Annotated[list[Path], options.argument("Trace directories.")],
    out: options.TraceOut,
    as_json: options.Json = False,
) -> None:
    """Join traces of one model, such as those that the nodes of a server recorded, shard by shard.

    Example: `semmoe trace merge node-0 node-1 --out trace`
    """
    from semmoe.streams import merge as merge_traces

    with console.bars() as bars:
        merged = merge_traces(traces, out, bars.task("joining tokens", sum(map(_tokens, traces))))
    row = {"out": str(out), "requests": merged.requests, "tokens": merged.tokens}
    console.tell(as_json, row, f"{merged.requests:,} requests, {merged.tokens:,} tokens in {out}")


def _tokens(trace: Path) -> int:
    from semmoe.streams import num_tokens

    return num_tokens(trace) if trace.is_dir() else 1
