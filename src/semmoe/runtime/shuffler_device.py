"""`TokenShuffler` on the model's own device: the same slices with static shapes, and without waiting for the device.

An engine may capture its decode passes in a CUDA graph. Inputs are as long as the padded batch; rows of padding come
last and belong to PADDING_SLOT. They score 0 everywhere and lose nothing by moving, so that they make room for tokens
and fill the remaining places: slices are equal, and every slice has its tokens first.

Worked example, two slices, scores [9, 1], [5, 4], [7, 0] and one row of padding: all three tokens want slice 0, which
holds two rows; token 1 loses least by moving: [0, 1, 0, 1], and slice 1 is token 1 and the padding.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from semmoe.core import Plan, TokenPolicy
from semmoe.runtime import scores
from semmoe.runtime.scores import DeviceTables, Turns
from semmoe.runtime.shuffler import by_weight, id_type
from semmoe.runtime.static import StaticHandle, slice_rows, static_handle, triton_kernels
from semmoe.settings import GRANULARITIES
from semmoe.tokens.slices import PathScores

PADDING_SLOT = 0  # padding writes to this slot, which is never read
CHUNK = 4096  # token ids scored at a time when a table is made

# Kinds of policies whose slices are decided on the device layer by layer.
DEVICE_TABLES: dict[str, Callable[[Any, Any], DeviceTables]] = {PathScores.kind: DeviceTables.of}


class DeviceHistory:
    """`semmoe.tokens.slices.History` for a fixed number of slots, at addresses that do not change."""

    def __init__(self, tables: DeviceTables, num_slots: int) -> None:
        layers, _, ranks = tables.history_scores.shape
        self._by = triton_kernels("history", tables.history_scores) or scores
        self._rows, device = tables.history_scores, tables.history_scores.device
        self._running = torch.zeros((layers, num_slots, ranks), dtype=torch.int32, device=device)
        self._previous = torch.zeros_like(self._running)
        self._seen = torch.zeros((layers, num_slots), dtype=torch.int64, device=device)
        self.reset(torch.arange(num_slots, device=device))

    @property
    def num_slots(self) -> int:
        return self._running.shape[1]

    def reset(self, slots: Tensor) -> None:
        for state in (self._running, self._seen):
            state.index_fill_(1, slots, 0)  # a number that is assigned by index is copied from the host on a GPU
        self._previous[:, slots] = self._rows[:, -1:].int()

    def contribution(self, layer: int, slots: Tensor, decoding: Tensor) -> Tensor:
        """(B, G) int32: same as `History.contribution`."""
        return self._by.contribution(self._rows[layer], self._running[layer], self._previous[layer], slots, decoding)

    def observe(self, layer: int, slots: Tensor, expert_ids: Tensor) -> Tensor:
        """Same as `scores.observe`."""
        states = (state[layer] for state in (self._running, self._previous, self._seen))
        return self._by.observe(self._rows[layer], *states, slots, expert_ids)

    def observe_in_turn(self, turns: Turns, expert_ids: Tensor) -> None:
        """Same as `History.observe` at every layer, for several tokens per slot in order. expert_ids: (L, N, K)."""
        self._by.observe_in_turn(self._rows, self._running, self._previous, self._seen, turns, expert_ids)


class DeviceShuffler:
    """Shuffles one attention group's tokens, same as `TokenShuffler`, on tensors of `device`.

    `reserve` allocates the histories, `start` begins a forward pass. Without padding its slices equal those of
    `TokenShuffler`. A pass in which a slot has several tokens (of a prompt) is observed after its last layer. Nothing
    waits for the device, except that observing where Triton is not installed.

    Raises ValueError for the paper's tables with granularity "layer", whose greedy assignment runs on the host.
    """

    def __init__(self, plan: Plan, group: int, rank: int, granularity: str, device: str | torch.device) -> None:
        if granularity not in GRANULARITIES:
            raise ValueError(f"granularity must be {' or '.join(GRANULARITIES)}, not {granularity!r}")
        policy, by_layer = plan.tokens, DEVICE_TABLES.get(plan.tokens.kind)
        if granularity == "layer" and policy.by_tables and by_layer is None:
            raise ValueError(
                f"a plan of method {plan.method!r} has {policy.kind}, whose slices are assigned on the host: "
                "solve one by method semmoe, or shuffle once per batch"
            )
        self.has_tables, self._granularity = policy.by_tables, granularity
        self._shuffle_from = plan.shuffle_from
        self._size, self._rank, self._first = plan.topology.attn_tp_size, rank, group * plan.topology.attn_tp_size
        self._layers, self._top_k, self._id_type = plan.fingerprint.num_layers, plan.fingerprint.top_k, id_type(plan)
        self._tables: DeviceTables | None = None  # for granularity "layer"
        self._of_token: Tensor | None = None  # (V + 1, S) int32, for granularity "batch"
        if granularity == "layer" and by_layer is not None:
            self._tables = by_layer(policy, device)
        elif policy.by_tables:
            self._of_token = _token_table(policy, self._first, self._size, plan.fingerprint.vocab_size).to(device)
        self._history: DeviceHistory | None = None
        where = torch.empty(0, device=device)
        self._scores = triton_kernels("scores", where) or scores
        self._assign = (triton_kernels("assign", where) or scores).assign
        self._turns: Turns | None = None  # if a slot may have several tokens in this pass

    @property
    def uses_history(self) -> bool:
        """Whether every rank must be given the routing of all tokens."""
        return self._tables is not None

    def shuffles(self, num_rows: int) -> bool:
        """Whether a pass over `num_rows` rows, padding included, is shuffled."""
        return num_rows >= self._shuffle_from

    def reserve(self, num_slots: int) -> None:
        """Allocate histories of request slots, PADDING_SLOT included.

        Call it once, before the first pass and any graph.
        """
        if self._tables is not None:
            self._history = DeviceHistory(self._tables, num_slots)

    def follow(self, other: "DeviceShuffler") -> None:
        """Shuffle by the tables of another plan from the next pass on, with histories that begin anew.

        Not for graphs that are captured, which hold the addresses of today's tables.
        """
        self._tables, self._of_token, self._shuffle_from = other._tables, other._of_token, other._shuffle_from
        if self._history is not None:
            self.reserve(self._history.num_slots)

    def start(self, token_ids: Tensor, slots: Tensor | np.ndarray, decoding: Tensor | None, new_slots: Tensor) -> None:
        """Begin a forward pass over N rows, in the order in which the group shares them, padding last.

        slots (N,): the slot of each row's request. decoding (N,) bool: tokens that the model generated, and slots an
        array; None: all of them, at most one per request. new_slots: slots whose request begins in this pass,
        PADDING_SLOT for none.
        """
        if self._history is not None:
            self._history.reset(new_slots)
        in_turn = decoding is not None and self._history is not None
        self._turns = Turns.of(np.asarray(slots), token_ids.device) if in_turn else None
        self._slots = torch.as_tensor(slots, device=token_ids.device)
        self._real = self._slots != PADDING_SLOT
        self._decoding = self._real if decoding is None else decoding
        self._earlier: list[Tensor] = []  # experts (N, K), latest first
        self._of_batch: StaticHandle | None = None
        if self._tables is not None:
            every = range(self._layers)
            self._looked_up = self._scores.look_up_tokens(self._tables, every, self._first, self._size, token_ids)
        elif self._of_token is not None:
            last = len(self._of_token) - 1
            self._looked_up = self._of_token[torch.where((token_ids >= 0) & (token_ids < last), token_ids, last).long()]

    def slices(self, moe_layer: int | None) -> StaticHandle:
        """The slices for one layer: by the tables at MoE layers, by position without tables and at dense layers."""
        if self._of_token is not None:
            if self._of_batch is None:
                found = self._looked_up.masked_fill(~self._real[:, None], 0)
                self._of_batch = self._handle(self._assign(found))
            return self._of_batch
        if self._tables is None or moe_layer is None:
            rows = slice_rows(len(self._slots), self._size)
            return self._handle(torch.arange(len(self._slots), device=self._slots.device) // rows)
        return self._handle(self._assign(self._score(moe_layer)))

    def _score(self, layer: int) -> Tensor:
        assert self._tables is not None
        assert self._history is not None
        earlier = self._earlier[: self._tables.lookback]
        nothing = torch.empty((0, len(self._slots), self._top_k), dtype=self._id_type, device=self._slots.device)
        known = self._history.contribution(layer, self._slots, self._decoding)
        chosen = torch.stack(earlier) if earlier else nothing
        looked_up = self._looked_up[layer]
        return self._scores.score(self._tables, layer, self._first, looked_up, chosen, known, self._real)

    def _handle(self, ranks: Tensor) -> StaticHandle:
        return static_handle(ranks, self._real, self._size, self._rank)

    def by_weight(self, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """(n, K): the experts of this rank's rows by falling weight, in the form that the all-gather sends."""
        return by_weight(expert_ids, weights, self._id_type)

    def observe(self, moe_layer: int, expert_ids: Tensor) -> None:
        """Observe the experts (N, K) of all the group's rows at the MoE layer just computed; padding has any ids."""
        assert self._history is not None
        if self._turns is None:
            seen = self._history.observe(moe_layer, self._slots, expert_ids)
        else:
            seen = expert_ids.masked_fill(~self._real[:, None], 0)
        self._earlier.insert(0, seen)
        if self._turns is not None and moe_layer == self._layers - 1:
            self._history.observe_in_turn(self._turns, torch.stack(self._earlier[::-1]))


def _token_table(policy: TokenPolicy, first_rank: int, num_slices: int, vocab_size: int) -> Tensor:
    """(V + 1, S) int32: `scores_of_tokens` of every token id; the last row is for ids outside the vocabulary."""
    ids = np.append(np.arange(vocab_size), -1)
    parts = [policy.scores_of_tokens(first_rank, num_slices, ids[i : i + CHUNK]) for i in range(0, len(ids), CHUNK)]
    return torch.from_numpy(np.concatenate(parts))
