"""The plan's placement in SGLang's words: it holds what the plan says, and each rank is served by the copy it says."""

from typing import Any

import numpy as np
import torch

from semmoe.core import Plan, require
from semmoe.metrics import serving_ranks


def dispatch_map(plan: Plan, rank: int) -> np.ndarray:
    """(L, E) int64: the physical expert that serves each logical one to source `rank`.

    With experts 0 1 | 1 2 on two ranks and rank 0 serving itself: [0, 1, 3] to rank 0.
    """
    serving = serving_ranks(plan.placement, plan.topology)[:, rank]  # (L, E)
    copies = plan.placement.logical_to_physical_map  # (L, E, X)
    hosts = np.where(copies >= 0, copies // plan.placement.experts_per_rank, -1)
    chosen = np.argmax(hosts == serving[:, :, None], axis=2)
    return np.take_along_axis(copies, chosen[..., None], axis=2)[..., 0].astype(np.int64)


def check_location(plan: Plan, metadata: Any, layers: list[int]) -> None:
    """SGLang must have loaded the experts where the plan has them: metadata is its ExpertLocationMetadata."""
    placed = torch.from_numpy(plan.placement.physical_to_logical_map)
    found = None if metadata is None else metadata.physical_to_logical_map_cpu[layers]
    fits = found is not None and found.shape == placed.shape and bool((found == placed.to(found)).all())
    require(fits, "SGLang's experts lie elsewhere than the plan says: start it by `semmoe serve`, or give it the "
            "--init-expert-location of `semmoe apply --to sglang`")  # fmt: skip


def choose_copies(plan: Plan, metadata: Any, layers: list[int], rank: int) -> None:
    """Replace SGLang's own choice among copies, where there is one (with an all-to-all backend)."""
    if metadata.logical_to_rank_dispatch_physical_map is not None:
        chosen = metadata.logical_to_rank_dispatch_physical_map
        chosen[layers] = torch.from_numpy(dispatch_map(plan, rank)).to(chosen)
