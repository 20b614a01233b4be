"""Prove that a family of models which no test has run is served on a plan as the engine serves it without one.

The engine loads the weights twice: as it does without a plan, and by the plan. Then every slot must hold, bit for bit,
what the engine made of the slot's expert without the plan. Any loader that places experts by itself is found so.

    proof.load(model, load, without_plan)    # calls load twice, once inside the context without_plan()
    proof.check()                            # once the model is loaded
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from semmoe.core import Plan
from semmoe.live.canary import by_expert, check_slots, checksums, of_all_slots

MOST_SUMMED = 1 << 22  # elements of a weight that are summed at once
BY_EXPERT = ("correction_bias",)  # parameters of an expert layer whose rows are logical experts, not slots


class Proof:
    """The proof that a rank makes, together with all other ranks of the plan.

    experts: the engine's expert layers by decoder layer. group: a process group of the CPU over all ranks.
    """

    def __init__(self, plan: Plan, experts: Callable[[nn.Module], Mapping[int, nn.Module]], group: Callable[[], Any]):
        self._plan = plan
        self._experts, self._group = experts, group
        self.done = False

    def load(
        self, model: nn.Module, load: Callable[[], Any], without_plan: Callable[[], AbstractContextManager]
    ) -> Any:
        """Load the model twice and compare; returns what `load` returned. Raises ValueError if weights differ.

        A later call, such as that of a draft model, loads once.
        """
        if self.done:
            return load()
        found = self._experts(model)
        layers = [found[layer] for layer in sorted(found)]
        if len(layers) != self._plan.fingerprint.num_layers:
            raise ValueError(
                f"{type(model).__name__} has {len(layers)} layers of the engine's fused experts, and the checkpoint "
                f"has {self._plan.fingerprint.num_layers} layers with experts"
            )
        with without_plan():
            load()
        expected, others = [self._slots(layer) for layer in layers], self._others(model, layers)
        out = load()
        for index, layer in enumerate(layers):
            self._compare(index, expected[index], self._slots(layer))
        if not torch.equal(self._others(model, layers), others):
            raise ValueError("weights that belong to no slot are not the same after a second load")
        self.done = True
        return out

    def check(self) -> None:
        """Raise ValueError unless the weights were compared."""
        if not self.done:
            raise ValueError("the weights were not loaded by the engine's default loader: omit --load-format")

    def _slots(self, layer: nn.Module) -> Tensor:
        """(P, W * 2): the checksums of all ranks' slots of an expert layer."""
        slots = by_slot(layer, self._plan.placement.experts_per_rank)
        if not slots:
            raise ValueError(f"{type(layer).__name__} has no weight with a row for each of this rank's slots")
        return of_all_slots(checksums(slots), self._group())

    def _others(self, model: nn.Module, layers: Sequence[nn.Module]) -> Tensor:
        """The checksums of this rank's weights that belong to no slot."""
        slots = {slot.data_ptr() for layer in layers for slot in by_slot(layer, self._plan.placement.experts_per_rank)}
        others = [weight.data for weight in model.parameters() if weight.data_ptr() not in slots]
        return checksums([part[None] for other in others for part in other.reshape(-1).split(MOST_SUMMED)])

    def _compare(self, index: int, expected: Tensor, found: Tensor) -> None:
        num_experts = self._plan.fingerprint.num_experts
        vanilla = by_expert(expected[:num_experts], np.arange(num_experts), num_experts)
        if len(vanilla.unique(dim=0)) < num_experts:
            raise ValueError(f"some experts of MoE layer {index} have equal weights, by which nothing is proven")
        experts = self._plan.placement.physical_to_logical_map[index]
        check_slots(found, vanilla, experts, "the engine's without a plan")


def by_slot(layer: nn.Module, num_slots: int) -> list[Tensor]:
    """The parameters of an expert layer with a row for each of this rank's slots."""
    return [
        value.data
        for name, value in layer.named_parameters()
        if value.dim() > 0 and len(value) == num_slots and not any(part in name for part in BY_EXPERT)
    ]


def check_sizes(layers: Sequence[Any], top_k: str, plan: Plan) -> None:
    """Raise ValueError unless each expert layer has the plan's sizes; top_k: the attribute of experts per token."""
    planned = plan.placement.physical_to_logical_map.shape[1], plan.fingerprint.top_k
    for index, layer in enumerate(layers):
        found = layer.num_experts, getattr(layer, top_k)
        if found != planned:
            raise ValueError(f"MoE layer {index} has {found} (physical experts, top-k), the plan has {planned}")


def check_routing(place: int, expert_ids: Tensor, plan: Plan) -> None:
    """Raise ValueError unless a layer's logical ids (n, K) are the plan's; an engine may number further experts."""
    highest = int(expert_ids.max()) if expert_ids.numel() else 0
    if highest >= plan.fingerprint.num_experts:
        raise ValueError(f"MoE layer {place} routes to expert {highest}, the plan has {plan.fingerprint.num_experts}")
