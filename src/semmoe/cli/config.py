"""Defaults of options from a file: `semmoe --config FILE COMMAND`."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semmoe.io.files import read_limited

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

MOST_BYTES = 1 << 20


def read_config(path: Path, group: Any) -> dict[str, Any]:
    """A TOML file as click's map of defaults: a table for each command, with its options by name.

    Raises ValueError that names the file and the first command or option that does not exist.
    """
    try:
        content = tomllib.loads(bytes(read_limited(path, MOST_BYTES)).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid TOML: {error}") from None
    return _commands(content, group, path, "")


def _commands(table: Mapping[str, Any], group: Any, path: Path, words: str) -> dict[str, Any]:
    """The defaults of a group's commands, by name."""
    out = {}
    for name, value in table.items():
        command, full = group.commands.get(name), f"{words} {name}".strip()
        if command is None:
            raise ValueError(f"{path}: there is no command {full}")
        if not isinstance(value, dict):
            raise ValueError(f"{path}: {full} must be a table of options, [{full.replace(' ', '.')}]")
        nested = hasattr(command, "commands")
        out[name] = (_commands if nested else _options)(value, command, path, full)
    return out


def _options(table: Mapping[str, Any], command: Any, path: Path, full: str) -> dict[str, Any]:
    """The defaults of a command's options, by the names of its parameters."""
    known = {flag.lstrip("-"): one.name for one in command.params for flag in one.opts if flag.startswith("--")}
    unknown = [name for name in table if name not in known or name == "help"]
    if unknown:
        raise ValueError(f"{path}: {full} has no option {unknown[0]}")
    return {known[name]: value for name, value in table.items()}
