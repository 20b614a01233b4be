"""Algorithm 3, online: which rank of an attention-TP group each token's row goes to, layer by layer."""

import numpy as np
import torch

from semmoe.assignment import assign_slices, look_up, position_slices
from semmoe.core import Plan, ScoreTables, ShuffleTables, require
from semmoe.metrics import majority_rank
from semmoe.runtime.collectives import ShuffleHandle, shuffle_handle
from semmoe.schedule import device_of_expert
from semmoe.scores import SCALE, History, assign, known_rows, look_up_tokens, score
from semmoe.settings import GRAINS


class TokenShuffler:
    """One attention group's shuffling: looks up the plan's tables and keeps what each token's experts were so far.

    Every rank of the group runs it on the same tokens and so comes to the same slices without a message.
    `start` begins a forward pass and looks its tokens up for all layers, `slices` decides a layer, `by_weight` and
    `observe` carry what was routed. grain "layer" decides every layer anew, as the paper does; "batch" decides once a
    forward pass by the tokens alone, so that nothing need be known of other ranks' routing.
    """

    def __init__(self, plan: Plan, group: int, rank: int, grain: str = "layer") -> None:
        require(grain in GRAINS, f"tokens are shuffled once a {' or '.join(GRAINS)}, not once a {grain!r}")
        self._tables = plan.schedule.shuffle if plan.schedule else None
        self._devices_of_expert = device_of_expert(plan.placement, plan.topology)[:, group]  # (L, E)
        self._id_type = id_type(plan)
        self._top_k = plan.fingerprint.top_k
        self._group, self._rank, self._size = group, rank, plan.topology.attn_tp_size
        self._grain = grain
        self._token_ids = np.zeros(0, np.int64)
        self._looked_up = np.zeros((0, 0, 0), np.int32)  # (L, N, S) of ScoreTables, for all layers before the first
        self._slots, self._decoding = np.zeros(0, np.int64), np.zeros(0, bool)  # (N,)
        self._earlier: list[np.ndarray] = []  # experts (N, K), or for the paper's tables devices (N,), latest first
        self._history: History | None = None
        self._of_batch: ShuffleHandle | None = None

    @property
    def has_tables(self) -> bool:
        return self._tables is not None

    @property
    def uses_history(self) -> bool:
        """Whether every rank must see all tokens' routing."""
        return self.has_tables and self._grain == "layer"

    def start(self, token_ids: np.ndarray, slots: np.ndarray, decoding: np.ndarray, new_slots: np.ndarray) -> None:
        """Begin a forward pass over the tokens (N,), in the order of the rows that the group shares.

        slots (N,): a small number for each token's request, by which its history is kept; decoding (N,) bool: tokens
        that the model itself chose; new_slots: those that begin a request here.
        """
        self._token_ids, self._slots, self._decoding = token_ids, slots, decoding
        self._earlier, self._of_batch = [], None
        if isinstance(self._tables, ScoreTables) and self.uses_history:
            every, first = range(len(self._devices_of_expert)), self._group * self._size
            self._looked_up = look_up_tokens(self._tables, every, first, self._size, token_ids)
            self._history = self._history or History(self._tables, 0)
            self._history.begin(new_slots)

    def slices(self, moe_layer: int | None) -> ShuffleHandle:
        """The slices for one layer: by the tables at MoE layers, by position without tables and at dense layers."""
        if self._grain == "layer" or self._tables is None:
            return self._handle(moe_layer)
        if self._of_batch is None:
            scores = scores_of_tokens(self._tables, self._group, self._size, self._token_ids)
            self._of_batch = shuffle_handle(assign(scores), self._size, self._rank)
        return self._of_batch

    def _handle(self, moe_layer: int | None) -> ShuffleHandle:
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
        known = self._history.contribution(layer, self._slots, self._decoding) if self._decoding.any() else None
        return score(tables, layer, self._group * self._size, self._looked_up[layer], earlier, known)

    def by_weight(self, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """(n, K) each of this rank's tokens' experts by falling weight, as they travel with the all-gather."""
        return by_weight(expert_ids, weights).to(self._id_type)

    def observe(self, moe_layer: int, expert_ids: torch.Tensor) -> None:
        """The experts (N, K) of all the group's tokens at the MoE layer just done."""
        seen = expert_ids.cpu().numpy().astype(np.int64)
        if self._history is not None:
            self._history.observe(moe_layer, self._slots, seen)
            self._earlier.insert(0, seen)
        else:
            self._earlier.insert(0, majority_rank(seen, self._devices_of_expert[moe_layer], self._size))


def id_type(plan: Plan) -> torch.dtype:
    """Of expert ids, as they travel."""
    return torch.uint8 if plan.fingerprint.num_experts <= 256 else torch.int32


def by_weight(expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Expert ids (n, K) by falling weight (n, K)."""
    return torch.gather(expert_ids, 1, weights.argsort(dim=1, descending=True, stable=True))


def scores_of_tokens(
    tables: ScoreTables | ShuffleTables, group: int, num_slices: int, token_ids: np.ndarray
) -> np.ndarray:
    """(N, S) int32: what the tokens alone say, mean over layers."""
    if isinstance(tables, ScoreTables):
        layers = range(len(tables.token_scores))
        looked_up = look_up_tokens(tables, layers, group * num_slices, num_slices, token_ids)
        return (looked_up.sum(axis=0, dtype=np.int64) // len(looked_up)).astype(np.int32)
    rows = known_rows(token_ids, tables.token_ranks.shape[2])
    ranks = tables.token_ranks[:, group, rows, None] == np.arange(num_slices)  # (L, N, S)
    confidence = tables.token_confidence[:, group, rows, None].astype(np.float32)
    return np.rint((ranks * confidence).mean(axis=0) * SCALE).astype(np.int32)
