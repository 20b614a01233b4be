"""One MoE layer of vLLM as the plug-in sees it: logical experts in, the physical ones that serve this rank out.

The plan's placement is vLLM's own layout for redundant experts (EPLB's): physical experts lie in order on the ranks,
and the router's logical ids are looked up. So every backend that takes EPLB takes it, and where no plan is, a
physical expert is its logical one.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.engines.absent import NoTraffic
from semmoe.runtime.traffic import TrafficCounter


@dataclass
class RealRows:
    """Which rows of a MoE layer are tokens: the first `count`, on the device, so that it may change under a graph."""

    count: Tensor  # () int64

    def mask(self, num_rows: int) -> Tensor:
        """(n, 1) bool."""
        return (torch.arange(num_rows, device=self.count.device) < self.count)[:, None]


class RoutedLayer:
    """The hooks of one layer's router, on one rank.

    copies: (E,) the physical expert that serves each logical one to this rank. drop_padding: padding gets the id -1,
    for an all-to-all that then leaves it out.
    """

    def __init__(
        self,
        place: int,
        copies: Tensor,
        experts_per_rank: int,
        real: RealRows,
        traffic: TrafficCounter | NoTraffic,
        drop_padding: bool,
        observe: Callable[[int, Tensor, Tensor], None],
    ) -> None:
        self._place, self._copies, self._experts_per_rank = place, copies, experts_per_rank
        self._real, self._traffic, self._drop_padding, self._observe = real, traffic, drop_padding, observe

    def routed(self, weights: Tensor, expert_ids: Tensor) -> None:
        """The router's choice: logical ids and weights (n, K)."""
        self._observe(self._place, expert_ids, weights)

    def to_physical(self, expert_ids: Tensor) -> Tensor:
        """Logical ids (n, K) -> physical ids of the same type."""
        physical = self._copies[expert_ids.long()]
        if self._traffic.counts or self._drop_padding:
            real = torch.where(self._real.mask(len(physical)), physical, -1)
            if self._traffic.counts:
                self._traffic.count(torch.where(real >= 0, real // self._experts_per_rank, -1))
            physical = real if self._drop_padding else physical
        return physical.to(expert_ids.dtype)
