"""Read and write files: writes are atomic, reads are bounded, and errors name the file."""

import contextlib
import ctypes
import errno
import gzip
import json
import os
import re
import shutil
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

MOST_ARRAY_BYTES = 1 << 35  # of a file of arrays, which is read whole; many times the size of a plan or a shard
MOST_JSON_BYTES = 1 << 27  # of a header, a links file or a record; the largest, of a relabelled model, has some MB
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # arguments of Linux's renameat2
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # errors that vanish when there is room again
Model = TypeVar("Model", bound=BaseModel)


def check_output(
    path: Path,
    *,
    directory: bool = False,
    force: bool | None = None,
    room: int = 0,
    inputs: Iterable[Path | str | None] = (),
) -> None:
    """Raise ValueError or OSError unless `path` can be written; to be called before the work that makes its content.

    force: whether an existing file may be replaced; None if the command has no such option. An empty directory is never
    in the way. room: bytes that will be written. inputs: files and directories that the command reads: `path` must not
    be one, contain one or lie inside one; None and paths that do not exist are skipped.
    """
    _check_name(path)
    if path.exists() and path.is_dir() != directory:
        raise ValueError(f"{path} is {'a file: name a directory' if directory else 'a directory: name a file'}")
    parent = next(folder for folder in path.absolute().parents if os.path.lexists(folder))
    if not parent.is_dir():
        raise ValueError(f"{path} cannot be made: {parent} is {'a file' if parent.exists() else 'a link to nothing'}")
    _check_inputs(path, [Path(one) for one in inputs if one is not None and Path(one).exists()])
    empty = directory and path.exists() and not any(path.iterdir())
    if path.exists() and not force and not empty:
        remedy = "remove it" if force is None else "give --force to replace it"
        raise ValueError(f"{path} exists: choose another name, or {remedy}")
    with _called(path):  # os.access is always true for root; try the longest name
        tempfile.NamedTemporaryFile(dir=parent, prefix=f".{path.name}.old.").close()
    free = shutil.disk_usage(parent).free
    if room > free:
        words = f"{room / 1e6:,.0f} MB are needed, and {free / 1e6:,.0f} MB are free there"
        raise OSError(errno.ENOSPC, words, str(path))


def _check_name(path: Path) -> None:
    """Raise ValueError if `path` is a link, a device, or no text."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise ValueError(f"{os.fsencode(path).decode(errors='replace')} is not UTF-8: choose another name") from None
    if path.is_symlink():
        raise ValueError(f"{path} is a link: name its target, or another place")
    if path.exists() and not path.is_dir() and not path.is_file():
        raise ValueError(f"{path} is neither a file nor a directory: choose another name")


def _check_inputs(path: Path, inputs: list[Path]) -> None:
    """Raise ValueError if to write `path` would change an input."""
    target = path.resolve()
    for one in inputs:
        source = one.resolve()
        same = path.exists() and path.samefile(source)  # also a hard link
        if same or target.is_relative_to(source) or source.is_relative_to(target):
            raise ValueError(f"{path} is, is inside or holds {one}, an input of this command: choose another place")


@contextlib.contextmanager
def _called(path: Path, staged: Path | None = None) -> Iterator[None]:
    """Make OSErrors name `path`, which the user typed, instead of a temporary file or nothing."""
    try:
        yield
    except OSError as error:
        unnamed = error.filename is None or staged is None or str(error.filename).startswith(str(staged))
        if unnamed and error.errno is not None:
            error.filename = str(path)
        raise


@contextlib.contextmanager
def atomic_file(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield the path of a file that replaces `path` when the block succeeds and is removed when it fails.

    A `private` file is never readable by anyone but its owner, whatever the umask.
    """
    with _staged(path, 0o700) as folder:
        staged = folder / path.name
        yield staged
        if private:
            staged.chmod(0o600)
        staged.replace(path)


@contextlib.contextmanager
def atomic_directory(path: Path, private: bool = False) -> Iterator[Path]:
    """The same as `atomic_file` for a directory; an existing directory is replaced at the end."""
    with _staged(path, 0o700 if private else 0o755) as staged:
        yield staged
        # an older directory stays until it is replaced, whenever the program is interrupted
        if not path.exists():
            staged.replace(path)
        elif not _exchange(staged, path):
            _replace_in_two_steps(path, staged)


@contextlib.contextmanager
def _staged(path: Path, mode: int) -> Iterator[Path]:
    """Yield a new folder beside `path`, and remove it, unless it was moved, at the end."""
    with _called(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        with _called(path, staged):
            staged.chmod(mode)
            yield staged
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two paths in one step, and return whether this system and its file system can."""
    try:
        rename = ctypes.CDLL(None).renameat2
    except AttributeError:
        return False
    return rename(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0


def _replace_in_two_steps(path: Path, staged: Path) -> None:
    old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
    try:
        path.replace(old)
        staged.replace(path)
    finally:
        if not path.exists():
            old.replace(path)
        shutil.rmtree(old, ignore_errors=True)


def save_arrays(path: Path, arrays: dict[str, np.ndarray], private: bool = False) -> None:
    with atomic_file(path, private) as staged:
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, staged)
        except SafetensorError as error:  # for example a full disk
            number = re.search(r"os error (\d+)", str(error))
            raise OSError(int(number[1]) if number else errno.EIO, str(error), str(path)) from None


def load_arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file that holds exactly `names`."""
    if path.is_file() and path.stat().st_size > MOST_ARRAY_BYTES:
        raise ValueError(f"{path} has {path.stat().st_size:,} bytes, more than {MOST_ARRAY_BYTES:,}")
    with _opened(path) as file:
        if set(file.keys()) != names:
            raise ValueError(f"{path} holds {sorted(file.keys())}, expected {sorted(names)}")
        return {name: np.asarray(file.get_tensor(name)) for name in names}


def load_array(path: Path, name: str) -> np.ndarray:
    """One array of a safetensors file, without reading the others."""
    with _opened(path) as file:
        return np.asarray(file.get_tensor(name))


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="numpy") as file:
            yield file
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, TypeError) as error:  # TypeError: a dtype that NumPy lacks, such as bfloat16
        raise ValueError(f"{path} is truncated or damaged ({error})") from None


def save_text(path: Path, text: str, private: bool = False) -> None:
    with atomic_file(path, private) as staged:
        staged.write_text(text + "\n", encoding="utf-8")


def save_json(path: Path, model: BaseModel, private: bool = False) -> None:
    save_text(path, model.model_dump_json(indent=1), private)


def load_json(path: Path, model: type[Model]) -> Model:
    return parse_json(path, bytes(read_limited(path, MOST_JSON_BYTES)), model)


def parse_json(path: Path, content: bytes, model: type[Model]) -> Model:
    """Validate `content`, which was read from `path`; raises ValueError that names the file and the field."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path} is not valid: {where}: {first['msg']}") from None


def read_object(path: Path, limit: int = MOST_JSON_BYTES) -> dict[str, Any]:
    """A JSON object from a file; raises ValueError if it is anything else."""
    content = read_limited(path, limit)
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is not a JSON object")
    return value


def read_limited(path: Path, limit: int) -> bytearray:
    """The bytes of a file, unpacked if its name ends in `.gz`.

    Raises ValueError that names the file if it is missing or damaged, or if there are more than `limit` bytes: a small
    `.gz` file can unpack to more than memory holds.
    """
    content = bytearray()
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            while chunk := file.read(1 << 20):
                content += chunk
                if len(content) > limit:
                    raise ValueError(f"{path} holds more than {limit:,} bytes, the most that is read: split it")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error})") from None
    return content
