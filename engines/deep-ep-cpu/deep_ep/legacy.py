"""`deep_ep.Buffer`: normal and low-latency mode of V1."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep import low_latency, normal
from deep_ep.checks import check_choices, check_low_latency, check_rows, check_scaled
from deep_ep.counts import Counts, node_size
from deep_ep.events import EventHandle, EventOverlap, hook_of, recorded
from deep_ep.routes import layout

GROUP_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)  # that have a recommended configuration
Rows: TypeAlias = "Tensor | tuple[Tensor, Tensor]"


@dataclass(frozen=True)
class Config:
    """Tuning of kernels, which has no meaning here."""

    num_sms: int = 20
    num_max_nvl_chunked_send_tokens: int = 6
    num_max_nvl_chunked_recv_tokens: int = 256
    num_max_rdma_chunked_send_tokens: int = 6
    num_max_rdma_chunked_recv_tokens: int = 256

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * self.num_max_nvl_chunked_recv_tokens * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * self.num_max_rdma_chunked_recv_tokens * num_ranks


class Buffer:
    num_sms: int = 20

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        assert group is not None and comm is None, "this stand-in needs a process group"
        self.group, self.rank, self.group_size = group, group.rank(), group.size()
        self.num_nvl_bytes, self.num_rdma_bytes = num_nvl_bytes, num_rdma_bytes
        self.low_latency_mode, self.explicitly_destroy = low_latency_mode, explicitly_destroy
        self.counts, self._node_size = Counts(), node_size(self.group_size)
        self._dirty = False  # normal mode has been used, so that low-latency mode needs a clean buffer

    def destroy(self) -> None:
        assert self.explicitly_destroy, "`explicitly_destroy` flag must be set"

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        assert new_num_sms % 2 == 0, "The SM count must be even"
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        return 2 * num_max_dispatch_tokens_per_rank * num_experts * (2 * hidden + 16)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        assert num_ranks in GROUP_SIZES, f"Unsupported number of EP ranks: {num_ranks}"
        return Config(Buffer.num_sms)

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """Tokens by rank, by node (None on one node) and by expert, and (n, R) which ranks a token goes to."""
        check_choices(topk_idx, None, len(topk_idx))
        found = layout(topk_idx, num_experts, self.group_size)
        nodes = normal.nodes_of(found.is_token_in_rank, self._node_size)
        by_node = nodes.sum(0).int() if self._node_size < self.group_size else None
        return (found.num_tokens_per_rank, by_node, found.num_tokens_per_expert, found.is_token_in_rank,
                recorded(async_finish))  # fmt: skip

    def dispatch(
        self,
        x: Rows,
        handle: tuple[Any, ...] | None = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Rows, Tensor | None, Tensor | None, list[int] | None, tuple[Any, ...] | None, EventOverlap]:
        """Rows to the ranks of their experts; expert ids come as the receiver's own numbers, -1 for others'.

        handle: of an earlier dispatch, to send other rows the same way.
        """
        assert num_worst_tokens == 0, "this stand-in always knows how many tokens come"
        tensors = self._rows(x)
        self._dirty = True
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            received, _ = normal.send(self.group, tensors, handle[0], self._node_size, self.counts)
            return self._as_given(x, received), None, None, None, None, recorded(async_finish)
        assert num_tokens_per_rank is not None and is_token_in_rank is not None and num_tokens_per_expert is not None
        assert topk_idx is not None and topk_weights is not None, "rows without choices are not sent here"
        check_choices(topk_idx, topk_weights, len(tensors[0]))
        expected = layout(topk_idx, len(num_tokens_per_expert), self.group_size)
        assert torch.equal(expected.is_token_in_rank, is_token_in_rank), "the layout is not that of these choices"
        received, route = normal.send(self.group, [*tensors, topk_idx, topk_weights], is_token_in_rank,
                                      self._node_size, self.counts)  # fmt: skip
        *rows, ids, weights = received
        ids, weights, per_expert = normal.own_choices(ids, weights, self.rank, len(num_tokens_per_expert),
                                                      self.group_size, expert_alignment)  # fmt: skip
        return self._as_given(x, rows), ids, weights, per_expert, (is_token_in_rank, route), recorded(async_finish)

    def combine(
        self,
        x: Tensor,
        handle: tuple[Any, ...],
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The sum of a token's rows over the ranks that had it, without weights; zeros where it went nowhere."""
        check_rows(x)
        _, route = handle
        out = normal.send_back(self.group, x, route)
        weights = normal.send_back(self.group, topk_weights, route) if topk_weights is not None else None
        return normal.with_bias(out, bias), weights, recorded(async_finish)

    def _rows(self, x: Rows) -> list[Tensor]:
        if isinstance(x, tuple):
            check_scaled(*x)
            return list(x)
        check_rows(x)
        return [x]

    @staticmethod
    def _as_given(x: Rows, rows: list[Tensor]) -> Rows:
        return (rows[0], rows[1]) if isinstance(x, tuple) else rows[0]

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        self._dirty = False

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Rows, Tensor, tuple[Any, ...], EventOverlap, Callable[[], object] | None]:
        """A row for each (token, expert); (E / G, M G, H), of which each expert's first `recv_count` are tokens."""
        assert self.low_latency_mode and not self._dirty, "the buffer must be clean, and made for low latency"
        assert not (async_finish and return_recv_hook)
        check_low_latency(x, topk_idx, num_max_dispatch_tokens_per_rank)
        flight = low_latency.Dispatch(self.group, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts,
                                      low_latency.Cast(use_fp8, round_scale, use_ue8m0), self.counts)  # fmt: skip
        hook = hook_of(lambda: flight.receive(cumulative_local_expert_recv_stats), return_recv_hook)
        return flight.rows, flight.num_received, flight.handle, recorded(async_finish), hook

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: tuple[Any, ...],
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], object] | None]:
        """The weighted sum of a token's rows over its experts."""
        assert not use_logfmt and not zero_copy, "neither LogFMT nor zero copy here"
        check_choices(topk_idx, topk_weights, len(topk_idx))
        summed = low_latency.combine(self.group, x, topk_idx, topk_weights, handle)
        result = out if out is not None else torch.full_like(summed, torch.nan)
        hook = hook_of(lambda: result.copy_(summed), return_recv_hook)
        return result, recorded(async_finish), hook

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """No rank is masked."""
        mask_status.zero_()
