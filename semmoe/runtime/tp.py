"""Algorithm 3, online: which rank of an attention-TP group each token's row goes to, layer by layer."""

import numpy as np
import torch

from semmoe.assignment import assign_slices, look_up, position_slices
from semmoe.core import Plan, ScoreTables
from semmoe.metrics import majority_rank
from semmoe.runtime.collectives import ShuffleHandle, shuffle_handle
from semmoe.schedule import device_of_expert
from semmoe.scores import History, assign, look_up_tokens, score


class TokenShuffler:
    """One attention group's shuffling: looks up the plan's tables and keeps what each token's experts were so far.

    Every rank of the group runs it on the same tokens and so comes to the same slices without a message.
    `start` begins a forward pass and looks its tokens up for all layers, `slices` decides a layer, `by_weight` and
    `observe` carry what was routed.
    """

    def __init__(self, plan: Plan, group: int, rank: int) -> None:
        self._tables = plan.schedule.shuffle if plan.schedule else None
        self._devices_of_expert = device_of_expert(plan.placement, plan.topology)[:, group]  # (L, E)
        self._id_type = torch.uint8 if plan.fingerprint.num_experts <= 256 else torch.int32  # as ids travel
        self._top_k = plan.fingerprint.top_k
        self._group, self._rank, self._size = group, rank, plan.topology.attn_tp_size
        self._token_ids = np.zeros(0, np.int64)
        self._looked_up = np.zeros((0, 0, 0), np.int32)  # (L, N, S) of ScoreTables, for all layers before the first
        self._requests = np.zeros(0, np.int64)
        self._decoding = False
        self._earlier: list[np.ndarray] = []  # experts (N, K), or for the paper's tables devices (N,), latest first
        self._history: History | None = None

    @property
    def uses_history(self) -> bool:
        return self._tables is not None

    def start(self, token_ids: np.ndarray, requests: np.ndarray, num_requests: int, prefill: bool) -> None:
        """Begin a forward pass over the tokens (N,), in the order of the rows that the group shares.

        requests (N,): each token's request among the `num_requests` that run together; a prefill begins new ones.
        """
        self._token_ids, self._requests, self._decoding = token_ids, requests, not prefill
        self._earlier = []
        if isinstance(self._tables, ScoreTables):
            every, first = range(len(self._devices_of_expert)), self._group * self._size
            self._looked_up = look_up_tokens(self._tables, every, first, self._size, token_ids)
            if prefill:
                self._history = History(self._tables, num_requests)

    def slices(self, moe_layer: int | None) -> ShuffleHandle:
        """The slices for one layer: by the tables at MoE layers, by position without tables and at dense layers."""
        if self._tables is None or moe_layer is None:
            ranks = position_slices(len(self._token_ids), self._size)
        elif isinstance(self._tables, ScoreTables):
            ranks = assign(self._scores(self._tables, moe_layer))
        else:
            lookback = self._tables.lookback
            known = moe_layer >= lookback
            history = np.stack(self._earlier[:lookback], axis=1) if known else None
            ranks = assign_slices(look_up(self._tables, moe_layer, self._group, self._token_ids, history), self._size)
        return shuffle_handle(ranks, self._size, self._rank)

    def _scores(self, tables: ScoreTables, layer: int) -> np.ndarray:
        nothing = np.empty((0, len(self._token_ids), self._top_k), np.int64)
        earlier = np.stack(self._earlier[: tables.lookback]) if self._earlier and tables.lookback else nothing
        assert self._history is not None
        known = self._history.contribution(layer, self._requests) if self._decoding else None
        return score(tables, layer, self._group * self._size, self._looked_up[layer], earlier, known)

    def by_weight(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, K) each of this rank's tokens' experts by falling weight, as they travel with the all-gather."""
        return torch.gather(expert_ids, 1, weights.argsort(dim=1, descending=True, stable=True)).to(self._id_type)

    def observe(self, moe_layer: int, expert_ids: torch.Tensor) -> None:
        """The experts (N, K) of all the group's tokens at the MoE layer just done."""
        seen = expert_ids.cpu().numpy().astype(np.int64)
        if self._history is not None:
            self._history.observe(moe_layer, self._requests, seen)
            self._earlier.insert(0, seen)
        else:
            self._earlier.insert(0, majority_rank(seen, self._devices_of_expert[moe_layer], self._size))
