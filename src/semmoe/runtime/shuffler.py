"""Shuffle tokens by a plan's token policy: choose, layer by layer, the rank of an attention-TP group for each row."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch

from semmoe.core import Plan
from semmoe.methods.paper_policies import PaperTables, assign_slices, device_of_expert, look_up
from semmoe.metrics import majority_rank
from semmoe.runtime.collectives import ShuffleHandle, shuffle_handle
from semmoe.runtime.static import triton_kernels
from semmoe.settings import GRANULARITIES
from semmoe.tokens.slices import (
    ByPosition,
    History,
    PathScores,
    assign,
    look_up_tokens,
    position_slices,
    score,
)


class Shuffler(Protocol):
    """Decides the slices of a group's tokens, on the host (`TokenShuffler`) or on a device (`DeviceShuffler`).

    Arguments are NumPy arrays on the host and tensors on a device; handles are for the collectives of the same kind.
    """

    @property
    def uses_history(self) -> bool:
        """Whether every rank must be given the routing of all tokens by `observe`."""

    def shuffles(self, num_rows: int) -> bool:
        """Whether a pass of the group over `num_rows` rows is shuffled; else its slices are contiguous."""

    def start(self, token_ids: Any, slots: Any, decoding: Any, new_slots: Any) -> None:
        """Begin a forward pass over N tokens; arguments same as in `TokenShuffler.start`."""

    def slices(self, moe_layer: int | None) -> Any:
        """The handle of one layer's slices; moe_layer is None for a dense layer."""

    def by_weight(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, K): expert ids by falling weight, in the form that the all-gather sends."""

    def observe(self, moe_layer: int, expert_ids: torch.Tensor) -> None:
        """Observe the experts (N, K) that all tokens chose at the MoE layer just computed."""


class TokenState(Protocol):
    """A token policy's state during a forward pass, equal on all ranks of the group."""

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Begin a forward pass; arguments same as in `TokenShuffler.start`."""

    def slices(self, moe_layer: int) -> np.ndarray:
        """(N,) int16: the slice of each token at a MoE layer."""

    def observe(self, moe_layer: int, expert_ids: np.ndarray) -> None:
        """Observe the experts (N, K) int64 that the tokens chose at a MoE layer, by falling weight."""


class PositionState:
    """Slices by position, which do not depend on the tokens."""

    def __init__(self, policy: ByPosition, plan: Plan, group: int) -> None:
        self._size, self._num_tokens = plan.topology.attn_tp_size, 0

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Begin a forward pass; only the number of tokens matters."""
        self._num_tokens = len(token_ids)

    def slices(self, moe_layer: int) -> np.ndarray:
        """(N,) int16."""
        return position_slices(self._num_tokens, self._size)

    def observe(self, moe_layer: int, expert_ids: np.ndarray) -> None:
        """Ignore the experts: slices by position do not depend on them."""


class PathState:
    """Slices by scores from token ids, experts at earlier layers, and experts of the request's earlier tokens."""

    def __init__(self, policy: PathScores, plan: Plan, group: int) -> None:
        self._policy, self._top_k = policy, plan.fingerprint.top_k
        self._size, self._first = plan.topology.attn_tp_size, group * plan.topology.attn_tp_size
        self._history = History(policy, 0)
        # (L, N, S), computed for all layers before the first layer runs
        self._looked_up = np.zeros((0, 0, 0), np.int32)
        self._slots, self._decoding = np.zeros(0, np.int64), np.zeros(0, bool)  # (N,)
        self._earlier: list[np.ndarray] = []  # experts (N, K), latest first

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Look the tokens up for all layers, and begin the histories of new requests."""
        self._slots, self._decoding, self._earlier = slots, decoding, []
        layers = range(len(self._policy.token_shift))
        self._looked_up = look_up_tokens(self._policy, layers, self._first, self._size, token_ids)
        self._history.begin(new_slots)

    def slices(self, moe_layer: int) -> np.ndarray:
        """(N,) int16."""
        nothing = np.empty((0, len(self._slots), self._top_k), np.int64)
        planes = self._earlier[: self._policy.lookback]
        earlier = np.stack(planes) if planes else nothing
        known = self._history.contribution(moe_layer, self._slots, self._decoding) if self._decoding.any() else None
        return assign(score(self._policy, moe_layer, self._first, self._looked_up[moe_layer], earlier, known))

    def observe(self, moe_layer: int, expert_ids: np.ndarray) -> None:
        """Observe the experts (N, K), which count for later layers and later tokens."""
        self._history.observe(moe_layer, self._slots, expert_ids)
        self._earlier.insert(0, expert_ids)


class PaperState:
    """Slices by Algorithm 3, from token ids and the devices of the tokens' experts at earlier layers."""

    def __init__(self, policy: PaperTables, plan: Plan, group: int) -> None:
        self._policy, self._group, self._size = policy, group, plan.topology.attn_tp_size
        self._devices_of_expert = device_of_expert(plan.placement, plan.topology)[:, group]  # (L, E)
        self._token_ids = np.zeros(0, np.int64)
        self._devices: list[np.ndarray] = []  # (N,) devices, latest first

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Begin a forward pass; requests have no effect."""
        self._token_ids, self._devices = token_ids, []

    def slices(self, moe_layer: int) -> np.ndarray:
        """(N,) int16."""
        lookback = self._policy.lookback
        history = np.stack(self._devices[:lookback], axis=1) if moe_layer >= lookback else None
        return assign_slices(look_up(self._policy, moe_layer, self._group, self._token_ids, history), self._size)

    def observe(self, moe_layer: int, expert_ids: np.ndarray) -> None:
        """Observe the experts (N, K), whose devices count for later layers."""
        self._devices.insert(0, majority_rank(expert_ids, self._devices_of_expert[moe_layer], self._size))


STATES: dict[str, Callable[[Any, Plan, int], TokenState]] = {
    ByPosition.kind: PositionState,
    PathScores.kind: PathState,
    PaperTables.kind: PaperState,
}


class TokenShuffler:
    """Shuffles one attention group's tokens: the decisions of the plan's token policy as handles of shuffled
    collectives.

    Every rank of the group runs it on the same tokens and so computes the same slices without communication.
    `start` begins a forward pass and looks up its tokens for all layers, `slices` decides one layer, `by_weight` and
    `observe` pass on the routing. With granularity "layer" every layer is decided anew, as in the paper; with "batch"
    the slices are decided once per forward pass from the tokens alone, so that no rank needs other ranks' routing.
    """

    def __init__(self, plan: Plan, group: int, rank: int, granularity: str = "layer") -> None:
        self._shuffle_from, self._shuffled = plan.shuffle_from, False
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be {' or '.join(GRANULARITIES)}, not {granularity!r}")
        self._policy, self._granularity = plan.tokens, granularity
        self._state = STATES[plan.tokens.kind](plan.tokens, plan, group)
        self._id_type = id_type(plan)
        self._rank, self._size = rank, plan.topology.attn_tp_size
        self._first = group * self._size
        self._token_ids = np.zeros(0, np.int64)
        self._of_batch: ShuffleHandle | None = None

    @property
    def has_tables(self) -> bool:
        """Whether slices depend on the tokens."""
        return self._policy.by_tables

    @property
    def uses_history(self) -> bool:
        """Whether every rank must be given the routing of all tokens."""
        return self.has_tables and self._granularity == "layer"

    def shuffles(self, num_rows: int) -> bool:
        """Whether a pass over `num_rows` rows is shuffled; else its slices are contiguous."""
        return num_rows >= self._shuffle_from

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Begin a forward pass over the tokens (N,), in the order of the rows that the group shares.

        slots (N,): a small number of each token's request, under which its history is kept. decoding (N,) bool: tokens
        that the model generated. new_slots: slots whose request begins in this pass.
        """
        self._token_ids, self._of_batch = token_ids, None
        self._shuffled = self.shuffles(len(token_ids))
        if self._shuffled and self.uses_history:
            self._state.start(token_ids, slots, decoding, new_slots)

    def slices(self, moe_layer: int | None) -> ShuffleHandle:
        """The slices for one layer: by the policy at MoE layers, by position at dense layers."""
        if not self._shuffled:
            return self._contiguous()
        if self.has_tables and self._granularity == "batch":
            self._of_batch = self._of_batch or self._handle(self._slices_of_batch())
            return self._of_batch
        if moe_layer is None or not self.has_tables:
            return self._contiguous()
        return self._handle(self._state.slices(moe_layer))

    def _contiguous(self) -> ShuffleHandle:
        return self._handle(position_slices(len(self._token_ids), self._size))

    def _slices_of_batch(self) -> np.ndarray:
        return assign(self._policy.scores_of_tokens(self._first, self._size, self._token_ids))

    def _handle(self, slices: np.ndarray) -> ShuffleHandle:
        return shuffle_handle(slices, self._size, self._rank)

    def by_weight(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, K): the experts of this rank's tokens by falling weight, in the form that the all-gather sends."""
        return by_weight(expert_ids, weights, self._id_type)

    def observe(self, moe_layer: int, expert_ids: torch.Tensor) -> None:
        """Observe the experts (N, K) of all the group's tokens at the MoE layer just computed."""
        self._state.observe(moe_layer, expert_ids.cpu().numpy().astype(np.int64))


def id_type(plan: Plan) -> torch.dtype:
    """The integer type in which expert ids are sent between ranks: uint8 for at most 256 experts, else int32."""
    return torch.uint8 if plan.fingerprint.num_experts <= 256 else torch.int32


def by_weight(expert_ids: torch.Tensor, weights: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Expert ids (n, K) by falling weight (n, K), in type `kind`; of equal weights the first comes first."""
    if (kernels := triton_kernels("history", expert_ids)) is not None:
        return kernels.by_weight(expert_ids, weights, kind)
    return torch.gather(expert_ids, 1, weights.argsort(dim=1, descending=True, stable=True)).to(kind)
