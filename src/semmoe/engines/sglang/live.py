"""Experts and tables of SGLang's layers on one rank, changed by swaps of the plan.

A control message that every rank gets in the same turn of its loop arms the swap; steps follow at the ends of passes.
Weights move by SGLang's own exchange of a layer's experts, and its maps change in place, as its load balancer does it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sglang.srt.eplb.expert_location import ExpertLocationMetadata
from sglang.srt.eplb.expert_location_updater import update_expert_weights_single_layer
from sglang.srt.managers.scheduler_components.internal_state import UpdateRejected, _UpdateHandler
from sglang.srt.runtime_context import get_parallel, get_resources

from semmoe.core import Plan
from semmoe.engines.absent import NoShuffle
from semmoe.engines.sglang.location import ChosenCopies
from semmoe.engines.sglang.shuffle import BoundaryShuffle
from semmoe.engines.sglang.targets import LAYERS, REQUESTS, SWAP
from semmoe.io.bounds import MOST_LAYERS
from semmoe.live.status import MOST_NUMBER
from semmoe.live.swap import NoSwapper, Swapper

UNSEEN = ("correction_bias",)  # parameters of a layer that belong to no slot


class LiveExperts:
    """layers: the model's decoder layers with experts, which `blocks` are; see `semmoe.live.swap.Experts`.

    captured: whether graphs hold the addresses of tables.
    """

    def __init__(
        self,
        runner: Any,
        blocks: dict[int, Any],
        copies: ChosenCopies,
        shuffle: BoundaryShuffle | NoShuffle,
        captured: bool,
    ) -> None:
        self._config, self._captured = runner.model_config, captured
        self._layers, self._blocks = sorted(blocks), [blocks[layer] for layer in sorted(blocks)]
        self._copies, self._shuffle = copies, shuffle
        self._location: Any = None  # of the prepared plan
        self._buffer: list[torch.Tensor] = []

    def prepare(self, plan: Plan) -> None:
        """Make SGLang's maps, the copy choice, the shuffler and the buffer; see `Experts`."""
        parallel, now = get_parallel(), get_resources().expert_location_metadata
        if dist.get_world_size() != parallel.moe_ep_size:
            raise ValueError("experts move among all of SGLang's ranks, but here only some ranks hold experts")
        placed = now.physical_to_logical_map_cpu.clone()
        placed[self._layers] = torch.from_numpy(plan.placement.physical_to_logical_map).to(placed)
        self._location = ExpertLocationMetadata.init_by_mapping(self._config, placed, moe_ep_rank=parallel.moe_ep_rank)
        self._copies.prepare(plan, self._captured)
        self._shuffle.prepare(plan)
        self._buffer = [torch.empty_like(weight) for weight in self.weights(0)]

    def weights(self, layer: int) -> Sequence[torch.Tensor]:
        """The parameters of a layer that have a row for each slot."""
        block = self._blocks[layer]
        named = {name: value.data for name, value in block.named_parameters() if name not in UNSEEN}
        odd = [name for name, value in named.items() if value.dim() == 0 or len(value) != block.num_local_experts]
        if odd:
            raise ValueError(f"{odd[0]} of layer {self._layers[layer]} has no row for each expert, and cannot move")
        return list(named.values())

    def move(self, layer: int, old: np.ndarray, new: np.ndarray) -> None:
        """Move a layer's experts by SGLang's own exchange, over its default process group."""
        parallel, weights = get_parallel(), self.weights(layer)
        update_expert_weights_single_layer(
            routed_experts_weights=list(weights), temp_buffers=self._buffer, old_physical_to_logical_map=old.tolist(),
            new_physical_to_logical_map=new.tolist(), num_local_physical_experts=len(weights[0]),
            num_gpu_per_node=dist.get_world_size() // parallel.nnodes, rank=parallel.moe_ep_rank,
            world_size=dist.get_world_size(),
        )  # fmt: skip

    def commit(self, layers: Sequence[int]) -> None:
        """SGLang's maps, and then the copy choice, which these overwrite."""
        decoder = [self._layers[layer] for layer in layers]
        get_resources().expert_location_metadata.update(self._location, update_layer_ids=decoder)
        self._copies.commit(decoder)

    def finish(self) -> None:
        """The token tables, where tokens are shuffled."""
        self._copies.finish()
        self._shuffle.switch()
        self._buffer = []


class Orders:
    """Takes the swaps that reach a scheduler's process as settings of its internal state."""

    def __init__(self, swapper: Callable[[], Swapper | NoSwapper]) -> None:
        self._swapper, self._layers = swapper, 0

    def handlers(self, original: Any, controller: Any) -> dict[str, Any]:
        """Wraps the table of what `/set_internal_state` can set."""
        return original(controller) | {
            LAYERS: _UpdateHandler(self._check_layers, self._set_layers),
            SWAP: _UpdateHandler(self._check, self._arm),
            REQUESTS: _UpdateHandler(self._check_number, lambda key, value: None),  # the controller's
        }

    def _check_layers(self, key: str, value: Any) -> None:
        if not (isinstance(value, int) and 0 <= value <= MOST_LAYERS):
            raise UpdateRejected(f"{key} must lie between 0 and {MOST_LAYERS}, not {value}")

    def _set_layers(self, key: str, value: int) -> None:
        self._layers = value

    def _check_number(self, key: str, value: Any) -> None:
        if not (isinstance(value, int) and 0 < value <= MOST_NUMBER):
            raise UpdateRejected(f"{value} is not a plan's number")

    def _check(self, key: str, value: Any) -> None:
        self._check_number(key, value)
        if get_parallel().enable_dp_attention_local_control_broadcast:
            raise UpdateRejected(
                "with --enable-dp-attention-local-control-broadcast ranks do not get an order between the same passes"
            )
        swapper = self._swapper()
        if isinstance(swapper, NoSwapper) or swapper.busy:
            raise UpdateRejected(f"no swap now: {swapper.refusal}")

    def _arm(self, key: str, value: int) -> None:
        self._swapper().arm(value, self._layers)
