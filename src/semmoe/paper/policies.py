"""The paper's two policies: the tables of Algorithms 2 and 3, and the decisions from them (section 3.3, appendix B).

Row V of every table with V + 1 rows is for token ids outside the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.core import NEIGHBOUR, PRIOR, Evidence, Placement, Plan, RoutingTrace
from semmoe.costs.metrics import majority_rank
from semmoe.io.bounds import Checked, Declared, number
from semmoe.numeric.jit import njit
from semmoe.requests.scheduler import RequestScheduler
from semmoe.tokens.slices import slice_size
from semmoe.topology import Fingerprint, Topology
from semmoe.traces.affinity import known_rows

MAX_PATHS = 1 << 20  # most rows of A


@dataclass(frozen=True, kw_only=True)
class PaperTable:
    """Attention-DP: the table T that Algorithm 2 sums over a prompt's tokens."""

    kind: ClassVar[str] = "paper-table"
    by_tables: ClassVar[bool] = True
    request_scores: np.ndarray  # T, (V + 1, D) float32: group shares of each token
    request_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """What each array must be."""
        V = fingerprint.vocab_size
        return {
            "request_scores": Declared((V + 1, topology.dp_size), np.float32, 0, 1),
            "request_source": Declared((V + 1,), np.uint8, 0, NEIGHBOUR),
        }

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: ids for which only the prior is known."""
        return self.request_source[token_ids] == PRIOR


class PaperScheduler(RequestScheduler):
    """Algorithm 2: schedules requests to attention-DP groups by the summed group shares of their prompt's tokens.

    In every round of D requests each group gets one. The paper prints the mask inverted (its line 4): here the groups
    already used in a round are excluded.
    """

    def __init__(self, policy: PaperTable) -> None:
        super().__init__(policy.request_scores.shape[1])
        self._scores = policy.request_scores
        self._unknown = policy.request_source == PRIOR
        self._used = np.zeros(self._groups, bool)

    def choose(self, prompt_ids: np.ndarray) -> int:
        """Return the group for a request. Ids outside the vocabulary use the prior and are counted."""
        rows = known_rows(prompt_ids, len(self._scores))
        self.unknown_tokens += int(self._unknown[rows].sum())
        if self._used.all():
            self._used[:] = False
        group = int(np.argmax(np.where(self._used, -np.inf, self._scores[rows].sum(axis=0))))
        self._used[group] = True
        return group


@dataclass(frozen=True, kw_only=True)
class PaperTables(Checked):
    """Attention-TP: the tables in which Algorithm 3 looks up the rank, inside a group, that hosts a token's experts."""

    kind: ClassVar[str] = "paper-tables"
    by_tables: ClassVar[bool] = True
    token_ranks: np.ndarray  # T, (L, D, V + 1) int16
    token_confidence: np.ndarray  # T_p, (L, D, V + 1) float16
    path_ranks: np.ndarray  # A, (L, D, S ** lookback) int16
    path_confidence: np.ndarray  # A_p, (L, D, S ** lookback) float16
    token_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR
    lookback: int = number(..., 1, 20)

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """What each array must be; raises ValueError for a look-back that does not fit."""
        L, V = fingerprint.num_layers, fingerprint.vocab_size
        D, S = topology.dp_size, topology.attn_tp_size
        if not S**self.lookback <= MAX_PATHS:
            raise ValueError(f"lookback {self.lookback} is out of range")
        tokens, paths = (L, D, V + 1), (L, D, S**self.lookback)
        return {
            "token_ranks": Declared(tokens, np.int16, 0, S - 1),
            "token_confidence": Declared(tokens, np.float16, 0, 1),
            "path_ranks": Declared(paths, np.int16, 0, S - 1),
            "path_confidence": Declared(paths, np.float16, 0, 1),
            "token_source": Declared((V + 1,), np.uint8, 0, NEIGHBOUR),
        }

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: tokens for which only the prior is known."""
        return self.token_source[token_ids] == PRIOR

    def evidence(self, trace: RoutingTrace, plan: Plan, group: np.ndarray, decoding: bool) -> Iterator[Evidence]:
        """Yield for each layer the preferred ranks of each token (Algorithm 3, line 2); `decoding` has no effect."""
        devices = np.empty((trace.num_tokens, trace.fingerprint.num_layers), np.int16)
        for d in range(plan.topology.dp_size):
            rows = group == d
            devices[rows] = token_devices(trace.expert_ids[rows], plan.placement, plan.topology, d)
        for l in range(trace.fingerprint.num_layers):
            history = devices[:, l - self.lookback : l][:, ::-1] if l >= self.lookback else None
            yield look_up(self, l, group, trace.token_ids, history)


@dataclass(frozen=True)
class Preference:
    """First and second preference of each of B tokens, as ranks inside the group; -1 means no preference."""

    first: np.ndarray  # (B,) int16
    first_confidence: np.ndarray  # (B,) float32
    second: np.ndarray  # (B,) int16
    second_confidence: np.ndarray  # (B,) float32

    def __getitem__(self, rows: np.ndarray) -> "Preference":
        return Preference(
            self.first[rows], self.first_confidence[rows], self.second[rows], self.second_confidence[rows]
        )

    def slices(self, rows: np.ndarray, num_slices: int) -> np.ndarray:
        """(B,) slices of the tokens `rows` (B,), of equal size."""
        return assign_slices(self[rows], num_slices)

    def expected_local(self, rows: np.ndarray, slices: np.ndarray) -> float:
        """Return 0, since preferences do not predict a number of pairs."""
        return 0.0


def look_up(
    tables: PaperTables, layer: int, group: np.ndarray | int, token_ids: np.ndarray, history: np.ndarray | None
) -> Preference:
    """Algorithm 3, line 2: the more confident of T (by token id) and A (by the token's devices at earlier layers).

    group: the attention group, or (B,) the group of each token. token_ids: (B,). history: (B, lookback) devices, most
    recent layer first, or None before there is a full history, where T alone is used.
    """
    rows = known_rows(token_ids, tables.token_ranks.shape[2])
    by_token = tables.token_ranks[layer, group, rows]
    token_confidence = tables.token_confidence[layer, group, rows].astype(np.float32)
    if history is None:
        nothing = np.full(len(token_ids), -1, np.int16)
        return Preference(by_token, token_confidence, nothing, np.zeros(len(token_ids), np.float32))
    path = path_key(history, slices_of(tables))
    by_path = tables.path_ranks[layer, group, path]
    path_confidence = tables.path_confidence[layer, group, path].astype(np.float32)
    token_wins = token_confidence > path_confidence
    return Preference(
        np.where(token_wins, by_token, by_path),
        np.maximum(token_confidence, path_confidence),
        np.where(token_wins, by_path, by_token),
        np.minimum(token_confidence, path_confidence),
    )


def slices_of(tables: PaperTables) -> int:
    """Ranks inside a group, from the shape of A."""
    return round(tables.path_ranks.shape[2] ** (1 / tables.lookback))


def path_key(history: np.ndarray, num_ranks: int) -> np.ndarray:
    """(B,) int64: the row of A for each device sequence (B, lookback); the most recent device is the lowest digit.

    Device -1, which means that none of the token's experts is in its group, is treated as device 0.
    """
    return np.maximum(history, 0).astype(np.int64) @ num_ranks ** np.arange(history.shape[1])


def assign_slices(preference: Preference, num_slices: int) -> np.ndarray:
    """(B,) int16: the slice of each token; slices are equal. Source: Algorithm 3, `group_by_key` and `align`.

    A slice keeps its most confident tokens up to its size; the others, by falling confidence, go to their second
    choice if it has room, and otherwise to any free slot. Worked example, two slices for four tokens that prefer
    slices 0, 0, 0, 1 with confidence .9, .5, .7, .6: slice 0 keeps tokens 0 and 2, token 1 moves, so [0, 1, 0, 1].
    """
    tokens = len(preference.first)
    by_first = np.argsort(-preference.first_confidence, kind="stable")
    by_second = np.argsort(-preference.second_confidence, kind="stable")
    size = slice_size(tokens, num_slices)
    return _fill_slices(preference.first, by_first, preference.second, by_second, num_slices, size)


@njit()
def _fill_slices(first, by_first, second, by_second, num_slices, size):
    out = np.full(first.shape[0], -1, np.int16)
    room = np.full(num_slices, size, np.int64)
    for choice, order in ((first, by_first), (second, by_second)):
        for t in order:
            if out[t] < 0 and choice[t] >= 0 and room[choice[t]] > 0:
                out[t] = choice[t]
                room[choice[t]] -= 1
    free = 0
    for t in range(first.shape[0]):
        if out[t] < 0:
            while room[free] == 0:
                free += 1
            out[t] = free
            room[free] -= 1
    return out


def token_devices(expert_ids: np.ndarray, placement: Placement, topology: Topology, group: int) -> np.ndarray:
    """(T, L) int16: the rank inside `group` that hosts most of a token's experts at each layer, -1 if none does."""
    S = topology.attn_tp_size
    ranks = device_of_expert(placement, topology)[:, group]
    layers = range(expert_ids.shape[1])
    return np.stack([majority_rank(expert_ids[:, l], ranks[l], S) for l in layers], axis=1)


def device_of_expert(placement: Placement, topology: Topology) -> np.ndarray:
    """(L, D, E) int16: the lowest rank inside group d that hosts expert e, -1 if none does."""
    hosts = placement.hosts.reshape(-1, topology.dp_size, topology.attn_tp_size, placement.num_experts)
    return np.where(hosts.any(axis=2), hosts.argmax(axis=2), -1).astype(np.int16)
