"""The expert all-to-all over gloo as one of SGLang's dispatchers: where SGLang runs on CPU, for vanilla too."""

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.distributed import attention_tensor_model_parallel_all_reduce
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import DispatchHandle, combine, dispatch


class GlooDispatcher(BaseDispatcher):
    """A row goes once to every other rank that holds some of its experts; bytes are counted by receiver.

    Expert ids are physical, -1 where there is none (padding). whole: whether every rank has all rows of this pass; then
    nothing is dispatched, and combine is an all-reduce.
    """

    def __init__(self, comm: Communicator, experts_per_rank: int, whole: Callable[[], bool]) -> None:
        super().__init__()
        self.comm = comm
        self._experts_per_rank = experts_per_rank
        self._handle: DispatchHandle | None = None
        self._whole = whole

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        # Ranks without tokens come with other types than those that have some.
        ids, weights = topk_output.topk_ids.long(), topk_output.topk_weights.float()
        owners = torch.where(ids >= 0, ids // self._experts_per_rank, -1)
        first = self.comm.rank * self._experts_per_rank
        if self._whole():
            local = torch.where(owners == self.comm.rank, ids - first, -1)
            return StandardDispatchOutput(hidden_states, None, StandardTopKOutput(weights, local, None))
        received, self._handle = dispatch(self.comm, hidden_states, ids, weights, owners)
        local = torch.where(received.expert_ids >= 0, received.expert_ids - first, -1)
        return StandardDispatchOutput(received.hidden, None, StandardTopKOutput(received.weights, local, None))

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        if self._whole():
            return attention_tensor_model_parallel_all_reduce(combine_input.hidden_states)
        assert self._handle is not None
        return combine(self.comm, combine_input.hidden_states, self._handle)
