"""The control folder, through which the command line begins and ends the recording of a server's routing on its ranks.

    FOLDER/control.json            written by `semmoe record`: whether and what to record
    FOLDER/status-00000.json       written by each rank, at most once a second
    FOLDER/RUN/rank-00000/         what that rank recorded: a trace directory

Recordings hold users' text, so folders have mode 0700 and files 0600. Whoever can write the control file can have
all traffic recorded, so a folder or control file that other users can write is refused.
"""

import secrets
import shutil
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from semmoe.engines.private import check_folder, open_folder, read_private
from semmoe.io.files import check_output, save_json
from semmoe.settings import RecordSettings

CONTROL = "control.json"
GONE_SECONDS = 10.0  # a rank that records writes its status every second
SETTLE_SECONDS = 0.5  # a rank that has just started reports its status within this time
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Count = Annotated[int, Field(ge=0)]


def _limited(name: str) -> Any:
    """A field with the default and the bounds of the field `name` of RecordSettings."""
    one = RecordSettings.__dataclass_fields__[name]
    kind: Any = type(one.default)
    return Field(default=one.default, ge=kind(one.metadata["low"]), le=kind(one.metadata["high"]))


class Control(BaseModel):
    """Contents of `control.json`. Limits apply to each rank."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    run: RunName  # also the name of the folder for the recording
    recording: bool
    sample: float = _limited("sample")
    max_mb: int = _limited("max_mb")
    max_tokens: int = _limited("max_tokens")


class Status(BaseModel):
    """Contents of `status-NNNNN.json`: what one rank records, and its losses."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    rank: Count
    run: RunName | None = None
    state: Literal["off", "recording", "stopped", "failed", "refused"] = "off"
    reason: str = Field(default="", max_length=2000)  # why it is not recording, unless it was stopped on request
    requests: Count = 0  # recorded
    tokens: Count = 0  # recorded
    tokens_seen: Count = 0  # tokens of any request that ran while recording, recomputed ones included
    skipped: Count = 0  # requests that arrived when memory was full
    dropped: Count = 0  # requests dropped for lack of memory or for max_tokens
    unfinished: Count = 0  # unfinished requests; those at the end are not in the trace, since their prompts are unknown
    unknown: Count = 0  # rows and prompt tokens with an id outside the model's range
    bytes_held: Count = 0  # rows in memory
    cpu_us_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # CPU time per token seen
    updated: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # seconds since 1970


@dataclass(frozen=True)
class Ended:
    """The result of a recording."""

    run: str
    merged: Any  # `streams.Merged`: the trace
    unfinished: int  # requests that are left out since they had not ended
    gone: list[Status]  # ranks that no longer respond: their rows not yet on disk are lost


def read_control(folder: Path) -> Control:
    return read_private(folder / CONTROL, Control)


def write_control(folder: Path, control: Control) -> None:
    save_json(folder / CONTROL, control, private=True)


def status_path(folder: Path, rank: int) -> Path:
    return folder / f"status-{rank:05d}.json"


def read_status(path: Path) -> Status:
    """The status of a rank; if it is unreadable, the rank counts as failed, with the reason."""
    rank = int(path.stem.removeprefix("status-"))
    try:
        status = read_private(path, Status)
        if status.rank != rank:
            raise ValueError(f"{path} is of rank {status.rank}")
    except (ValueError, OSError) as error:
        return Status(rank=rank, state="failed", reason=str(error)[:2000])
    return status


def read_statuses(folder: Path) -> list[Status]:
    """The statuses of all ranks."""
    return [read_status(path) for path in sorted(folder.glob("status-[0-9][0-9][0-9][0-9][0-9].json"))]


def write_status(folder: Path, status: Status) -> None:
    """Write the status of a rank, with the time."""
    stamped = status.model_copy(update={"updated": round(time.time(), 3)})
    save_json(status_path(folder, status.rank), stamped, private=True)


def refuse(folder: Path, rank: int, reason: str) -> None:
    """Write a status that this rank cannot record, and why; `semmoe record start` then fails with the reason."""
    open_folder(folder)
    write_status(folder, Status(rank=rank, state="refused", reason=reason))


def rank_folder(folder: Path, run: str, rank: int) -> Path:
    return folder / run / f"rank-{rank:05d}"


def begin(folder: Path, settings: RecordSettings) -> tuple[Control, int]:
    """Tell the ranks to record, with their next forward pass; returns the control and how many ranks there are.

    Raises ValueError if they cannot, or record already.
    """
    check_folder(folder)
    ranks = read_statuses(folder)
    refused = [status.reason for status in ranks if status.state == "refused"]
    if refused:
        raise ValueError(f"this server cannot record: {refused[0]}")
    try:
        before = read_control(folder)
    except ValueError:  # there is none, or a damaged one, which is replaced
        before = None
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
