"""`deep_ep.ElasticBuffer` of V2: one row to each rank, in DeepEP's two layouts."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import normal
from deep_ep.checks import check_choices, check_rows, check_scaled
from deep_ep.counts import Counts, node_size
from deep_ep.events import EventHandle, EventOverlap, recorded
from deep_ep.routes import aligned, layout, local_ids

Rows: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


@dataclass
class EPHandle:
    """What combine needs of a dispatch; the fields that engines read have DeepEP's names."""

    do_expand: bool
    num_experts: int
    expert_alignment: int
    num_max_tokens_per_rank: int
    topk_idx: Tensor
    num_recv_tokens: int
    num_expanded_tokens: int
    num_recv_tokens_per_expert_list: list[int]
    psum_num_recv_tokens_per_scaleup_rank: Tensor  # (G,) int32, inclusive
    psum_num_recv_tokens_per_expert: Tensor  # (E / G,) int32
    num_unaligned_recv_tokens_per_expert: Tensor | None  # (E / G,) int32, in the expanded layout
    route: normal.Route
    slots: Tensor | None  # (m, K) int64: the expanded slot of each choice of a row, -1 for none


class ElasticBuffer:
    def __init__(
        self,
        group: dist.ProcessGroup,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        self.group, self.rank_idx, self.num_ranks = group, group.rank(), group.size()
        self.num_max_tokens_per_rank, self.explicitly_destroy = num_max_tokens_per_rank, explicitly_destroy
        self.num_bytes = num_bytes or num_max_tokens_per_rank * self.num_ranks * hidden * 2
        self.counts = Counts()
        # Without hybrid mode rows go to ranks of other nodes themselves.
        self._node_size = node_size(self.num_ranks) if allow_hybrid_mode else self.num_ranks

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"

    def dispatch(
        self,
        x: Rows,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Rows to the ranks of their experts: as they come, or one for each choice, grouped by expert (`do_expand`).

        Without `do_cpu_sync` as many rows are returned as could have come at most.
        """
        assert handle is None, "cached handles are not used by engines, and not built here"
        assert topk_idx is not None and topk_weights is not None and num_experts is not None
        rows: list[Tensor] = list(x) if isinstance(x, tuple) else [x]
        check_scaled(*x) if isinstance(x, tuple) else check_rows(x)
        check_choices(topk_idx, topk_weights, len(rows[0]))
        most = num_max_tokens_per_rank or self.num_max_tokens_per_rank
        assert len(rows[0]) <= most, f"{len(rows[0])} tokens, at most {most} can be sent"
        inside = layout(topk_idx, num_experts, self.num_ranks).is_token_in_rank
        sent = [*rows, topk_idx, topk_weights]
        received, route = normal.send(self.group, sent, inside, self._node_size, self.counts)
        *rows, ids, weights = received
        own = local_ids(ids, self.rank_idx, num_experts // self.num_ranks)
        arrived = _Arrived(rows, own, torch.where(own >= 0, weights, 0.0), expert_alignment or 1)
        psum = self._by_source(route)
        capacity = None if do_cpu_sync or do_cpu_sync is None else most * self.num_ranks
        num_local = num_experts // self.num_ranks
        laid = arrived.expanded(num_local, capacity) if do_expand else arrived.as_they_came(num_local, capacity)
        told = EPHandle(
            do_expand, num_experts, expert_alignment or 1, most, topk_idx.clone(), len(own), len(laid.rows[0]),
            laid.aligned.tolist() if capacity is None else [], psum, laid.psum, laid.counts if do_expand else None,
            route, laid.slots,
        )  # fmt: skip
        if cumulative_local_expert_recv_stats is not None:
            cumulative_local_expert_recv_stats += laid.counts
        out = (laid.rows[0], laid.rows[1]) if isinstance(x, tuple) else laid.rows[0]
        return out, laid.ids, laid.weights, told, recorded(async_with_compute_stream)

    def _by_source(self, route: normal.Route) -> Tensor:
        """(G,) int32: rows of the ranks up to each, whose last is all of them."""
        source = route.sources
        return torch.bincount(source, minlength=self.num_ranks).cumsum(0).int()

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sum of a token's rows, without weights; in the expanded layout those of its choices first."""
        check_rows(x)
        rows = x[: handle.num_recv_tokens] if handle.slots is None else _summed(x, handle.slots)
        out = normal.send_back(self.group, rows, handle.route)
        return normal.with_bias(out, bias), None, recorded(async_with_compute_stream)


@dataclass(frozen=True)
class _Laid:
    """Rows in a layout; ids only where rows stand as they came."""

    rows: list[Tensor]
    ids: Tensor | None
    weights: Tensor
    counts: Tensor  # (E / G,) int32, by expert
    aligned: Tensor
    psum: Tensor
    slots: Tensor | None


@dataclass(frozen=True)
class _Arrived:
    rows: list[Tensor]
    own: Tensor  # (m, K) this rank's numbers of experts, -1 for others'
    weights: Tensor
    alignment: int

    def as_they_came(self, num_local: int, capacity: int | None) -> _Laid:
        counts = torch.bincount(self.own[self.own >= 0], minlength=num_local).int()
        up, size = aligned(counts, self.alignment), capacity or len(self.own)
        # What lies behind the rows may be anything: a valid expert, for one.
        ids = _padded(self.own, size, 0)
        return _Laid([_padded(t, size) for t in self.rows], ids, _padded(self.weights, size), counts, up,
                     up.cumsum(0).int(), None)  # fmt: skip

    def expanded(self, num_local: int, capacity: int | None) -> _Laid:
        counts = torch.bincount(self.own[self.own >= 0], minlength=num_local).int()
        up = aligned(counts, self.alignment)
        begin = up.cumsum(0) - up
        rows, choices = (self.own >= 0).nonzero(as_tuple=True)
        experts = self.own[rows, choices]
        order = torch.argsort(experts, stable=True)
        inner = torch.empty_like(experts)
        inner[order] = torch.arange(len(order)) - (counts.cumsum(0) - counts).repeat_interleave(counts)
        places = begin[experts] + inner
        slots = torch.full_like(self.own, -1)
        slots[rows, choices] = places
        size = int(up.sum()) if capacity is None else capacity * self.own.shape[1] + num_local * (self.alignment - 1)
        filled = [_filled(t[rows], places, size) for t in self.rows]
        weights = _filled(self.weights[rows, choices], places, size)
        return _Laid(filled, None, weights, counts, up, (begin + counts).int(), slots)


def _padded(x: Tensor, size: int, value: float = torch.nan) -> Tensor:
    return _filled(x, torch.arange(len(x)), size, value)


def _filled(x: Tensor, places: Tensor, size: int, value: float = torch.nan) -> Tensor:
    """Rows at their places of (size, ...), between which lies what may not be read."""
    out = torch.full((size, *x.shape[1:]), value if x.is_floating_point() else 0, dtype=torch.float32).to(x.dtype)
    as_bytes = torch.uint8 if x.dtype == torch.float8_e4m3fn else x.dtype  # which cannot be indexed as they are
    out.view(as_bytes)[places] = x.view(as_bytes)
    return out


def _summed(x: Tensor, slots: Tensor) -> Tensor:
    """Rows (m, H), each the sum in float32 of those in its slots (m, K)."""
    rows, choices = (slots >= 0).nonzero(as_tuple=True)
    out = torch.zeros(len(slots), x.shape[1], dtype=torch.float32)
    return out.index_add_(0, rows, x[slots[rows, choices]].float()).to(x.dtype)
