"""The table of all methods, semmoe's included. The field's methods have one file each, and none imports another.

A method is a function `solve(Problem) -> Solution` (`placement.problem`). To add one, add a file, a row here, a test;
or name a module of any package by its dotted name, such as `lab.methods.exflow`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from semmoe.topology import Topology


@dataclass(frozen=True)
class Method:
    """The module of a method, and what the method supports."""

    module: str
    copies: bool = False  # it supports redundant experts
    needs_groups: bool = False  # it only sends requests to attention groups, and leaves experts in order
    reads: tuple[str, ...] = ()  # fields of SolveSettings that shape its plan, beside method and redundant_experts

    def load(self) -> Callable[[Any], Any]:
        """The method's function `solve`; its module is imported by this call."""
        return import_module(self.module).solve


METHODS = {
    "linear": Method("semmoe.placement.linear", copies=True),
    "eplb": Method("semmoe.placement.eplb", copies=True),
    "least-loaded": Method("semmoe.placement.unscored", needs_groups=True),
    "paper": Method("semmoe.paper.tables", reads=("paper", "seed")),
    "semmoe": Method("semmoe.placement.ours", copies=True, reads=("predictor", "cocluster", "seed", "phase")),
}


def find_method(name: str) -> Method:
    """Return the row of METHODS called `name`, or the `METHOD` of the module with that dotted name.

    The module is imported, so never pass a name that was read from a plan. Raises ValueError without a method.
    """
    if "." not in name:
        if name not in METHODS:
            raise ValueError(f"method must be one of {', '.join(METHODS)}, or a module's dotted name, not {name!r}")
        return METHODS[name]
    try:
        found: Method = import_module(name).METHOD
        found.load()
    except Exception as error:  # the module is a user's, whose code may raise anything
        needed = "its package must be on PYTHONPATH, and METHOD in it a semmoe.placement.methods.Method"
        raise ValueError(f"method {name} cannot be loaded: {' '.join(str(error).split())} ({needed})") from error
    return found


def check_applies(method: str, topology: Topology, redundant_experts: int) -> None:
    """Raise ValueError, stating the reason, if `method` cannot be used."""
    reason = obstacle(method, topology, redundant_experts)
    if reason is not None:
        raise ValueError(f"method {method} does not apply: {reason}")


def obstacle(method: str, topology: Topology, redundant_experts: int) -> str | None:
    """The reason why `method` cannot be used here, or None. Raises ValueError for an unknown method."""
    found = find_method(method)
    if found.needs_groups and topology.dp_size == 1:
        return "it sends requests to attention groups, and attention tp has one: choose --attention dp or hybrid"
    if redundant_experts and not found.copies:
        capable = ", ".join(name for name, one in METHODS.items() if one.copies)
        return f"it has no redundant experts: choose one of {capable}, or --redundant-experts 0"
    return None
