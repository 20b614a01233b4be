"""An uneven all-to-all for DeepSpeed's older `deepspeed.moe.layer.MoE`, in place of equal, padded shares.

The layer pads the rows of every expert to the number of the fullest one, on every rank, so that no placement can save a
byte. Here rows are sent without padding to the ranks where a placement puts their experts.
"""

from typing import Any

import numpy as np
import torch
from deepspeed.module_inject.auto_ep_layer import _AllToAllV, compute_split_plan_from_expert_indices
from deepspeed.moe.layer import MoE
from deepspeed.moe.sharded_moe import MOELayer
from torch import Tensor, nn

from semmoe.core import Placement
from semmoe.engines.deepspeed.placement import exchange_experts
from semmoe.runtime.collectives import Communicator


def uneven_all_to_all(model: nn.Module, placement: Placement | None = None) -> int:
    """Give every `MoE` of a model, whose groups exist, an uneven all-to-all; returns the number of such layers.

    placement: of a plan; None leaves experts where they are. Raises ValueError for layers that drop tokens above a
    capacity: which tokens are dropped would depend on the placement, and outputs would change.
    """
    found = [module.deepspeed_moe for module in model.modules() if isinstance(module, MoE)]
    if placement is not None and len(placement.physical_to_logical_map) != len(found):
        raise ValueError(f"this placement is not for the {len(found)} MoE layers of this model")
    for layer in found:
        _check(layer)
    for index, layer in enumerate(found):
        _convert(layer, None if placement is None else placement.physical_to_logical_map[index])
    return len(found)


def _check(layer: Any) -> None:
    if layer.gate.drop_tokens:
        raise ValueError(
            "this MoE layer drops tokens above its capacity (drop_tokens): a plan would change which ones, and "
            "outputs would change; make it with drop_tokens=False"
        )
    if layer.use_tutel:
        raise ValueError("MoE layers of Tutel have a dispatch of their own: make them with use_tutel=False")


def _convert(layer: Any, held: np.ndarray | None) -> None:
    """Convert one layer; held (P,): the logical expert at each physical position."""
    total = layer.num_local_experts * layer.ep_size
    held = np.arange(total) if held is None else held
    if not np.array_equal(np.sort(held), np.arange(total)):
        raise ValueError("MoE layers hold every expert once: solve without redundant experts")
    rank, size = torch.distributed.get_rank(layer.ep_group), layer.ep_size
    comm, experts = Communicator(layer.ep_group, rank, size), layer.experts.deepspeed_experts
    with torch.no_grad():
        for parameters in zip(*(expert.parameters() for expert in experts), strict=True):
            moved = exchange_experts(comm, torch.stack([p.data for p in parameters]), held.reshape(size, -1))
            for parameter, new in zip(parameters, moved, strict=True):
                parameter.data.copy_(new)
    layer.physical = torch.from_numpy(np.argsort(held)).to(next(experts.parameters()).device)
    layer.__class__ = UnevenMOELayer


class UnevenMOELayer(MOELayer):
    """A MOELayer with an uneven all-to-all; made by `uneven_all_to_all`."""

    physical: Tensor  # (E,) int64: the place of each expert

    def forward(self, *inputs: Tensor, **kwargs: Any) -> Tensor:
        hidden = inputs[0].reshape(-1, inputs[0].shape[-1])  # (S, H)
        used = inputs[1] if len(inputs) > 1 else None
        self.l_aux, _, _, experts, _, weights, self.exp_counts = self.gate(hidden, used, True)  # (K, S) both
        placed = self.physical[experts.T.long()]  # (S, K)
        order = placed.flatten().argsort(stable=True)
        sent = hidden[order // placed.shape[1]]
        results = self._exchange(sent, placed.flatten()[order])
        by_choice = torch.empty_like(results).index_copy(0, order, results).view(*placed.shape, -1)
        return (by_choice * weights.T[..., None].to(by_choice.dtype)).sum(dim=1).view(inputs[0].shape)

    def _exchange(self, rows: Tensor, placed: Tensor) -> Tensor:
        """Exchange rows (M, H) of physical experts placed (M,), in ascending order; returns their results (M, H)."""
        local, size = self.num_local_experts, self.ep_size
        plan = compute_split_plan_from_expert_indices(placed, local * size, size, local, self.ep_group)
        arrived = _AllToAllV.apply(self.ep_group, rows, plan.input_splits, plan.output_splits)
        counts = plan.local_counts_by_source.long()  # (G, E / G)
        expert_of = torch.arange(local, device=rows.device).repeat(size)
        order = expert_of.repeat_interleave(counts.flatten()).argsort(stable=True)
        parts = arrived[order].split(counts.sum(dim=0).tolist())
        computed = [expert(part) for expert, part in zip(self.experts.deepspeed_experts, parts, strict=True)]
        results = torch.empty_like(arrived).index_copy(0, order, torch.cat(computed))
        return _AllToAllV.apply(self.ep_group, results, plan.output_splits, plan.input_splits)
