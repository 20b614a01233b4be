"""Begin and end the recording of a running server's routing, through its control folder."""

import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from semmoe.engines.private import check_folder
from semmoe.io.files import check_output
from semmoe.live.recorder.files import Control, Status, read_control, read_statuses, write_control
from semmoe.settings import RecordSettings

GONE_SECONDS = 10.0  # a rank that records writes its status every second
SETTLE_SECONDS = 0.5  # a rank that has just started reports its status within this time


@dataclass(frozen=True)
class Ended:
    """The result of a recording."""

    run: str
    merged: Any  # `streams.Merged`: the trace
    unfinished: int  # requests that are left out since they had not ended
    gone: list[Status]  # ranks that no longer respond: their rows not yet on disk are lost


def begin(folder: Path, settings: RecordSettings) -> tuple[Control, int]:
    """Tell the ranks to record, with their next forward pass; returns the control and how many ranks there are.

    Raises ValueError if they cannot, or record already.
    """
    check_folder(folder)
    ranks = read_statuses(folder)
    refused = [status.reason for status in ranks if status.state == "refused"]
    if refused:
        raise ValueError(f"this server cannot record: {refused[0]}")
    before = _readable_control(folder)
    if before is not None and before.recording:
        raise ValueError(f"run {before.run} is on: stop it first with semmoe record stop {folder}")
    run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    control = Control(run=run, recording=True, **asdict(settings))
    write_control(folder, control)
    return control, len(ranks)


def end(folder: Path, out: Path | None, timeout: float) -> Ended:
    """End the recording and merge what the ranks wrote into a trace; out: by default in the run's folder."""
    check_folder(folder)
    control = read_control(folder)
    run = folder / control.run
    target = out or run / "trace"
    check_output(target, directory=True)
    write_control(folder, control.model_copy(update={"recording": False}))
    gone = _wait(folder, control.run, timeout)
    merged = _merge(run, target)
    unfinished = sum(status.unfinished for status in of_run(folder, control.run))
    return Ended(control.run, merged, unfinished, gone)


def _merge(run: Path, target: Path) -> Any:
    """Move the requests of every rank to one trace, so that users' text is not stored twice."""
    from semmoe.traces.streams import merge
    from semmoe.traces.trace import shard_paths

    ranks = sorted(run.glob("rank-*"))
    recorded = [path for path in ranks if shard_paths(path)]
    if not recorded:
        raise ValueError(f"{run} holds no request that has ended")
    merged = merge(recorded, target)
    for path in ranks:
        shutil.rmtree(path)
    return merged


def _readable_control(folder: Path) -> Control | None:
    """The control file; None if there is none, or a damaged one, which is replaced."""
    try:
        return read_control(folder)
    except ValueError:
        return None


def _wait(folder: Path, run: str, timeout: float) -> list[Status]:
    """Wait until no rank records `run`. Returns ranks that are gone; raises RuntimeError if a live one continues."""
    deadline = time.monotonic() + timeout
    time.sleep(SETTLE_SECONDS)
    while True:
        busy = [status for status in of_run(folder, run) if status.state == "recording"]
        late = [status for status in busy if not is_gone(status)]
        if not late:
            return busy
        if time.monotonic() >= deadline:
            raise RuntimeError(f"{name_ranks(late)} still records after {timeout:g} s: run the same command again")
        time.sleep(0.1)


def name_ranks(statuses: list[Status]) -> str:
    return f"rank {', '.join(str(status.rank) for status in statuses)}"


def is_gone(status: Status) -> bool:
    return time.time() - status.updated > GONE_SECONDS


def of_run(folder: Path, run: str) -> list[Status]:
    return [status for status in read_statuses(folder) if status.run == run]
