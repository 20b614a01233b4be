"""Map the logical experts of a MoE layer of vLLM to the physical experts that this rank uses.

The plan's placement uses vLLM's own layout for redundant experts (EPLB's): physical experts are in order on the ranks,
and the router's logical ids are mapped to them. Every backend that supports EPLB therefore supports it. Without a plan
a physical id is the logical id.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.engines.absent import NoTraffic
from semmoe.runtime.copies import RankCopies
from semmoe.runtime.traffic import TrafficCounter


@dataclass
class RealRows:
    """Which rows of a MoE layer are tokens: the first `count`, a device tensor that may change between replays."""

    count: Tensor  # () int64

    def begin(self, count: int) -> None:
        """Begin a pass in which this rank has `count` tokens."""
        self.count.fill_(count)

    def end(self) -> None:
        self.count.fill_(0)

    def mask(self, num_rows: int) -> Tensor:
        """(n, 1) bool: True for rows that are tokens."""
        return (torch.arange(num_rows, device=self.count.device) < self.count)[:, None]


def own_rows(count: int, padded: int, split: int, rank: int) -> int:
    """Return the number of real rows in a rank's slice; `count` rows are padded and split by position over `split`."""
    width = -(-padded // split)
    return min(max(count - rank * width, 0), width) if split > 1 else count


class RoutedLayer:
    """The hooks of a layer's router, on one rank.

    copies: the physical experts that this rank uses; None: a physical id is the logical id. drop_padding: padding gets
    the id -1, which the all-to-all then omits.
    """

    def __init__(
        self,
        place: int,
        copies: RankCopies | None,
        experts_per_rank: int,
        real: RealRows,
        traffic: TrafficCounter | NoTraffic,
        drop_padding: bool,
        observe: Callable[[int, Tensor, Tensor], None],
    ) -> None:
        self._place, self._experts_per_rank = place, experts_per_rank
        self.copies = copies
        self._real, self._drop_padding = real, drop_padding
        self._traffic, self._observe = traffic, observe

    def use(self, copies: RankCopies) -> None:
        """Choose copies by other tables, in place where they are as large."""
        if self.copies is not None and self.copies.ranks.shape == copies.ranks.shape:
            self.copies.become(copies)
        else:
            self.copies = copies

    def routed(self, weights: Tensor, expert_ids: Tensor) -> None:
        """Observe the router's choice: logical ids and weights (n, K)."""
        self._observe(self._place, expert_ids, weights)

    def to_physical(self, expert_ids: Tensor) -> Tensor:
        """Logical ids (n, K) -> physical ids of the same type."""
        counted = self._experts_per_rank, self._real.count
        physical = expert_ids
        if self.copies is None:
            self._traffic.count(expert_ids, *counted)
        else:
            physical = self._traffic.place(self.copies, expert_ids, *counted)
        return torch.where(self._real.mask(len(physical)), physical, -1) if self._drop_padding else physical
