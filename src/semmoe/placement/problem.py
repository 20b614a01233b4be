"""What every method is given and what it finds."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from semmoe.core import Placement, RequestPolicy, RoutingTrace, TokenPolicy
from semmoe.requests.policy import RoundRobin
from semmoe.settings import SolveSettings
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology

Progress = Callable[[int], None]  # told of layers that are done


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A profile, and the ranks to plan for."""

    trace: RoutingTrace
    topology: Topology
    settings: SolveSettings
    embeddings: np.ndarray | None = None  # (V, H): tokens that were not profiled are served by their nearest neighbour
    progress: Progress = lambda layers: None


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Where experts go, and by which policies tokens and requests follow them."""

    placement: Placement
    tokens: TokenPolicy
    requests: RequestPolicy
    gap: dict[str, float | None] | None = None  # of programs solved: relative gap to the optimum, None if unknown


def placement_alone(placement: Placement, topology: Topology, gap: dict[str, float | None] | None = None) -> Solution:
    """The solution of a method that leaves tokens and requests to the engine."""
    requests = RoundRobin(num_groups=topology.dp_size)
    return Solution(placement=placement, tokens=ByPosition(), requests=requests, gap=gap)
