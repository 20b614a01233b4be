"""The expert all-to-all over gloo as one of vLLM's all-to-all managers: where vLLM runs on a CPU, for vanilla too."""

from typing import Any

import torch
from vllm.distributed import get_ep_group
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import DispatchHandle, combine, dispatch


class GlooAllToAll(All2AllManagerBase):
    """A row goes once to every other rank that holds some of its experts; bytes are counted by receiver.

    vLLM's own on a CPU gathers every row on every rank, so that no placement can save a byte. Expert ids are physical,
    -1 where there is none (padding).
    """

    def __init__(self, cpu_group: Any) -> None:
        super().__init__(cpu_group)
        self.comm: Communicator | None = None
        self._experts_per_rank = 0
        self._handle: DispatchHandle | None = None

    def serve(self, num_experts: int) -> Communicator:
        """To be called once the model is loaded."""
        group = get_ep_group()
        size = group.world_size
        if num_experts % size != 0:
            raise ValueError(f"{num_experts} experts cannot be split evenly over {size} ranks")
        self.comm = Communicator(group.cpu_group, group.rank_in_group, size)
        self._experts_per_rank = num_experts // size
        return self.comm

    def dispatch(
        self,
        hidden_states: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        is_sequence_parallel: bool = False,
        extra_tensors: list[torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert self.comm is not None
        assert extra_tensors is None, "quantised rows are not sent on a CPU"
        ids = topk_ids.long()
        owners = torch.where(ids >= 0, ids // self._experts_per_rank, -1)
        received, self._handle = dispatch(self.comm, hidden_states, ids, topk_weights.float(), owners)
        return received.hidden, received.weights, received.expert_ids.to(topk_ids.dtype)

    def combine(self, hidden_states: torch.Tensor, is_sequence_parallel: bool = False) -> torch.Tensor:
        assert self.comm is not None
        assert self._handle is not None
        return combine(self.comm, hidden_states, self._handle)

    def combine_into_output(
        self, hidden_states: torch.Tensor, output: torch.Tensor, is_sequence_parallel: bool = False
    ) -> torch.Tensor:
        return output.copy_(self.combine(hidden_states, is_sequence_parallel))

    def allocate_combine_input(self, *args: Any, **kwargs: Any) -> None:
        """No memory of its own for the experts' results."""
        return

    def destroy(self) -> None:
        self._handle = None
