"""Map the logical experts of one MoE layer of vLLM to the physical experts that this rank uses.

The plan's placement uses vLLM's own layout for redundant experts (EPLB's): physical experts are in order on the ranks,
and the router's logical ids are mapped to them. Every backend that supports EPLB therefore supports it. Without a plan
a physical id is the logical id.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from semmoe.engines.absent import NoTraffic
from semmoe.runtime.copies import RankCopies, alike, preferred_of_each
from semmoe.runtime.traffic import TrafficCounter


@dataclass
class RealRows:
    """Which rows of a MoE layer are tokens: the first `count`, a device tensor that may change between replays.

    whole: every rank has the rows of all ranks, and no all-to-all runs; full: and none of them is padding.
    """

    count: Tensor  # () int64
    whole: bool = False
    full: bool = False

    def begin(self, count: int, num_rows: int) -> None:
        """Begin a pass in which this rank has so many tokens among its rows."""
        self.count.fill_(count)
        self.full = self.whole and count == num_rows

    def end(self) -> None:
        self.count.fill_(0)
        self.full = False

    def mask(self, num_rows: int) -> Tensor:
        """(n, 1) bool: True for rows that are tokens."""
        return (torch.arange(num_rows, device=self.count.device) < self.count)[:, None]


def own_rows(count: int, padded: int, split: int, rank: int) -> int:
    """Real rows in a rank's slice by position of `count` rows, padded and split over so many ranks."""
    width = -(-padded // split)
    return min(max(count - rank * width, 0), width) if split > 1 else count


class RoutedLayer:
    """The hooks of one layer's router, on one rank.

    copies: the physical experts that each rank of the group uses, of which this one is `rank`; none: a physical id is
    the logical id. drop_padding: padding gets the id -1, which the all-to-all then omits.
    """

    def __init__(
        self,
        place: int,
        copies: Sequence[RankCopies],
        rank: int,
        experts_per_rank: int,
        real: RealRows,
        traffic: TrafficCounter | NoTraffic,
        drop_padding: bool,
        observe: Callable[[int, Tensor, Tensor], None],
    ) -> None:
        self._place, self._rank, self._experts_per_rank = place, rank, experts_per_rank
        self.copies: list[RankCopies] = list(copies)
        self._preferred = preferred_of_each(copies) if len(copies) > 1 else None
        self._real, self._traffic, self._drop_padding, self._observe = real, traffic, drop_padding, observe

    def use(self, copies: Sequence[RankCopies]) -> None:
        """Choose copies by other tables, in place where they are as large."""
        for i, new in enumerate(copies):
            if self.copies[i].ranks.shape == new.ranks.shape:
                self.copies[i].become(new)
            else:
                self.copies[i] = new
        if self._preferred is not None:
            self._preferred = preferred_of_each(self.copies)

    def routed(self, weights: Tensor, expert_ids: Tensor) -> None:
        """Observe the router's choice: logical ids and weights (n, K)."""
        self._observe(self._place, expert_ids, weights)

    def to_physical(self, expert_ids: Tensor) -> Tensor:
        """Logical ids (n, K) -> physical ids of the same type."""
        physical = self._chosen(expert_ids)
        if self._real.full:  # then there is no padding, and all ranks have all rows
            return physical
        if self._traffic.counts and not self._real.whole:
            self._traffic.count(physical, self._experts_per_rank, self._real.count)
        return torch.where(self._real.mask(len(physical)), physical, -1) if self._drop_padding else physical

    def _chosen(self, expert_ids: Tensor) -> Tensor:
        """(n, K) physical ids."""
        if not self.copies:
            return expert_ids
        if not self._real.whole or self._preferred is None:
            return self.copies[self._rank].to_physical(expert_ids)
        return alike(self._preferred, expert_ids, self._experts_per_rank)
