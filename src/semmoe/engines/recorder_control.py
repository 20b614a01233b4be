"""Begin and end the recording of a running server's routing, through its control folder."""

import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

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
from semmoe.settings import RecordSettings

GONE_SECONDS = 10.0  # a rank that records writes its status every second
SETTLE_SECONDS = 0.5  # a rank that has just started reports its status within this time


@dataclass(frozen=True)
class Ended:
    """What a recording left."""

    control: Control
    target: Path  # a trace, or counts
    merged: Any  # `recorder_merge.Merged`
    unfinished: int  # requests that are left out since they had not ended
    gone: list[Status]  # ranks that no longer respond: what was not on disk is lost


def begin(folder: Path, settings: RecordSettings, counts_only: bool = False) -> tuple[Control, int]:
    """Tell the ranks to record, with their next forward pass; returns the control and how many ranks there are.

    Raises ValueError if they cannot, or record already.
    """
    check_folder(folder)
    refused = [status.reason for status in statuses(folder) if status.state == "refused"]
    if refused:
        raise ValueError(f"this server cannot record: {refused[0]}")
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    control = Control(run=run, recording=True, **asdict(settings), counts_only=counts_only)
    before = _readable_control(folder) if (folder / CONTROL).exists() else None
    if before is not None and before.recording:
        raise ValueError(f"run {before.run} is on: stop it first with semmoe record stop {folder}")
    write_control(folder, control)
    return control, len(status_paths(folder))


def end(folder: Path, out: Path | None, timeout: float) -> Ended:
    """End the recording and merge what the ranks wrote; out: by default in the run's folder."""
    from semmoe.engines.recorder_merge import merge_counts, merge_traces, remove_parts
    from semmoe.files import check_output

    check_folder(folder)
    control = read_control(folder)
    target = out or folder / control.run / ("counts" if control.counts_only else "trace")
    check_output(target, directory=True)
    write_control(folder, control.model_copy(update={"recording": False}))
    gone = _wait(folder, control.run, timeout)
    merged = (merge_counts if control.counts_only else merge_traces)(folder / control.run, target)
    remove_parts(folder / control.run)
    unfinished = sum(status.unfinished for status in of_run(folder, control.run)) * (not control.counts_only)
    return Ended(control, target, merged, unfinished, gone)


def _readable_control(folder: Path) -> Control | None:
    """The control file; None if it is damaged, in which case it is replaced."""
    try:
        return read_control(folder)
    except ValueError:
        return None


def _wait(folder: Path, run: str, timeout: float) -> list[Status]:
    """Wait until no rank records `run`. Returns ranks that are gone; raises RuntimeError if a live one continues."""
    deadline = time.monotonic() + timeout
    time.sleep(SETTLE_SECONDS)
    busy = _busy(folder, run)
    while busy and time.monotonic() < deadline and not all(map(is_gone, busy)):
        time.sleep(0.1)
        busy = _busy(folder, run)
    late = [status for status in busy if not is_gone(status)]
    if late:
        raise RuntimeError(f"{name_ranks(late)} still records after {timeout:g} s: run the same command again")
    return busy


def name_ranks(statuses: list[Status]) -> str:
    return f"rank {', '.join(str(status.rank) for status in statuses)}"


def is_gone(status: Status) -> bool:
    return time.time() - status.updated > GONE_SECONDS


def _busy(folder: Path, run: str) -> list[Status]:
    return [status for status in of_run(folder, run) if status.state == "recording"]


def of_run(folder: Path, run: str) -> list[Status]:
    return [status for status in statuses(folder) if status.run == run]


def statuses(folder: Path) -> list[Status]:
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
