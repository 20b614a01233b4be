"""A token policy that knows which experts each token will choose: what a placement gives if nothing is guessed."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.core import Evidence, Plan, RoutingTrace
from semmoe.io.bounds import Declared
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.slices import ByPosition, ScoreEvidence
from semmoe.topology import Fingerprint, Topology


@dataclass(frozen=True, kw_only=True)
class TrueRouting(ByPosition):
    """Scores are numbers of a token's experts that a rank holds; slices are equal and assigned as those of a plan."""

    kind: ClassVar[str] = "true-routing"

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """Raise ValueError: what only a trace knows is not saved."""
        raise ValueError("true routing is known of a trace alone")

    def evidence(self, trace: RoutingTrace, plan: Plan, group: np.ndarray, decoding: bool) -> Iterator[Evidence]:
        """Yield for each layer the number of each token's experts on every rank of its group, in table units."""
        size = plan.topology.attn_tp_size
        columns = group[:, None] * size + np.arange(size)
        for layer, hosts in enumerate(plan.placement.hosts):
            held = hosts[:, trace.expert_ids[:, layer].astype(np.int64)].sum(axis=2, dtype=np.int32).T  # (T, G)
            yield ScoreEvidence(np.ascontiguousarray(np.take_along_axis(held, columns, axis=1) * SCALE))
