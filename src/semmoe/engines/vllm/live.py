"""Experts and copy choice of vLLM's layers on one rank, changed by swaps of the plan.

Weights move by vLLM's own rearrangement, as its load balancer moves them, layer by layer.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from vllm.distributed import get_ep_group
from vllm.distributed.eplb.eplb_communicator import TorchDistNcclEplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace

from semmoe.core import Plan
from semmoe.engines import supervisor
from semmoe.engines.absent import NoShuffle
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.registry import add
from semmoe.engines.vllm.routing import RoutedLayer
from semmoe.engines.vllm.shuffle import LayerShuffle
from semmoe.live.swap import NoSwapper, SwapError, Swapper
from semmoe.runtime.copies import RankCopies, rank_copies, take_over


class LiveExperts:
    """blocks: vLLM's expert layers in order; routed: their hooks. source: the rank whose copy choice is used.

    captured: whether graphs hold the addresses of tables.
    """

    def __init__(
        self,
        blocks: Sequence[Any],
        routed: Sequence[RoutedLayer],
        source: int,
        shuffle: LayerShuffle | NoShuffle,
        captured: bool,
    ) -> None:
        self._blocks, self._routed = blocks, routed
        self._source = source
        self._shuffle, self._captured = shuffle, captured
        self._copies: list[RankCopies] = []  # of the prepared plan, by layer
        self._buffer: list[Tensor] = []

    def prepare(self, plan: Plan) -> None:
        """Make the copy choice, the shuffler and the buffer; see `Experts`."""
        old = [layer.copies for layer in self._routed if layer.copies is not None]
        self._copies = take_over(old, rank_copies(plan, self._source), self._captured)
        self._shuffle.prepare(plan)
        self._buffer = [torch.empty_like(weight) for weight in self.weights(0)]

    def weights(self, layer: int) -> Sequence[Tensor]:
        """vLLM's own view of a layer's weights, (P / G, -1) each."""
        return [weight.data for weight in self._blocks[layer].routed_experts.get_expert_weights()]

    def move(self, layer: int, old: np.ndarray, new: np.ndarray) -> None:
        """By vLLM's rearrangement; its communicator for NCCL is plain torch and runs on gloo, too."""
        group = get_ep_group()
        channel = group.cpu_group if self.weights(layer)[0].device.type == "cpu" else group.device_group
        maps = (torch.from_numpy(row.astype(np.int64))[None] for row in (old, new))
        mover = TorchDistNcclEplbCommunicator(channel)
        rearrange_expert_weights_inplace(*maps, [self.weights(layer)], self._buffer, channel, mover)

    def commit(self, layers: Sequence[int]) -> None:
        """The copy choice alone: a physical id tells vLLM the rank and the slot."""
        for layer in layers:
            self._routed[layer].use(self._copies[layer])

    def finish(self) -> None:
        """The token tables, where tokens are shuffled."""
        self._shuffle.switch()
        self._buffer = []


def offer(rank: Any, folder: Path) -> None:
    """Give vLLM's workers the methods that the endpoint calls on all workers; rank: the plug-in of this process."""
    add(targets.WORKER, targets.ARM, lambda worker, number, layers: rank.swapper.arm(number, layers))
    add(targets.WORKER, targets.READY, lambda worker: rank.swapper.ready)
    add(targets.WORKER, targets.STATE, lambda worker: rank.swapper.status.model_dump())
    add(targets.WORKER, targets.STEP, lambda worker: step_or_end(rank.swapper, folder))


def step_or_end(swapper: Swapper | NoSwapper, folder: Path) -> dict[str, Any]:
    """A step of a swap, after whose failure nothing may be served: vLLM ends its other processes when this one ends."""
    try:
        swapper.step()
    except SwapError as error:
        supervisor.report(folder, str(error))
        os._exit(1)
    return swapper.status.model_dump()
