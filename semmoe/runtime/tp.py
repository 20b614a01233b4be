"""Algorithm 3, online: which rank of an attention-TP group each token's row goes to, layer by layer."""

import numpy as np
import torch

from semmoe.assignment import assign_slices, look_up, position_slices
from semmoe.core import Plan
from semmoe.metrics import majority_rank
from semmoe.runtime.collectives import ShuffleHandle, shuffle_handle
from semmoe.schedule import device_of_expert

NO_DEVICE = 255


class TokenShuffler:
    """One attention group's shuffling: looks up the plan's tables and keeps each token's devices at earlier layers.

    Every rank of the group runs it on the same tokens and so comes to the same slices without a message.
    `start` begins a forward pass, `slices` decides a layer, `devices` and `observe` carry what was routed.
    """

    def __init__(self, plan: Plan, group: int, rank: int) -> None:
        self._tables = plan.schedule.shuffle if plan.schedule else None
        self._devices_of_expert = device_of_expert(plan.placement, plan.topology)[:, group]  # (L, E)
        assert plan.topology.attn_tp_size <= NO_DEVICE, "devices travel as bytes"
        self._group, self._rank, self._size = group, rank, plan.topology.attn_tp_size
        self._token_ids = np.zeros(0, np.int64)
        self._history: list[np.ndarray] = []  # devices (N,) of the MoE layers so far, most recent first

    @property
    def uses_history(self) -> bool:
        return self._tables is not None

    def start(self, token_ids: np.ndarray) -> None:
        """Begin a forward pass over the tokens (N,), in the order of the rows that the group shares."""
        self._token_ids = token_ids
        self._history = []

    def slices(self, moe_layer: int | None) -> ShuffleHandle:
        """The slices for one layer: by the tables at MoE layers, by position without tables and at dense layers."""
        if self._tables is None or moe_layer is None:
            ranks = position_slices(len(self._token_ids), self._size)
        else:
            lookback = self._tables.lookback
            known = moe_layer >= lookback
            history = np.stack(self._history[:lookback], axis=1) if known else None
            preference = look_up(self._tables, moe_layer, self._group, self._token_ids, history)
            ranks = assign_slices(preference, self._size)
        return shuffle_handle(torch.from_numpy(ranks.astype(np.int64)), self._size, self._rank)

    def devices(self, moe_layer: int, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n,) uint8: the device of each of this rank's tokens by its true routing, NO_DEVICE if its group has none.

        Travels with the all-gather, a byte a token.
        """
        by_weight = torch.gather(expert_ids, 1, weights.argsort(dim=1, descending=True, stable=True))
        experts = by_weight.cpu().numpy()
        devices = majority_rank(experts, self._devices_of_expert[moe_layer], self._size)
        return torch.from_numpy(np.where(devices < 0, NO_DEVICE, devices).astype(np.uint8))

    def observe(self, devices: torch.Tensor) -> None:
        """The devices (N,) of all the group's tokens at the MoE layer just done."""
        seen = devices.cpu().numpy().astype(np.int16)
        self._history.insert(0, np.where(seen == NO_DEVICE, -1, seen))
