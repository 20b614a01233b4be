"""Build the command line of `semmoe serve` for any engine: options that follow from the plan, and the user's."""

from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from semmoe.engines.settings import PluginSettings
from semmoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The server that a user asks for."""

    model: str
    topology: Topology
    settings: PluginSettings  # with a control folder
    host: str
    port: int
    options: list[str]  # the engine's own


def command_line(values: dict[str, Any]) -> list[str]:
    """{"tp_size": 2, "disable_cuda_graph": True} -> ["--tp-size", "2", "--disable-cuda-graph"]."""
    words: list[str] = []
    for name, value in values.items():
        words += [_option(name)] if value is True else [_option(name), str(value)]
    return words


def join(values: dict[str, Any], given: list[str], decided: Set[str], command: str) -> list[str]:
    """Return options for `values`, and the user's options `given`, which replace ours.

    decided: options that the plan determines. command: named in the message, for users to run themselves. Raises
    ValueError if the user gives an option of `decided`.
    """
    own = {word.split("=")[0] for word in given}
    clash = sorted(own & decided)
    if clash:
        raise ValueError(f"{clash[0]} comes from the plan: omit it, or run {command} yourself")
    return command_line({n: value for n, value in values.items() if _option(n) not in own}) + given


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
