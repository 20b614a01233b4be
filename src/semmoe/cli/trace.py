"""The commands trace info and merge, which take traces that are larger than memory."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from semmoe.cli import options
from semmoe.cli.app import OFFLINE, add_group
from semmoe.io import console

trace_app = add_group("trace", OFFLINE, "Look into traces and join them: info, merge.")


@trace_app.command()
def info(trace: options.TraceArgument, as_json: options.Json = False) -> None:
    """List the contents of a trace.

    Example: `semmoe trace info trace`
    """
    from semmoe.traces.streams import describe

    with console.bars() as bars:
        found = describe(trace, bars.task("reading tokens", _tokens(trace)))
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
    console.tell(as_json, found, lambda: console.print_table(str(trace), ["", ""], rows))


@trace_app.command()
def merge(
    traces: Annotated[list[Path], options.argument("Trace directories.")],
    out: options.TraceOut,
    as_json: options.Json = False,
) -> None:
    """Join traces of one model, such as those that the nodes of a server recorded, shard by shard.

    Example: `semmoe trace merge node-0 node-1 --out trace`
    """
    from semmoe.traces.streams import merge as merge_traces

    with console.bars() as bars:
        merged = merge_traces(traces, out, bars.task("joining tokens", sum(map(_tokens, traces))))
    console.tell(as_json, asdict(merged), str(merged))


def _tokens(trace: Path) -> int:
    from semmoe.traces.trace import num_tokens

    return num_tokens(trace) if trace.is_dir() else 1
