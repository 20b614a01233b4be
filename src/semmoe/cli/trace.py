"""The commands trace info and merge: traces that may be larger than memory."""

from pathlib import Path
from typing import Annotated

import typer

from semmoe import console
from semmoe.cli.app import OFFLINE, app
from semmoe.cli.options import OUTPUT, Json, TraceArgument

trace_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Look into traces and join them: info, merge.",
)
app.add_typer(trace_app, name="trace", rich_help_panel=OFFLINE)
Out = Annotated[Path, typer.Option(help="The trace directory.", rich_help_panel=OUTPUT, show_default=False)]


@trace_app.command()
def info(trace: TraceArgument, as_json: Json = False) -> None:
    """List the contents of a trace.

    Example: `semmoe trace info trace`
    """
    from semmoe.streams import describe

    with console.bars() as bars:
        found = describe(trace, bars.task("reading tokens", _tokens(trace)))
    if as_json:
        console.print_json(found)
        return
    rows = [
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
    console.print_table(str(trace), ["", ""], rows)


@trace_app.command()
def merge(
    traces: Annotated[list[Path], typer.Argument(help="Trace directories.", show_default=False)],
    out: Out,
    as_json: Json = False,
) -> None:
    """Join traces of one model, such as those that the nodes of a server recorded, shard by shard.

    Example: `semmoe trace merge node-0 node-1 --out trace`
    """
    from semmoe.streams import merge as merge_traces

    with console.bars() as bars:
        merged = merge_traces(traces, out, bars.task("joining tokens", sum(map(_tokens, traces))))
    _tell(out, merged.requests, merged.tokens, as_json)


def _tokens(trace: Path) -> int:
    from semmoe.streams import num_tokens

    return num_tokens(trace) if trace.is_dir() else 1


def _tell(out: Path, requests: int, tokens: int, as_json: bool) -> None:
    if as_json:
        console.print_json({"out": str(out), "requests": requests, "tokens": tokens})
    else:
        console.out.print(f"{requests:,} requests, {tokens:,} tokens in {out}", markup=False, highlight=False)
