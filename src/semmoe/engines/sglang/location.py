"""Check that SGLang's placement is the plan's, and make each rank use the copies that the plan chooses."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from semmoe.core import Plan
from semmoe.runtime.copies import RankCopies, alike, preferred_of_each, rank_copies, take_over


def check_location(plan: Plan, metadata: Any, layers: list[int]) -> None:
    """Raise ValueError unless SGLang loaded experts as the plan places them; metadata: its ExpertLocationMetadata."""
    placed = torch.from_numpy(plan.placement.physical_to_logical_map)
    found = None if metadata is None else metadata.physical_to_logical_map_cpu[layers]
    if found is None or found.shape != placed.shape or bool((found != placed.to(found)).any()):
        raise ValueError(
            "SGLang's experts lie elsewhere than the plan says: start it by `semmoe serve`, or give it the "
            "--init-expert-location of `semmoe apply --to sglang`"
        )


def check_dispatch(plan: Plan, algorithm: str | None) -> None:
    """Raise ValueError if SGLang's algorithm to choose among copies ignores the plan's copy choice."""
    if plan.placement.redundant_experts != 0 and algorithm != "static":
        raise ValueError(
            f"SGLang chooses among the plan's copies by --ep-dispatch-algorithm {algorithm}: omit it, and serve "
            "with an all-to-all (--moe-a2a-backend)"
        )


class ChosenCopies:
    """The plan's copy choice in place of SGLang's."""

    def __init__(self) -> None:
        self._layers: list[int] = []  # decoder layers with experts
        self._chosen: Any = None  # SGLang's own table of this rank
        self._start = self._experts_per_rank = 0
        self._sources: list[int] = []  # this rank, then all ranks where a pass may have all rows on all of them
        self._copies: dict[int, list[RankCopies]] = {}  # by decoder layer, of all sources
        self._preferred: dict[int, torch.Tensor] = {}  # (G, E) of all ranks, where a pass may have all rows on all
        self._next: dict[int, list[RankCopies]] = {}  # of the plan that is prepared
        self._by_token = self._next_by_token = False  # whether one token's copies depend on each other
        self.whole: Callable[[], bool] = lambda: False  # whether this pass has all rows on all ranks

    def attach(self, plan: Plan, metadata: Any, layers: list[int], rank: int, can_whole: bool = False) -> None:
        """Choose as the plan does, if SGLang chooses at all (with an all-to-all backend).

        can_whole: whether there may be passes in which every rank has all rows.
        """
        chosen = metadata.logical_to_rank_dispatch_physical_map
        self._layers, self._chosen = layers, chosen
        if chosen is None:
            return
        self._experts_per_rank = plan.placement.experts_per_rank
        self._start = chosen.storage_offset()  # SGLang keeps this rank's table among those of all ranks
        self._sources = [rank]
        if can_whole and plan.placement.redundant_experts:
            self._sources += range(plan.topology.ep_size)
        for layer, copies in zip(layers, self._tables(plan), strict=True):
            self._install(layer, [table.to(chosen.device) for table in copies])
        self._by_token = plan.placement.copy_choice != "static"

    def prepare(self, plan: Plan, captured: bool) -> None:
        """Make the tables of another plan. captured: whether graphs hold the addresses of today's.

        Raises ValueError if they cannot take the place of these.
        """
        if self._chosen is None:
            return
        if captured and self._by_token != (plan.placement.copy_choice != "static"):
            raise ValueError("captured graphs choose copies by another rule than the plan's copy choice")
        new = list(zip(*self._tables(plan), strict=True))
        old = [[self._copies[layer][i] for layer in self._layers] for i in range(len(self._sources))]
        by_source = [take_over(own, tables, captured) for own, tables in zip(old, new, strict=True)]
        self._next = dict(zip(self._layers, map(list, zip(*by_source, strict=True)), strict=True))
        self._next_by_token = plan.placement.copy_choice != "static"

    def commit(self, layers: Sequence[int]) -> None:
        """Install what was prepared for these of the model's decoder layers."""
        for layer in layers if self._chosen is not None else ():
            self._install(layer, self._next[layer])
            self._by_token |= self._next_by_token

    def finish(self) -> None:
        """All layers have the tables of the plan that was prepared."""
        self._by_token = self._next_by_token

    def _tables(self, plan: Plan) -> list[list[RankCopies]]:
        """By layer and source."""
        return [list(layer) for layer in zip(*(rank_copies(plan, rank) for rank in self._sources), strict=True)]

    def _install(self, layer: int, copies: list[RankCopies]) -> None:
        own = self._copies.get(layer)
        if own is not None and [c.ranks.shape for c in own] == [c.ranks.shape for c in copies]:
            for old, new in zip(own, copies, strict=True):
                old.become(new)
        else:
            self._copies[layer] = copies
        if len(copies) > 1:
            self._preferred[layer] = preferred_of_each(copies[1:])
        self._chosen[layer] = copies[0].first().to(self._chosen)

    def choose(self, original: Any, topk_ids: torch.Tensor, info: Any) -> torch.Tensor:
        """Wraps the choice of physical experts (n, K) for one layer, which its row of SGLang's table tells."""
        row = info.partial_logical_to_rank_dispatch_physical_map
        layer = (row.storage_offset() - self._start) // len(row)
        copies = self._copies.get(layer)
        if copies is None:
            return original(topk_ids, info)
        if layer in self._preferred and self.whole():
            return alike(self._preferred[layer], topk_ids, self._experts_per_rank)
        return copies[0].to_physical(topk_ids) if self._by_token else original(topk_ids, info)
