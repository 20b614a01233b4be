"""Check that SGLang's placement is the plan's, and make each rank use the copies that the plan chooses."""

from typing import Any

import torch

from semmoe.core import Plan
from semmoe.engines.placement import dispatch_map


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


def choose_copies(plan: Plan, metadata: Any, layers: list[int], rank: int) -> None:
    """Replace SGLang's copy choice by the plan's, if SGLang has one (with an all-to-all backend)."""
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        chosen = metadata.logical_to_rank_dispatch_physical_map
        chosen[layers] = torch.from_numpy(dispatch_map(plan, rank)).to(chosen)
