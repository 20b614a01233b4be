"""The commands record start, stop and status: record the routing of a live server."""

import secrets
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.options import METHOD, OUTPUT, Json
from semmoe.engines.recorder_files import (
    CONTROL,
    Control,
    Status,
    check_folder,
    read_control,
    read_status,
    status_paths,
    write_control,
)
from semmoe.settings import RecordSettings, StopSettings

GONE_SECONDS = 10.0  # a rank that records writes its status every second
SETTLE_SECONDS = 0.5  # a rank that has just started reports its status within this time
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
def start(
    folder: FolderArgument,
    counts_only: Annotated[
        bool, typer.Option("--counts-only", help="Count experts; keep no token and no text.", rich_help_panel=METHOD)
    ] = False,
    settings: Any = None,
) -> None:
    """Tell a running server to record the routing of its requests.

    Recordings contain users' text and are readable by you only. Ranks start with their next forward pass.

    Examples: `semmoe record start FOLDER --sample 0.05` and `semmoe record start FOLDER --counts-only`
    """
    check_folder(folder)
    refused = [status.reason for status in _statuses(folder) if status.state == "refused"]
    if refused:
        raise ValueError(f"this server cannot record: {(refused or [''])[0]}")
    control = Control(
        run=f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}",
        recording=True,
        **asdict(settings()),
        counts_only=counts_only,
    )
    if (folder / CONTROL).exists():
        before = _readable_control(folder)
        busy = before is not None and before.recording
        if busy:
            raise ValueError(
                f"run {before.run if before else ''} is on: stop it first with semmoe record stop {folder}"
            )
    write_control(folder, control)
    ranks = len(status_paths(folder))
    console.out.print(f"run {control.run} is on for {ranks or 'no'} ranks", highlight=False)
    if ranks == 0:
        console.err.print("[yellow]warning:[/] no server has used this folder yet")


def _readable_control(folder: Path) -> Control | None:
    """The control file; None if it is damaged, in which case it is replaced."""
    try:
        return read_control(folder)
    except ValueError:
        return None


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

    The trace contains only requests that have ended; unfinished requests are left out. With --counts-only the result is
    a directory of counts.

    Example: `semmoe record stop FOLDER --out trace` and then `semmoe solve trace --ep-size 8 --out plan`
    """
    from semmoe.engines.recorder_merge import merge_counts, merge_traces, remove_parts
    from semmoe.files import check_output

    check_folder(folder)
    control = read_control(folder)
    target = out or folder / control.run / ("counts" if control.counts_only else "trace")
    check_output(target, directory=True)
    write_control(folder, control.model_copy(update={"recording": False}))
    gone = _wait(folder, control.run, settings().timeout)
    merged = (merge_counts if control.counts_only else merge_traces)(folder / control.run, target)
    if gone:
        text = f"{_ranks(gone)} recorded and no longer responds: what was not on disk is lost"
        console.err.print(f"[yellow]warning:[/] {text}")
    remove_parts(folder / control.run)
    unfinished = sum(status.unfinished for status in _of_run(folder, control.run)) * (not control.counts_only)
    row = {"out": str(target), "requests": merged.requests, "tokens": merged.tokens, "unfinished": unfinished}
    if as_json:
        console.print_json({**row, "run": control.run, "counts_only": control.counts_only})
    else:
        _print_merged(row, control)


def _print_merged(row: dict[str, Any], control: Control) -> None:
    if control.counts_only:
        text = f"counts of {row['tokens']:,} tokens in {row['out']}"
    else:
        text = f"{row['requests']:,} requests, {row['tokens']:,} tokens in {row['out']}"
    left_out = f"; {row['unfinished']:,} unfinished requests are left out" if row["unfinished"] else ""
    console.out.print(text + left_out, markup=False, highlight=False)


def _wait(folder: Path, run: str, timeout: float) -> list[Status]:
    """Wait until no rank records `run`. Returns ranks that are gone; raises RuntimeError if a live one continues."""
    deadline = time.monotonic() + timeout
    time.sleep(SETTLE_SECONDS)
    busy = _busy(folder, run)
    while busy and time.monotonic() < deadline and not all(map(_is_gone, busy)):
        time.sleep(0.1)
        busy = _busy(folder, run)
    late = [status for status in busy if not _is_gone(status)]
    if late:
        raise RuntimeError(f"{_ranks(late)} still records after {timeout:g} s: run the same command again")
    return busy


def _ranks(statuses: list[Status]) -> str:
    return f"rank {', '.join(str(status.rank) for status in statuses)}"


def _is_gone(status: Status) -> bool:
    return time.time() - status.updated > GONE_SECONDS


def _busy(folder: Path, run: str) -> list[Status]:
    return [status for status in _of_run(folder, run) if status.state == "recording"]


def _of_run(folder: Path, run: str) -> list[Status]:
    return [status for status in _statuses(folder) if status.run == run]


def _statuses(folder: Path) -> list[Status]:
    """The statuses of all ranks; an unreadable one counts as failed, with the reason."""
    return [_status(path) for path in status_paths(folder)]


def _status(path: Path) -> Status:
    rank = int(path.stem.removeprefix("status-"))
    try:
        status = read_status(path)
        if status.rank != rank:
            raise ValueError(f"{path} is of rank {status.rank}")
    except (ValueError, OSError) as error:
        return Status(rank=rank, state="failed", reason=str(error)[:2000])
    return status


@record_app.command()
def status(folder: FolderArgument, as_json: Json = False) -> None:
    """Show what each rank of a server records, what it could not record, and the cost.

    Example: `semmoe record status FOLDER`
    """
    check_folder(folder)
    control = read_control(folder) if (folder / CONTROL).exists() else None
    statuses = _statuses(folder)
    if as_json:
        ranks = [status.model_dump() for status in statuses]
        console.print_json({"control": control.model_dump() if control else None, "ranks": ranks})
        return
    console.out.print(_headline(control), highlight=False)
    if not statuses:
        console.out.print("no server has used this folder yet")
        return
    console.print_table(f"{len(statuses)} ranks", *_table(statuses))
    for status in statuses:
        if status.reason:
            console.out.print(f"rank {status.rank}: {console.plain(status.reason)}", highlight=False)


def _headline(control: Control | None) -> str:
    if control is None:
        return "nothing was ever recorded here"
    kind = "counts only" if control.counts_only else f"sample {control.sample:g}"
    limits = f"at most {control.max_mb} MB and {control.max_tokens:,} tokens a rank"
    return f"run {control.run} is {'on' if control.recording else 'off'}: {kind}, {limits}"


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
    return "gone" if status.state == "recording" and _is_gone(status) else status.state
