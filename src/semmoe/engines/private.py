"""Folders and small files that their owner alone can write, and that others cannot use to block or mislead a reader."""

import os
import stat
from pathlib import Path

from semmoe.io.files import Model, parse_json

MOST_BYTES = 1 << 16  # of a small file


def open_folder(folder: Path) -> None:
    """Make the control folder with mode 0700, or check the existing one. Raises ValueError or OSError."""
    if not os.path.lexists(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        make_private(folder)
    check_folder(folder)


def make_private(folder: Path) -> None:
    """Make a folder with mode 0700, whatever the umask; an existing folder keeps its mode."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:  # several ranks may create it at once
        return
    folder.chmod(0o700)


def check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` is a directory of this user that no other user can write to."""
    if not os.path.lexists(folder):
        raise ValueError(f"{folder} does not exist")
    link = os.lstat(folder)
    if stat.S_ISLNK(link.st_mode) and link.st_uid != os.geteuid():
        raise ValueError(f"{folder} is a symbolic link of another user: it is not followed")
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    _check_owner(folder, folder.stat())


def _check_owner(path: Path, info: os.stat_result) -> None:
    if info.st_uid != os.geteuid():
        raise ValueError(f"{path} belongs to user {info.st_uid}, not to {os.geteuid()}")
    if info.st_mode & 0o022:
        raise ValueError(f"{path} can be written by others: chmod go-w it")


def read_private(path: Path, model: type[Model]) -> Model:
    """Read and validate a small file; links, pipes and large files are refused, so that reading cannot block."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    with open(descriptor, "rb") as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ValueError(f"{path} is not a file")
        _check_owner(path, info)
        if info.st_size > MOST_BYTES:
            raise ValueError(f"{path} has {info.st_size} bytes, more than {MOST_BYTES}")
        return parse_json(path, file.read(MOST_BYTES), model)
