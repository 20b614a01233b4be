"""Map logical to physical experts on an engine's device: the plan's copy choice for the tokens of a rank.

A pure function of a token's expert ids with static shapes, registered as an operator of torch, so that engines may
compile or capture what calls it. numba runs it on the CPU, one Triton program per token on a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semmoe.core import Plan
from semmoe.runtime import kernels
from semmoe.tokens.copychoice import nearest_copies, preferred_copies


@dataclass(frozen=True)
class RankCopies:
    """The copies of a layer's experts that tokens on one rank may use."""

    ranks: Tensor  # (E, X) int16: the rank of each copy, padded with -1
    physical: Tensor  # (E, X) int32: their physical ids
    preferred: Tensor  # (E,) int16: the rank whose copy is used first
    source: int
    num_ranks: int

    def to(self, device: Any) -> "RankCopies":
        tables = {name: getattr(self, name).to(device) for name in ("ranks", "physical", "preferred")}
        return replace(self, **tables)

    def padded(self, width: int) -> "RankCopies":
        """Return the same choice in tables of at least `width` copies (X), the width that a captured graph reads."""
        missing = max(width - self.ranks.shape[1], 0)
        ranks, physical = (torch.nn.functional.pad(t, (0, missing), value=-1) for t in (self.ranks, self.physical))
        return replace(self, ranks=ranks, physical=physical)

    def become(self, other: "RankCopies") -> None:
        """Take over another choice with tables of the same shapes, at the same addresses."""
        for name in ("ranks", "physical", "preferred"):
            getattr(self, name).copy_(getattr(other, name))

    def first(self) -> Tensor:
        """(E,) int32: the physical id of each expert's preferred copy.

        Worked example, experts 0 1 | 1 2 on two ranks: rank 0 uses its own copy of expert 1, so these are [0, 1, 3].
        """
        column = (self.ranks == self.preferred[:, None]).int().argmax(dim=1, keepdim=True)
        return self.physical.gather(1, column)[:, 0]

    def to_physical(self, expert_ids: Tensor) -> Tensor:
        """Logical ids (n, K), -1 for none, to physical ids of the same type."""
        if self.ranks.shape[1] == 1 and expert_ids.is_cpu:
            ids = expert_ids.long()
            return torch.where(ids >= 0, self.physical[:, 0][ids.clamp(min=0)], -1).to(expert_ids.dtype)
        tables = self.ranks, self.physical, self.preferred
        return torch.ops.semmoe.cover_copies(expert_ids, *tables, self.source, self.num_ranks)


def take_over(old: Sequence[RankCopies], new: Sequence[RankCopies], captured: bool) -> list[RankCopies]:
    """What to install in place of `old`: the choices of `new`, layer by layer, in tables of at least the old shapes.

    captured: whether a graph may hold the addresses of the old tables. Raises ValueError if they are too small then.
    """
    out = [layer.to(own.ranks.device).padded(own.ranks.shape[1]) for own, layer in zip(old, new, strict=True)]
    larger = [layer.ranks.shape[1] for own, layer in zip(old, out, strict=True) if own.ranks.shape != layer.ranks.shape]
    if larger and captured:
        most = old[0].ranks.shape[1]
        raise ValueError(f"captured graphs choose among {most} copies of an expert at most, the plan among {larger[0]}")
    return out


def rank_copies(plan: Plan, source: int) -> list[RankCopies]:
    """The copies that tokens on rank `source` may use, layer by layer; with a static choice one of each expert."""
    placement, topology = plan.placement, plan.topology
    preferred = preferred_copies(placement, topology)[:, source]  # (L, E)
    physical = placement.logical_to_physical_map  # (L, E, X)
    ranks = placement.ranks_with_copies
    if placement.copy_choice == "static":
        allowed = ranks == preferred[..., None]
        allowed &= np.cumsum(allowed, axis=2) == 1  # the first of two copies on a rank
    else:
        allowed = nearest_copies(ranks, source, topology.node_of)
    most = int(allowed.sum(axis=2).max())
    first = np.argsort(~allowed, axis=2, kind="stable")[..., :most]
    kept, ranks, physical = (np.take_along_axis(array, first, axis=2) for array in (allowed, ranks, physical))
    tables = np.where(kept, ranks, -1).astype(np.int16), np.where(kept, physical, -1).astype(np.int32)
    layers = (map(torch.from_numpy, layer) for layer in zip(*tables, preferred.astype(np.int16), strict=True))
    return [RankCopies(near, ids, first, source, topology.ep_size) for near, ids, first in layers]


@torch.library.custom_op("semmoe::cover_copies", mutates_args=())
def cover_copies(
    expert_ids: Tensor, ranks: Tensor, physical: Tensor, preferred: Tensor, source: int, num_ranks: int
) -> Tensor:
    """(n, K) physical ids by the rule `cover`, -1 for ids of -1, in their type: see `kernels.on_cpu.cover_copies`."""
    found = kernels.of(expert_ids.device).cover_copies(expert_ids, ranks, physical, preferred, source, num_ranks)
    return found.to(expert_ids.dtype)


@cover_copies.register_fake
def _(expert_ids: Tensor, ranks: Tensor, physical: Tensor, preferred: Tensor, source: int, num_ranks: int) -> Tensor:
    return torch.empty_like(expert_ids)
