"""Load experts into the plan's slots: vLLM reads each by its logical id, and the plan says which slots it fills.

Nothing else in vLLM changes: a layer has E + R physical experts, in order on the ranks.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor

from semmoe.core import Plan

PACKED = {f"{part}_{what}" for part in ("w13", "w2") for what in ("weight", "bias", "weight_scale", "weight_packed")}
LAYER = re.compile(r"\.(\d+)\.")


class PlacedExperts:
    """Wraps the construction and loading of a model's MoE layers in one process."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.by_engine = False
        self._made: set[int] = set()  # the model's decoder layers with experts
        self._places: dict[int, int] = {}  # index among the MoE layers by decoder layer, once weights are loaded
        self._loaded: dict[int, set[int]] = {}  # by decoder layer: the physical experts that were loaded
        self._slots: list[list[np.ndarray]] = []  # by layer and logical expert

    def counts(self, original: Callable[..., Any], num_experts: int, num_redundant: int, *others: Any) -> Any:
        """Wraps vLLM's numbers of physical, logical and fused shared experts of a layer."""
        physical, logical, shared = original(num_experts, num_redundant, *others)
        if self._places:  # a draft model is made after the model was loaded
            return physical, logical, shared
        if num_redundant != 0:
            raise ValueError("vLLM's own redundant experts cannot be used beside a plan's")
        if shared:
            raise ValueError("vLLM fuses a shared expert with the others here, which a plan cannot place")
        return physical + self.plan.placement.redundant_experts, logical, shared

    def made(self, layer_name: str) -> None:
        if not self._places:
            self._made.add(layer_index(layer_name))

    def load(
        self,
        original: Callable[..., Any],
        experts: Any,
        param: Any,
        loaded_weight: Tensor,
        weight_name: str,
        shard_id: str,
        expert_id: int,
        return_success: bool = False,
    ) -> Any:
        """Load one tensor of logical expert `expert_id` into all its slots; vLLM skips those of other ranks."""
        index = layer_index(experts.layer_name)
        self._begin()
        if index not in self._places or self.by_engine:
            return original(experts, param, loaded_weight, weight_name, shard_id, expert_id, return_success)
        if loaded_weight.dim() >= 3 and not shard_id.startswith("gpt_oss"):  # whose scales by block have three, too
            raise ValueError(
                f"{weight_name} holds all experts of a layer at once: give vLLM a checkpoint made by "
                "`semmoe apply`, without --plan"
            )
        if expert_id >= self.plan.fingerprint.num_experts:
            return False if return_success else None  # what vLLM regards as copies of the first experts
        done = False
        for slot in self._slots[self._places[index]][expert_id]:
            self._loaded.setdefault(index, set()).add(int(slot))
            done |= bool(original(experts, param, loaded_weight, weight_name, shard_id, int(slot), True))
        return done if return_success else None

    def load_unpacked(self, original: Callable[..., Any], experts: Any, *args: Any, **named: Any) -> Any:
        """Wraps gpt-oss's loader of an expert, which passes unknown tensors on to the general loader."""
        call = inspect.signature(original).bind(experts, *args, **named).arguments
        if str(call["shard_id"]).startswith("gpt_oss"):
            return self.load(original, *call.values())
        return original(experts, *args, **named)

    @contextmanager
    def without_plan(self) -> Iterator[None]:
        """Load as vLLM does without a plan: every logical expert to the slot of its number."""
        self.by_engine = True
        yield
        self.by_engine = False

    def _begin(self) -> None:
        """Number the MoE layers, all of which exist before the first weight is loaded."""
        if self._places:
            return
        number = self.plan.fingerprint.num_layers
        if len(self._made) != number:
            raise ValueError(f"the model has {len(self._made)} MoE layers, the plan was made for {number}")
        self._places = {index: place for place, index in enumerate(sorted(self._made))}
        for row in self.plan.placement.physical_to_logical_map:
            self._slots.append([np.flatnonzero(row == e) for e in range(self.plan.fingerprint.num_experts)])

    def check(self) -> None:
        """Raise ValueError unless every expert went through `load`."""
        wanted = self.plan.placement.physical_to_logical_map.shape[1]
        for index in self._places or self._made:
            found = len(self._loaded.get(index, ()))
            if found != wanted:
                raise ValueError(
                    f"this model's loader placed {found} of {wanted} experts of layer {index} by the "
                    "plan: give vLLM a checkpoint made by `semmoe apply`, without --plan"
                )


def refuse_reload(original: Callable[..., Any], runner: Any, *args: Any, **named: Any) -> None:
    """Refuse to load weights again: on a CPU vLLM 0.32.0 then loads wrong experts, so a plan's cannot be verified."""
    raise ValueError("weights cannot be loaded again into an engine on a plan: start it again")


def unpacked(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]]) -> Any:
    """Split gpt-oss's tensors, which hold all experts of a layer; vLLM also loads single experts by numbered names."""
    return original(model, (part for name, weight in weights for part in _experts(name, weight)))


def _experts(name: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Split a tensor (E, ...) of a layer into the tensors of its experts."""
    head, found, tail = name.partition(".mlp.experts.")
    if not found or tail.split(".")[0].isdigit():
        yield name, weight
        return
    if tail not in PACKED:
        raise ValueError(f"{name} cannot be placed: give vLLM a checkpoint made by `semmoe apply`, without --plan")
    for expert, part in enumerate(weight):
        yield f"{head}.mlp.experts.{expert}.{tail}", part


def layer_index(layer_name: str) -> int:
    """The index of the decoder layer in a module's name."""
    found = LAYER.search(layer_name)
    if found is None:
        raise ValueError(f"{layer_name} names no decoder layer")
    return int(found[1])
