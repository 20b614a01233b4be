"""The plan's placement in SGLang's words: it holds what the plan says, and each rank is served by the copy it says."""

from typing import Any

import torch

from semmoe.core import Plan
from semmoe.engines.placement import dispatch_map


def check_location(plan: Plan, metadata: Any, layers: list[int]) -> None:
    """SGLang must have loaded the experts where the plan has them: metadata is its ExpertLocationMetadata."""
    placed = torch.from_numpy(plan.placement.physical_to_logical_map)
    found = None if metadata is None else metadata.physical_to_logical_map_cpu[layers]
    fits = found is not None and found.shape == placed.shape and bool((found == placed.to(found)).all())
    if not fits:
        raise ValueError(
            "SGLang's experts lie elsewhere than the plan says: start it by `semmoe serve`, or give it the "
            "--init-expert-location of `semmoe apply --to sglang`"
        )


def check_dispatch(plan: Plan, algorithm: str | None) -> None:
    """SGLang's other ways to choose among copies do not look at what the plan chose."""
    if plan.placement.redundant_experts != 0 and algorithm != "static":
        raise ValueError(
            f"SGLang chooses among the plan's copies by --ep-dispatch-algorithm {algorithm}: leave it away, and serve "
            "with an all-to-all (--moe-a2a-backend)"
        )


def choose_copies(plan: Plan, metadata: Any, layers: list[int], rank: int) -> None:
    """Replace SGLang's own choice among copies, where there is one (with an all-to-all backend)."""
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        chosen = metadata.logical_to_rank_dispatch_physical_map
        chosen[layers] = torch.from_numpy(dispatch_map(plan, rank)).to(chosen)
