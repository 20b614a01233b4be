"""The input and the output of every method."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from semmoe.core import DECODE, PREFILL, Placement, Plan, RequestPolicy, RoutingTrace, TokenPolicy
from semmoe.costs.rows import RowCosts, plain_costs
from semmoe.requests.policy import RoundRobin
from semmoe.settings import CoclusterSettings, SolveSettings
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

Progress = Callable[[float], None]  # told of layers that are done, or halves of them


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A profile, and the ranks to plan for."""

    trace: RoutingTrace
    topology: Topology
    settings: SolveSettings
    # (V, H): tokens that were not profiled use the rows of their nearest profiled neighbour
    embeddings: np.ndarray | None = None
    progress: Progress = lambda layers: None
    previous: Plan | None = None  # to begin from, moving only what pays
    # what the all-to-all charges a token of each phase, prefill and decode; None: as the settings' weights say
    costs: tuple[RowCosts, RowCosts] | None = None

    @cached_property
    def charges(self) -> tuple[RowCosts, RowCosts]:
        """`costs`, or those that the settings' weights say."""
        return self.costs or default_costs(self.topology, self.settings.cocluster)


@dataclass(frozen=True)
class Tokens:
    """The routed tokens of one layer."""

    expert_ids: np.ndarray  # (T, K)
    group: np.ndarray  # (T,) attention group of each token's request
    request: np.ndarray  # (T,)
    phase: np.ndarray  # (T,) which of the costs each token is charged


def default_costs(topology: Topology, settings: CoclusterSettings) -> tuple[RowCosts, RowCosts]:
    """The costs of both phases by the three weights of the settings."""
    plain = plain_costs(topology, settings.activation, settings.remote_rank, settings.remote_node)
    return plain, plain


def weighed_tokens(trace: RoutingTrace, phase: str) -> np.ndarray:
    """(T,) bool: the tokens of a phase, `prefill`, `decode` or `both`."""
    codes = {"prefill": [PREFILL], "decode": [DECODE], "both": [PREFILL, DECODE]}[phase]
    return np.isin(trace.phase, codes)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The placement of experts and the policies by which tokens and requests follow them."""

    placement: Placement
    tokens: TokenPolicy
    requests: RequestPolicy
    gap: dict[str, float | None] | None = None  # by integer program: relative gap to the optimum, None if unknown

    def plan(self, topology: Topology, fingerprint: Fingerprint, method: str, **more: Any) -> Plan:
        """The plan of this solution; more: its other fields."""
        parts = {name: getattr(self, name) for name in ("placement", "tokens", "requests")}
        return Plan(topology=topology, fingerprint=fingerprint, method=method, **parts, **more)


def placement_alone(placement: Placement, topology: Topology, gap: dict[str, float | None] | None = None) -> Solution:
    """The solution of a method that leaves tokens and requests to the engine."""
    requests = RoundRobin(num_groups=topology.dp_size)
    return Solution(placement=placement, tokens=ByPosition(), requests=requests, gap=gap)
