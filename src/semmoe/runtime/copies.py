"""Map logical to physical experts on an engine's device: the plan's copy choice for the tokens of a rank.

It depends on a token's expert ids alone, has static shapes, and is registered as an operator of torch, so that engines
may compile or capture what calls it. The operator also counts its choices: numba on a CPU, one kernel on a GPU.
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

    @property
    def tables(self) -> list[Tensor]:
        return [self.ranks, self.physical, self.preferred]

    def to_physical(self, expert_ids: Tensor) -> Tensor:
        """Logical ids (n, K), -1 for none, to physical ids of the same type."""
        nothing = expert_ids.new_empty(0, dtype=torch.int64)
        return place_experts(expert_ids, self.tables, self.source, nothing, self.num_ranks, 1, 1, None)


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
    only = preferred  # of copies on one rank the first
    if placement.copy_choice != "static":
        fixed = False if placement.fixed_copies is None else placement.fixed_copies[:, source]
        only = np.where(fixed, preferred, np.int16(-1))
    allowed = nearest_copies(ranks, source, topology.node_of, only)
    most = int(allowed.sum(axis=2).max())
    first = np.argsort(~allowed, axis=2, kind="stable")[..., :most]
    kept, ranks, physical = (np.take_along_axis(array, first, axis=2) for array in (allowed, ranks, physical))
    tables = np.where(kept, ranks, -1).astype(np.int16), np.where(kept, physical, -1).astype(np.int32)
    layers = (map(torch.from_numpy, layer) for layer in zip(*tables, preferred.astype(np.int16), strict=True))
    return [RankCopies(near, ids, first, source, topology.ep_size) for near, ids, first in layers]


@torch.library.custom_op("semmoe::place_experts", mutates_args=("totals",))
def place_experts(
    expert_ids: Tensor, tables: list[Tensor], source: int,
    totals: Tensor, num_ranks: int, per_rank: int, width: int, real: Tensor | None,
) -> Tensor:  # fmt: skip
    """(n, K) physical ids, which are added to the totals unless these are empty: see `kernels.on_cpu.place`."""
    here = kernels.of(expert_ids.device)
    return here.place(expert_ids, tables, source, totals, num_ranks, per_rank, width, real)


@place_experts.register_fake
def _(expert_ids: Tensor, *others: Any) -> Tensor:
    return torch.empty_like(expert_ids)
