"""The commands record and trace: record the routing of a live server, look into traces, and join them."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from semmoe.cli import options
from semmoe.cli.app import OFFLINE, SERVING, add_group
from semmoe.cli.form import finite, takes
from semmoe.engines.private import check_folder
from semmoe.io import console
from semmoe.live.recorder import files
from semmoe.live.recorder.files import CONTROL, Status
from semmoe.settings import RecordSettings

FolderArgument = Annotated[Path, options.argument("The control folder, which `semmoe serve` prints.")]
trace_app = add_group("trace", OFFLINE, "Look into traces and join them: info, merge.")
record_app = add_group(
    "record", SERVING, "Record which experts the requests of a running server choose: start, stop, status."
)


@record_app.command()
@takes
def start(*, folder: FolderArgument, settings: RecordSettings) -> None:
    """Tell a running server to record the routing of its requests.

    Recordings contain users' text and are readable by you only. Ranks start with their next forward pass.

    Example: `semmoe record start FOLDER --sample 0.05`
    """
    control, ranks = files.begin(folder, settings)
    console.out.print(f"run {control.run} is on for {ranks or 'no'} ranks")
    if ranks == 0:
        console.warn("no server has used this folder yet")


@record_app.command()
def stop(
    folder: FolderArgument,
    out: Annotated[Path | None, options.output("The trace directory; FOLDER/RUN/trace if not given.")] = None,
    as_json: options.Json = False,
    timeout: Annotated[
        float, options.option("Limits", "Seconds to wait for the ranks to stop.", min=0, max=86_400, callback=finite)
    ] = 60.0,
) -> None:
    """End the recording and merge what the ranks wrote into one trace, for `semmoe solve`.

    The trace contains only requests that have ended; unfinished requests are left out.

    Example: `semmoe record stop FOLDER --out trace` and then `semmoe solve trace --ep-size 8 --out plan`
    """
    ended = files.end(folder, out, timeout)
    if ended.gone:
        console.warn(f"{files.name_ranks(ended.gone)} recorded and no longer responds: rows not on disk are lost")
    left_out = f"; {ended.unfinished:,} unfinished requests are left out" if ended.unfinished else ""
    row = {**asdict(ended.merged), "unfinished": ended.unfinished, "run": ended.run}
    console.tell(as_json, row, str(ended.merged) + left_out)


@record_app.command()
def status(folder: FolderArgument, as_json: options.Json = False) -> None:
    """Show each rank's recording: its state, the requests recorded and left out, and the cost.

    Example: `semmoe record status FOLDER`
    """
    check_folder(folder)
    control = files.read_control(folder) if (folder / CONTROL).exists() else None
    found = files.read_statuses(folder)
    if as_json:
        ranks = [status.model_dump() for status in found]
        console.print_json({"control": control.model_dump() if control else None, "ranks": ranks})
        return
    if control is None:
        console.out.print("nothing was ever recorded here")
    else:
        limits = f"sample {control.sample:g}, at most {control.max_mb} MB and {control.max_tokens:,} tokens a rank"
        console.out.print(f"run {control.run} is {'on' if control.recording else 'off'}: {limits}")
    if not found:
        console.out.print("no server has used this folder yet")
        return
    columns = ["rank", "state", "requests", "tokens", "under\nway", "skipped", "dropped", "unknown\nids"]
    columns += ["held\nMB", "CPU us\n/token"]
    console.print_table(f"{len(found)} ranks", columns, list(map(_row, found)))
    for status in found:
        if status.reason:
            console.out.print(f"rank {status.rank}: {console.plain(status.reason)}")


def _row(s: Status) -> list[str]:
    state = "gone" if s.state == "recording" and files.is_gone(s) else s.state
    counts = (s.requests, s.tokens, s.unfinished, s.skipped, s.dropped, s.unknown)
    size, cost = console.megabytes(s.bytes_held), console.figure(s.cpu_us_per_token, 2)
    return [str(s.rank), state, *(f"{n:,}" for n in counts), size, cost]


@trace_app.command()
def info(trace: options.TraceArgument, as_json: options.Json = False) -> None:
    """List the contents of a trace.

    Example: `semmoe trace info trace`
    """
    from semmoe.traces.streams import describe

    with console.bars() as bars:
        found = describe(trace, bars.task("reading tokens", _tokens(trace) or None))
    rows = [
        ["model", console.plain(found["model"])],
        ["layers x experts, experts of a token", f"{found['num_layers']} x {found['num_experts']}, {found['top_k']}"],
        ["requests", f"{found['requests']:,}"],
        ["routed tokens", f"{found['tokens']:,}"],
        ["decoded tokens", f"{found['decode_tokens']:,}"],
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
    """Join traces of the same model, such as the recordings of a server's nodes, shard by shard.

    Example: `semmoe trace merge node-0 node-1 --out trace`
    """
    from semmoe.traces.streams import merge as merge_traces

    with console.bars() as bars:
        merged = merge_traces(traces, out, bars.task("joining tokens", sum(map(_tokens, traces))))
    console.tell(as_json, asdict(merged), str(merged))


def _tokens(trace: Path) -> int:
    from semmoe.traces.trace import num_tokens

    return num_tokens(trace) if trace.is_dir() else 0
