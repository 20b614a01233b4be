"""The commands record start, stop and status: record the routing of a live server."""

from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.options import OUTPUT, Json
from semmoe.engines.private import check_folder
from semmoe.engines.recorder.control import begin, end, is_gone, name_ranks, statuses
from semmoe.engines.recorder.files import CONTROL, Control, Status, read_control
from semmoe.settings import RecordSettings, StopSettings

FolderArgument = Annotated[
    Path, typer.Argument(help="The control folder, which `semmoe serve` prints.", show_default=False)
]

record_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Record which experts the requests of a running server choose: start, stop, status.",
)
app.add_typer(record_app, name="record", rich_help_panel=SERVING)


@record_app.command()
@takes(settings=RecordSettings)
def start(folder: FolderArgument, settings: Any = None) -> None:
    """Tell a running server to record the routing of its requests.

    Recordings contain users' text and are readable by you only. Ranks start with their next forward pass.

    Example: `semmoe record start FOLDER --sample 0.05`
    """
    control, ranks = begin(folder, settings())
    console.out.print(f"run {control.run} is on for {ranks or 'no'} ranks", highlight=False)
    if ranks == 0:
        console.warn("no server has used this folder yet")


@record_app.command()
@takes(settings=StopSettings)
def stop(
    folder: FolderArgument,
    out: Annotated[
        Path | None, typer.Option(help="The trace directory; FOLDER/RUN/trace if not given.", rich_help_panel=OUTPUT)
    ] = None,
    as_json: Json = False,
    settings: Any = None,
) -> None:
    """End the recording and merge what the ranks wrote into one trace, for `semmoe solve`.

    The trace contains only requests that have ended; unfinished requests are left out.

    Example: `semmoe record stop FOLDER --out trace` and then `semmoe solve trace --ep-size 8 --out plan`
    """
    ended = end(folder, out, settings().timeout)
    if ended.gone:
        console.warn(f"{name_ranks(ended.gone)} recorded and no longer responds: what was not on disk is lost")
    merged = ended.merged
    if as_json:
        written = {"out": str(merged.out), "requests": merged.requests, "tokens": merged.tokens}
        console.print_json({**written, "unfinished": ended.unfinished, "run": ended.run})
        return
    text = f"{merged.requests:,} requests, {merged.tokens:,} tokens in {merged.out}"
    left_out = f"; {ended.unfinished:,} unfinished requests are left out" if ended.unfinished else ""
    console.out.print(text + left_out, markup=False, highlight=False)


@record_app.command()
def status(folder: FolderArgument, as_json: Json = False) -> None:
    """Show what each rank of a server records, what it could not record, and the cost.

    Example: `semmoe record status FOLDER`
    """
    check_folder(folder)
    control = read_control(folder) if (folder / CONTROL).exists() else None
    found = statuses(folder)
    if as_json:
        ranks = [status.model_dump() for status in found]
        console.print_json({"control": control.model_dump() if control else None, "ranks": ranks})
        return
    console.out.print(_headline(control), highlight=False)
    if not found:
        console.out.print("no server has used this folder yet")
        return
    console.print_table(f"{len(found)} ranks", *_table(found))
    for status in found:
        if status.reason:
            console.out.print(f"rank {status.rank}: {console.plain(status.reason)}", highlight=False)


def _headline(control: Control | None) -> str:
    if control is None:
        return "nothing was ever recorded here"
    limits = f"sample {control.sample:g}, at most {control.max_mb} MB and {control.max_tokens:,} tokens a rank"
    return f"run {control.run} is {'on' if control.recording else 'off'}: {limits}"


def _table(statuses: list[Status]) -> tuple[list[str], list[list[str]]]:
    columns = [
        "rank",
        "state",
        "requests",
        "tokens",
        "under\nway",
        "skipped",
        "dropped",
        "unknown\nids",
        "held\nMB",
        "CPU us\n/token",
    ]
    rows = []
    for s in statuses:
        counts = (s.requests, s.tokens, s.unfinished, s.skipped, s.dropped, s.unknown)
        size, cost = console.megabytes(s.bytes_held), console.figure(s.cpu_us_per_token, 2)
        rows.append([str(s.rank), _state(s), *(f"{n:,}" for n in counts), size, cost])
    return columns, rows


def _state(status: Status) -> str:
    return "gone" if status.state == "recording" and is_gone(status) else status.state
