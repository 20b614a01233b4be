"""The cost of a move of a running server from one plan to another.

An expert that a rank is to have, and does not, comes from a rank of the same node if one has it, else from another
node. The weights of a layer's experts travel together, while no forward pass runs.

Worked example, two ranks with experts [[0, 1], [2, 3]] in a layer that are to be [[0, 2], [1, 3]]: rank 1 sends expert
2 to rank 0 and gets expert 1 from it. With experts of 4 MB, 1 GB/s each way and no latency the layer takes 4 ms.
"""

from dataclasses import dataclass

import numpy as np

from semmoe.core import Plan
from semmoe.costs.links import Links
from semmoe.costs.timing import exchange_seconds
from semmoe.topology import Topology


@dataclass(frozen=True, kw_only=True)
class Move:
    """The experts that change ranks between two plans."""

    topology: Topology
    slots: int  # that get another expert, of the rank's own or not
    experts: np.ndarray  # (L, G, G) int64: how many rank i sends to rank j, by layer

    @property
    def inside(self) -> int:
        """Experts that come from the same node, over all layers."""
        return int(self.experts.sum()) - self.between

    @property
    def between(self) -> int:
        """Experts that come from another node, over all layers."""
        node = self.topology.node_of
        return int(self.experts[:, node[:, None] != node].sum())

    def seconds(self, expert_bytes: int, links: Links) -> np.ndarray:
        """(L,) that passes wait for the experts of each layer, of `expert_bytes` each, in a layer."""
        return np.array([self._layer(layer * float(expert_bytes), links) for layer in self.experts])

    def _layer(self, sent: np.ndarray, links: Links) -> float:
        return exchange_seconds(sent, self.topology, links, "dispatch_latency_us") if sent.any() else 0.0


def move_between(old: Plan, new: Plan) -> Move:
    """The move from one plan to another, of the same topology and model."""
    had, has, topology = old.placement.hosts, new.placement.hosts, new.topology  # (L, G, E)
    ranks = np.arange(topology.ep_size)
    experts = np.zeros((len(had), topology.ep_size, topology.ep_size), np.int64)
    for target in ranks:
        near = had & (topology.node_of == topology.node_of[target])[None, :, None]
        source = np.where(near.any(axis=1), near.argmax(axis=1), had.argmax(axis=1))  # (L, E)
        layers, missing = (has[:, target] & ~had[:, target]).nonzero()
        np.add.at(experts, (layers, source[layers, missing], target), 1)
    changed = old.placement.physical_to_logical_map != new.placement.physical_to_logical_map
    return Move(topology=topology, slots=int(changed.sum()), experts=experts)
