"""The configurations that are measured beside each other, by name."""

import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from semmoe.cli.demo import MODEL
from semmoe.core import Plan, RoutingTrace
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import save_plan
from semmoe.settings import SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from serving.engine import RANKS, SetUp

sys.path.append(str(Path(__file__).parents[2]))  # for lab, which is not installed

VANILLA = "vanilla"  # with an all-to-all
AGAIN = "vanilla again"  # the placebo: another server of the same
AS_IT_COMES = "as it comes"  # the engine without an all-to-all
COMES_AGAIN = "as it comes again"
UNPLANNED = "our transport, unplanned placement"
MOETUNER, EPLB = "MoETuner", "EPLB, 16 redundant"
PLAN, COPIES, MORE_COPIES = "plan", "plan, 8 redundant", "plan, 16 redundant"
# Methods and copies. What has no tables is balanced and moved by the engine itself.
PLANS = {
    PLAN: ("semmoe", 0),
    COPIES: ("semmoe", 8),
    MORE_COPIES: ("semmoe", 16),
    MOETUNER: ("lab.methods.moetuner", 0),
    EPLB: ("eplb", 16),
}


class Planner:
    """Plans of the shipped model, made when they are asked for, each once; `seen` are the prompts to profile."""

    def __init__(self, seen: list[list[int]], folder: Path) -> None:
        self._seen, self._folder = seen, folder

    @cached_property
    def _trace(self) -> RoutingTrace:
        return record(load_model(str(MODEL)), str(MODEL), self._seen, self._folder / "trace")

    def set_up(self, name: str, attention: str, ranks: int = RANKS) -> SetUp:
        if name in (VANILLA, AGAIN, AS_IT_COMES, COMES_AGAIN):
            return SetUp(name=name, attention=attention, ranks=ranks, all_to_all=name in (VANILLA, AGAIN))
        topology = Topology.for_attention(attention, ranks)
        path = self._folder / f"{attention}{ranks}-{name.replace(' ', '-')}"
        if not path.exists():
            save_plan(self._plan(name, topology), path)
        return SetUp(name=name, attention=attention, ranks=ranks, plan=path)

    def _plan(self, name: str, topology: Topology) -> Plan:
        if name == UNPLANNED:
            return unplanned(self._trace, topology)
        method, copies = PLANS[name]
        return solve(self._trace, topology, SolveSettings(method=method, redundant_experts=copies))


def unplanned(trace: RoutingTrace, topology: Topology) -> Plan:
    """A plan's tables over the engine's own placement, of which they know nothing.

    Tokens are shuffled by our collectives, and about as many pairs are local as without a plan.
    """
    plan = solve(trace, topology, SolveSettings())
    return replace(plan, placement=vanilla_plan(trace.fingerprint, topology).placement, method="unplanned")
