"""Low-latency mode: a row for each (token, expert), into slots of a fixed number for each expert."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.checks import BLOCK
from deep_ep.counts import PAIRS, Counts
from deep_ep.exchange import exchange
from deep_ep.scales import as_exponents, cast, column_major


@dataclass(frozen=True)
class Cast:
    """How rows travel: as they are, or as float8 with scales."""

    to_float8: bool
    round_scale: bool
    exponents: bool


class Dispatch:
    """Everything is received at once, but stands in `rows` only after `receive`."""

    def __init__(
        self, group: dist.ProcessGroup, x: Tensor, ids: Tensor, most: int, num_experts: int, how: Cast, counts: Counts
    ) -> None:
        ranks, self._how = group.size(), how
        assert not how.exponents or how.round_scale, "exponents need rounded scales"
        self._size, capacity = num_experts // ranks, most * ranks
        tokens, choices = (ids >= 0).nonzero(as_tuple=True)
        experts = ids[tokens, choices]
        assert bool((experts < num_experts).all()), f"an expert id beyond {num_experts} experts"
        order = torch.argsort(experts, stable=True)
        tokens, experts = tokens[order], experts[order]
        sent = torch.bincount(experts // self._size, minlength=ranks).tolist()
        counts.add(PAIRS, sum(sent) - sent[group.rank()])
        travelling = list(cast(x, how.round_scale)) if how.to_float8 else [x]
        self._received, came = exchange(
            group, [t[tokens] for t in (*travelling, torch.arange(len(x)))] + [experts], sent
        )
        self._came, self._rank = came, group.rank()
        self._slots, self._src, self._ranges = self._place(capacity)
        self.rows = self._empty(capacity, x)
        self.num_received = torch.full((self._size,), -1, dtype=torch.int32)
        self.handle: tuple[Any, ...] = (self._src, self._ranges, most, x.shape[1], num_experts)

    def _place(self, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
        """The slot of each received row, the source token of each slot, and (E / G, G) where each rank's begin."""
        *_, tokens, experts = self._received
        local, ranks = experts - self._rank * self._size, len(self._came)
        source = torch.repeat_interleave(torch.arange(ranks), torch.tensor(self._came))
        per = torch.bincount(local * ranks + source, minlength=self._size * ranks).view(self._size, ranks)
        begin = per.cumsum(1) - per
        order = torch.argsort(local * ranks + source, stable=True)
        inner = torch.empty_like(local)
        flat = per.flatten()
        inner[order] = torch.arange(len(local)) - (flat.cumsum(0) - flat).repeat_interleave(flat)
        slots = local * capacity + begin[local, source] + inner
        src = torch.full((self._size * capacity,), -1, dtype=torch.int32)
        src[slots] = tokens.int()
        return slots, src.view(self._size, capacity), begin << 32 | per

    def _empty(self, capacity: int, x: Tensor) -> Any:
        """Slots that hold nothing that may be read."""
        shape = (self._size, capacity, x.shape[1])
        if not self._how.to_float8:
            return torch.full(shape, torch.nan, dtype=x.dtype)
        scales = shape[2] // BLOCK
        rows = torch.full(shape, torch.nan).to(torch.float8_e4m3fn)
        if self._how.exponents:
            return rows, column_major(torch.full((*shape[:2], scales // 4), -1, dtype=torch.int32))
        return rows, column_major(torch.full((*shape[:2], scales), torch.nan))

    def receive(self, statistics: Tensor | None) -> None:
        """Write what came into the slots, and count it."""
        rows, *scales, _, _ = self._received
        target = self.rows[0] if self._how.to_float8 else self.rows
        where = (self._slots // target.shape[1], self._slots % target.shape[1])
        as_bytes = torch.uint8 if self._how.to_float8 else target.dtype  # float8 cannot be indexed as it is
        target.view(as_bytes)[where] = rows.view(as_bytes)
        if scales:
            self.rows[1][where] = as_exponents(scales[0]) if self._how.exponents else scales[0]
        per = (self._ranges & 0xFFFFFFFF).sum(1)
        self.num_received.copy_(per)
        if statistics is not None:
            statistics += per.to(statistics.dtype)


def combine(group: dist.ProcessGroup, x: Tensor, ids: Tensor, weights: Tensor, handle: tuple[Any, ...]) -> Tensor:
    """Send results (E / G, M G, H) back, and sum each token's by its weights (n, K), in float32."""
    src, ranges, most, hidden, _ = handle
    size, ranks = src.shape[0], group.size()
    assert x.shape == (size, most * ranks, hidden), f"results must be {(size, most * ranks, hidden)}, not {x.shape}"
    begin, per = ranges >> 32, ranges & 0xFFFFFFFF
    picked = [x[e, begin[e, r] : begin[e, r] + per[e, r]] for r in range(ranks) for e in range(size)]
    (back,), _ = exchange(group, [torch.cat(picked)], per.sum(0).tolist())
    tokens, choices = (ids >= 0).nonzero(as_tuple=True)
    order = torch.argsort(ids[tokens, choices], stable=True)
    tokens, choices = tokens[order], choices[order]
    out = torch.zeros(len(ids), hidden, dtype=torch.float32)
    return out.index_add_(0, tokens, back.float() * weights[tokens, choices, None]).to(x.dtype)
