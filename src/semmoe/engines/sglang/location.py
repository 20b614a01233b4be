"""Check that SGLang's placement is the plan's, and make each rank use the copies that the plan chooses."""

from collections.abc import Sequence
from typing import Any

import torch

from semmoe.core import Plan
from semmoe.runtime.copies import RankCopies, rank_copies, take_over


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
        self._start = 0
        self._rank = 0
        self._copies: dict[int, RankCopies] = {}  # by decoder layer
        self._next: dict[int, RankCopies] = {}  # of the plan that is prepared
        self._by_token = self._next_by_token = False  # whether one token's copies depend on each other

    def attach(self, plan: Plan, metadata: Any, layers: list[int], rank: int) -> None:
        """Choose copies by the plan, if SGLang chooses at all (with an all-to-all backend)."""
        chosen = metadata.logical_to_rank_dispatch_physical_map
        self._layers, self._chosen = layers, chosen
        if chosen is None:
            return
        self._start = chosen.storage_offset()  # SGLang keeps this rank's table among those of all ranks
        self._rank = rank
        for layer, copies in zip(layers, rank_copies(plan, rank), strict=True):
            self._install(layer, copies.to(chosen.device))
        self._by_token = plan.placement.copy_choice != "static"

    def prepare(self, plan: Plan, captured: bool) -> None:
        """Prepare the tables of another plan. captured: whether graphs hold the addresses of the current tables.

        Raises ValueError if the new tables cannot replace the current ones.
        """
        if self._chosen is None:
            return
        if captured and self._by_token != (plan.placement.copy_choice != "static"):
            raise ValueError("captured graphs choose copies by another rule than the plan's copy choice")
        old = [self._copies[layer] for layer in self._layers]
        new = take_over(old, rank_copies(plan, self._rank), captured)
        self._next = dict(zip(self._layers, new, strict=True))
        self._next_by_token = plan.placement.copy_choice != "static"

    def commit(self, layers: Sequence[int]) -> None:
        """Install the prepared tables of the decoder layers `layers`."""
        for layer in layers if self._chosen is not None else ():
            self._install(layer, self._next[layer])
            self._by_token |= self._next_by_token

    def finish(self) -> None:
        """All layers have the tables of the plan that was prepared."""
        self._by_token = self._next_by_token

    def _install(self, layer: int, copies: RankCopies) -> None:
        own = self._copies.get(layer)
        if own is not None and own.ranks.shape == copies.ranks.shape:
            own.become(copies)
        else:
            self._copies[layer] = copies
        self._chosen[layer] = copies.first().to(self._chosen)

    def choose(self, original: Any, topk_ids: torch.Tensor, info: Any) -> torch.Tensor:
        """Wraps the choice of physical experts (n, K) for one layer, which its row of SGLang's table tells."""
        row = info.partial_logical_to_rank_dispatch_physical_map
        layer = (row.storage_offset() - self._start) // len(row)
        copies = self._copies.get(layer)
        if copies is None:
            return original(topk_ids, info)
        return copies.to_physical(topk_ids) if self._by_token else original(topk_ids, info)
