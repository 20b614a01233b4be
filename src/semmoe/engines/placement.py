"""A plan's placement in the form that engines look up."""

import numpy as np

from semmoe.core import Plan
from semmoe.metrics import copy_choice


def dispatch_map(plan: Plan, rank: int) -> np.ndarray:
    """(L, E) int64: the physical expert that source `rank` uses for each logical one.

    Worked example, experts 0 1 | 1 2 on two ranks: rank 0 uses its own copy of expert 1, so its map is [0, 1, 3].
    """
    choice = copy_choice(plan.placement, plan.topology)[:, rank]  # (L, E)
    copies = plan.placement.logical_to_physical_map  # (L, E, X)
    hosts = np.where(copies >= 0, copies // plan.placement.experts_per_rank, -1)
    chosen = np.argmax(hosts == choice[:, :, None], axis=2)
    return np.take_along_axis(copies, chosen[..., None], axis=2)[..., 0].astype(np.int64)
