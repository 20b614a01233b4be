"""The table of all methods, semmoe's included. The field's methods have one file each, and none imports another.

A method is a function `solve(Problem) -> Solution` (`placement.problem`). To add one, add a file, a row here, a test.
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
    function: str = "solve"
    copies: bool = False  # it supports redundant experts
    needs_groups: bool = False  # it only sends requests to attention groups, and leaves experts in order
    reads: tuple[str, ...] = ()  # fields of SolveSettings that shape its plan, beside method and redundant_experts

    def load(self) -> Callable[[Any], Any]:
        """The method's function `solve`; its module is imported by this call."""
        return getattr(import_module(self.module), self.function)


METHODS = {
    "linear": Method("semmoe.placement.linear", copies=True),
    "eplb": Method("semmoe.methods.eplb", copies=True),
    "least-loaded": Method("semmoe.methods.unscored", "least_loaded", needs_groups=True),
    "prefix-affinity": Method("semmoe.methods.unscored", "prefix_affinity", needs_groups=True),
    "eldr": Method("semmoe.methods.eldr", needs_groups=True, reads=("seed",)),
    "exflow": Method("semmoe.methods.exflow", reads=("seed",)),
    "moetuner": Method("semmoe.methods.moetuner", reads=("moetuner",)),
    "grace": Method("semmoe.methods.grace", copies=True, reads=("seed",)),
    "paper": Method("semmoe.methods.paper_tables", reads=("paper", "seed")),
    "semmoe": Method("semmoe.placement.ours", copies=True, reads=("predictor", "cocluster", "seed", "phase")),
}


def check_applies(method: str, topology: Topology, redundant_experts: int) -> None:
    """Raise ValueError, stating the reason, if `method` cannot be used."""
    reason = obstacle(method, topology, redundant_experts)
    if reason is not None:
        raise ValueError(f"method {method} does not apply: {reason}")


def obstacle(method: str, topology: Topology, redundant_experts: int) -> str | None:
    """The reason why `method` cannot be used here, or None. Raises ValueError for an unknown method."""
    if method not in METHODS:
        raise ValueError(f"method must be one of {', '.join(METHODS)}, not {method!r}")
    if METHODS[method].needs_groups and topology.dp_size == 1:
        return "it sends requests to attention groups, and attention tp has one: choose --attention dp or hybrid"
    if redundant_experts and not METHODS[method].copies:
        capable = ", ".join(name for name, one in METHODS.items() if one.copies)
        return f"it has no redundant experts: choose one of {capable}, or --redundant-experts 0"
    return None
