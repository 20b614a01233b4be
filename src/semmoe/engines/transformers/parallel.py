"""Expert parallelism on a plan, attached to a model without changing its code.

`exchange="all-to-all"` runs every decoder layer as described in `planned`. "all-reduce" is expert parallelism without
all-to-all, the baseline for attention-TP: every rank computes its own experts for all rows, and two all-reduces sum the
results.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from semmoe.core import Plan
from semmoe.costs.metrics import Traffic, no_traffic
from semmoe.engines.transformers.attention import shard_attention
from semmoe.engines.transformers.model import decoder_layers, moe_block, moe_layers
from semmoe.engines.transformers.planned import PlannedModel, check_layout, mixer
from semmoe.runtime.agreement import check_agreement
from semmoe.runtime.collectives import Communicator, timed
from semmoe.runtime.dispatch import ReceivedTokens, combine, dispatch

EXCHANGES = ("all-to-all", "all-reduce")


class LocalExperts:
    """This rank's experts of a layer: the model's own experts module, cut to the experts held by this rank."""

    def __init__(self, experts: nn.Module, held: np.ndarray) -> None:
        """held: (P / G,) logical ids of this rank's physical experts, in slot order."""
        index = torch.from_numpy(held.astype(np.int64))
        for name, parameter in list(experts.named_parameters(recurse=False)):
            if parameter.shape[0] != experts.num_experts:
                raise ValueError(f"parameter {name} of {type(experts).__name__} has no expert dimension")
            setattr(experts, name, nn.Parameter(parameter.data[index.to(parameter.device)], requires_grad=False))
        experts.num_experts = self.size = len(held)
        self._compute = experts.forward
        self.weights = [parameter.data for _, parameter in experts.named_parameters(recurse=False)]

    def __call__(self, hidden: torch.Tensor, physical: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(M, H), (M, K) physical ids (-1: not here), (M, K) -> (M, H), summed over the choices that are held here."""
        rows, choices = (physical >= 0).nonzero(as_tuple=True)
        out = torch.zeros_like(hidden)
        if len(rows):
            slots = physical[rows, choices] % self.size
            pairs = self._compute(hidden[rows], slots[:, None], weights[rows, choices][:, None])
            out.index_add_(0, rows, pairs)
        return out


class ParallelModel(PlannedModel):
    """One rank's part of a model: attach with the constructor, then run forwards."""

    def __init__(
        self,
        model: PreTrainedModel,
        plan: Plan,
        experts_comm: Communicator,
        attention_comm: Communicator,
        exchange: str = "all-to-all",
    ) -> None:
        check_agreement(experts_comm.group, {"the plan": plan, "exchange": exchange}, model.device)
        super().__init__(model, plan, experts_comm, attention_comm)
        self._share = plan.placement.experts_per_rank
        self._reduces = exchange == "all-reduce"
        if self._reduces:
            self.copies = self._copies_for(plan, 0)  # one rank's view, so that each pair is computed once
        self.reset_counts()
        self._attach()

    def _attach(self) -> None:
        blocks = moe_layers(self.model)
        physical = self.plan.placement.physical_to_logical_map.reshape(len(blocks), self.comm.size, -1)
        self.experts = [LocalExperts(b.experts, physical[i, self.comm.rank]) for i, b in enumerate(blocks)]
        run_layer = self._layer_all_reduce if self._reduces else self._layer_all_to_all
        run_experts = self._expert_all_reduce if self._reduces else self._expert_all_to_all
        moe_index = {id(block): i for i, block in enumerate(blocks)}
        for layer in decoder_layers(self.model):
            check_layout(layer)
            shard_attention(mixer(layer), self.attention_comm.rank, self.attention_comm.size)
            index = moe_index.get(id(moe_block(layer)))
            layer.forward = partial(run_layer, layer, index)
            if index is not None:
                blocks[index].experts.forward = partial(run_experts, index)

    @property
    def traffic(self) -> list[Traffic]:
        counted = super().traffic
        return [replace(no_traffic(self.comm.size), load=one.load) for one in counted] if self._reduces else counted

    def serve_others(self, index: int) -> None:
        self._expert_all_to_all(index, *self._no_tokens())

    def _expert_all_to_all(self, index: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor):
        """Replaces the experts' forward: hidden (n, H), ids (n, K), weights (n, K) -> (n, H)."""
        self.rows.observe(expert_ids, weights)
        physical = self._counters[index].place(self.copies[index], expert_ids, self._share)
        received, handle = dispatch(self.comm, hidden, physical, weights, physical // self._share)
        return combine(self.comm, self._compute(index, received), handle)

    def _compute(self, index: int, rows: ReceivedTokens) -> torch.Tensor:
        with timed(self.compute_seconds, "experts"):
            return self.experts[index](rows.hidden, rows.expert_ids, rows.weights)

    def _layer_all_reduce(self, layer: nn.Module, index: int | None, hidden_states: torch.Tensor, **kwargs):
        attended, passed_on = self._attend(layer, hidden_states, **kwargs)
        stream = self._real(hidden_states) + self.attention_comm.all_reduce(self._real(attended))
        return self._returned(hidden_states, self._feed_forward(layer, index, stream), passed_on)

    def _expert_all_reduce(self, index: int, hidden: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor):
        physical = self.copies[index].to_physical(expert_ids)
        mine = torch.where(physical // self._share == self.comm.rank, physical, -1)
        self._counters[index].count(mine, self._share)
        return self.comm.all_reduce(self._compute(index, ReceivedTokens(hidden, mine, weights)))
