"""Files that are never half-written, and errors that name the file."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

Model = TypeVar("Model", bound=BaseModel)


@contextlib.contextmanager
def atomic_file(path: Path, private: bool = False) -> Iterator[Path]:
    """Yield a temporary sibling of `path` that replaces it when the block ends well and vanishes when it fails.

    A `private` file is never readable by others than its owner, whatever the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = path.with_name(f".{path.name}.partial")
    try:
        if private:
            _create_private(staged)
        yield staged
        if private:
            staged.chmod(0o600)  # who wrote it may have made it anew
        staged.replace(path)
    finally:
        staged.unlink(missing_ok=True)


def _create_private(path: Path) -> None:
    """An empty file of mode 0600 in place of what has that name; who opens it to write keeps the mode."""
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    os.fchmod(descriptor, 0o600)  # a umask may take the owner's own rights
    os.close(descriptor)


@contextlib.contextmanager
def atomic_directory(path: Path, private: bool = False) -> Iterator[Path]:
    """As `atomic_file`, for a directory that is written whole; an older one of that name is replaced at the end."""
    path.parent.mkdir(parents=True, exist_ok=True)
    staged = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        staged.chmod(0o700 if private else 0o755)
        yield staged
        if path.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{path.name}.old.", dir=path.parent))
            path.replace(old)
            staged.replace(path)
            shutil.rmtree(old)
        else:
            staged.replace(path)
    finally:
        shutil.rmtree(staged, ignore_errors=True)


def save_arrays(path: Path, arrays: dict[str, np.ndarray], private: bool = False) -> None:
    with atomic_file(path, private) as staged:
        try:
            save_file({name: np.ascontiguousarray(array) for name, array in arrays.items()}, staged)
        except SafetensorError as error:  # a full disk, for one
            raise OSError(f"{path} could not be written: {error}") from None


def load_arrays(path: Path, names: set[str]) -> dict[str, np.ndarray]:
    """The arrays of a safetensors file that holds exactly `names`."""
    try:
        arrays = load_file(path)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None
    except (SafetensorError, TypeError) as error:  # TypeError: a type that NumPy lacks, such as bfloat16
        raise ValueError(f"{path} is truncated or damaged ({error})") from None
    if set(arrays) != names:
        raise ValueError(f"{path} holds {sorted(arrays)}, expected {sorted(names)}")
    return arrays


def array_shape(path: Path, name: str) -> tuple[int, ...]:
    """The shape of one array of a safetensors file, without reading its data."""
    try:
        with safe_open(path, framework="numpy") as file:
            return tuple(file.get_slice(name).get_shape())
    except SafetensorError as error:
        raise ValueError(f"{path} is truncated or damaged ({error})") from None


def save_json(path: Path, model: BaseModel, private: bool = False) -> None:
    with atomic_file(path, private) as staged:
        staged.write_text(model.model_dump_json(indent=1) + "\n", encoding="utf-8")


def load_json(path: Path, model: type[Model]) -> Model:
    try:
        return parse_json(path, path.read_bytes(), model)
    except FileNotFoundError:
        raise ValueError(f"{path} is missing") from None


def parse_json(path: Path, content: bytes, model: type[Model]) -> Model:
    """`content` of `path` as a `model`; raises ValueError that names the file and the field."""
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "file"
        raise ValueError(f"{path} is not valid: {where}: {first['msg']}") from None
