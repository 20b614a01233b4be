"""The expert all-to-all over gloo as one of SGLang's dispatchers: where SGLang runs on CPU, for vanilla too."""

from typing import Any

import torch
from sglang.srt.layers.moe.token_dispatcher.base import BaseDispatcher
from sglang.srt.layers.moe.token_dispatcher.standard import StandardCombineInput, StandardDispatchOutput
from sglang.srt.layers.moe.topk import StandardTopKOutput

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import DispatchHandle, combine, dispatch


class GlooDispatcher(BaseDispatcher):
    """A row goes once to every other rank that holds some of its experts; bytes are counted by receiver.

    Expert ids are physical, -1 where there is none (padding).
    """

    def __init__(self, comm: Communicator, experts_per_rank: int) -> None:
        super().__init__()
        self.comm = comm
        nobody = torch.tensor([-1])  # the last of each table, which -1 indexes
        own = torch.arange(comm.size * experts_per_rank)
        self._owners = torch.cat([own // experts_per_rank, nobody])
        self._local = torch.cat([torch.where(self._owners[:-1] == comm.rank, own % experts_per_rank, -1), nobody])
        self._handle: DispatchHandle | None = None

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> StandardDispatchOutput:
        # Ranks without tokens come with other types than those that have some.
        ids, weights = topk_output.topk_ids.long(), topk_output.topk_weights.float()
        received, self._handle = dispatch(self.comm, hidden_states, ids, weights, self._owners[ids])
        local = self._local[received.expert_ids.long()]
        return StandardDispatchOutput(received.hidden, None, StandardTopKOutput(received.weights, local, None))

    def combine(self, combine_input: StandardCombineInput) -> torch.Tensor:
        assert self._handle is not None
        return combine(self.comm, combine_input.hidden_states, self._handle)
