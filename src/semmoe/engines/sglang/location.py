"""Check that SGLang's placement is the plan's, and make each rank use the copies that the plan chooses."""

from collections.abc import Callable
from typing import Any

import torch

from semmoe.core import Plan
from semmoe.runtime.copies import RankCopies, alike, rank_copies


def check_location(plan: Plan, metadata: Any, layers: list[int]) -> None:
    """Raise ValueError unless SGLang loaded experts as the plan places them; metadata: its ExpertLocationMetadata."""
    placed = torch.from_numpy(plan.placement.physical_to_logical_map)
    found = None if metadata is None else metadata.physical_to_logical_map_cpu[layers]
    fits = found is not None and found.shape == placed.shape and bool((found == placed.to(found)).all())
    if not fits:
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
        self._by_layer: dict[int, RankCopies] = {}  # by decoder layer, where one token's copies depend on each other
        self._of_all: dict[int, list[RankCopies]] = {}  # of every rank, where a pass may have all rows on all ranks
        self._start = 0
        self.whole: Callable[[], bool] = lambda: False  # whether this pass has

    def attach(self, plan: Plan, metadata: Any, layers: list[int], rank: int, can_whole: bool = False) -> None:
        """Choose as the plan does, if SGLang chooses at all (with an all-to-all backend).

        can_whole: whether there may be passes in which every rank has all rows.
        """
        chosen = metadata.logical_to_rank_dispatch_physical_map
        if chosen is None:
            return
        self._start = chosen.storage_offset()  # SGLang keeps this rank's table among those of all ranks
        copies = [layer.to(chosen.device) for layer in rank_copies(plan, rank)]
        chosen[layers] = torch.stack([layer.first() for layer in copies]).to(chosen)
        if plan.placement.copy_choice != "static":
            self._by_layer = dict(zip(layers, copies, strict=True))
        if can_whole and plan.placement.redundant_experts:
            everyone = [rank_copies(plan, other) for other in range(plan.topology.ep_size)]
            self._of_all = dict(zip(layers, map(list, zip(*everyone, strict=True)), strict=True))

    def choose(self, original: Any, topk_ids: torch.Tensor, info: Any) -> torch.Tensor:
        """Wraps the choice of physical experts (n, K) for one layer, which its row of SGLang's table tells."""
        row = info.partial_logical_to_rank_dispatch_physical_map
        layer = (row.storage_offset() - self._start) // len(row)
        if self.whole() and layer in self._of_all:
            return alike(self._of_all[layer], topk_ids)
        copies = self._by_layer.get(layer)
        return original(topk_ids, info) if copies is None else copies.to_physical(topk_ids)
