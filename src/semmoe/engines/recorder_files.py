"""The files by which the command line and the ranks of a server talk while routing is recorded.

    FOLDER/control.json            written by `semmoe record`: what to record, and whether to
    FOLDER/status-00000.json       written by each rank, at most once a second
    FOLDER/RUN/rank-00000/         what that rank recorded: a trace directory
    FOLDER/RUN/counts-00000.*      or counts alone

What is recorded is users' text, so folders have mode 0700 and files 0600. Whoever can write the control file can have
all traffic written down, so a folder or a control file that others could have written is refused.
"""

import os
import stat
import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from semmoe.bounds import bounds
from semmoe.files import Model, parse_json, save_json
from semmoe.settings import RecordSettings

LARGEST = 1 << 16  # bytes of a control or status file
CONTROL = "control.json"
RunName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]
Count = Annotated[int, Field(ge=0)]


def _limited(name: str) -> Any:
    """A field with the default and the bounds that RecordSettings has."""
    low, high = bounds(RecordSettings, name)
    default = getattr(RecordSettings(), name)
    return Field(default=default, ge=type(default)(low), le=type(default)(high))


class Control(BaseModel):
    """`control.json`. Limits are for each rank."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    run: RunName  # also the folder that it is recorded in
    recording: bool
    sample: float = _limited("sample")
    max_mb: int = _limited("max_mb")
    max_tokens: int = _limited("max_tokens")
    counts_only: bool = False


class Status(BaseModel):
    """`status-NNNNN.json`: what one rank does, and what it could not record."""

    model_config = ConfigDict(extra="forbid", strict=True)
    schema_version: Literal[1] = 1
    rank: Count
    run: RunName | None = None
    state: Literal["off", "recording", "stopped", "failed", "refused"] = "off"
    reason: str = Field(default="", max_length=2000)  # why it is not recording, if that is not plain
    counts_only: bool = False
    requests: Count = 0  # recorded
    tokens: Count = 0  # recorded
    tokens_seen: Count = 0  # that ran while recording, of any request, recomputed ones too
    skipped: Count = 0  # requests that came when memory was full
    dropped: Count = 0  # requests given up: memory, max_tokens, or the engine's own wish
    unfinished: Count = 0  # requests under way; those at the end are lost to a trace, as their prompts are not known
    unknown: Count = 0  # rows and prompt tokens with an id that the model does not have
    bytes_held: Count = 0  # rows in memory
    cpu_us_per_token: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # of tokens seen
    updated: float = Field(default=0.0, ge=0, allow_inf_nan=False)  # seconds since 1970


def open_folder(folder: Path) -> None:
    """Make the control folder, mode 0700, or check the one that is there. Raises ValueError or OSError."""
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private(folder)
    check_folder(folder)


def make_private(folder: Path) -> None:
    """A folder of mode 0700, whatever the umask; one that is there already keeps its mode."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # several ranks come at once
        return
    folder.chmod(0o700)


def check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is a directory of ours that nobody else can write to."""
    if not os.path.lexists(folder):
        raise ValueError(f"there is no folder {folder}")
    link = os.lstat(folder)
    ours = not stat.S_ISLNK(link.st_mode) or link.st_uid == os.geteuid()
    if not ours:
        raise ValueError(f"{folder} is a symbolic link of another user: it is not followed")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    _check_owner(folder, folder.stat())


def _check_owner(path: Path, info: os.stat_result) -> None:
    if info.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
    if info.st_mode & 0o022:
        raise ValueError(f"{path} can be written by others: chmod go-w it")


def read_control(folder: Path) -> Control:
    return _read(folder / CONTROL, Control)


def write_control(folder: Path, control: Control) -> None:
    save_json(folder / CONTROL, control, private=True)


def status_path(folder: Path, rank: int) -> Path:
    return folder / f"status-{rank:05d}.json"


def status_paths(folder: Path) -> list[Path]:
    return sorted(folder.glob("status-[0-9][0-9][0-9][0-9][0-9].json"))


def read_status(path: Path) -> Status:
    return _read(path, Status)


def write_status(folder: Path, status: Status) -> None:
    save_json(status_path(folder, status.rank), status, private=True)


def refuse(folder: Path, rank: int, reason: str) -> None:
    """Say that this rank can record nothing as it runs: `semmoe record start` then ends with the reason."""
    open_folder(folder)
    write_status(folder, Status(rank=rank, state="refused", reason=reason, updated=round(time.time(), 3)))


def rank_folder(folder: Path, run: str, rank: int) -> Path:
    return folder / run / f"rank-{rank:05d}"


def counts_path(folder: Path, run: str, rank: int) -> Path:
    return folder / run / f"counts-{rank:05d}.safetensors"


def _read(path: Path, model: type[Model]) -> Model:
    """A small file of ours. Neither a link nor a pipe nor a huge file holds the reader up."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is not a file")
        _check_owner(path, info)
        if info.st_size > LARGEST:
            raise ValueError(f"{path} has {info.st_size} bytes, more than {LARGEST}")
        return parse_json(path, file.read(LARGEST), model)
