"""Assign tokens to equal slices, by position or by the path predictor's tables.

With tables, the rows of each token are summed to scores, and tokens are assigned by score under a capacity. The
compiled loops are in `tokens.kernels`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.core import DECODE, NEIGHBOUR, PRIOR, Evidence, Plan, RoutingTrace
from semmoe.io.bounds import Checked, Declared, number
from semmoe.tokens import kernels
from semmoe.tokens.kernels import SCALE
from semmoe.topology import Fingerprint, Topology
from semmoe.traces.affinity import known_rows

MOST_LOOKBACK = 1024
INT8, INT16 = 127, 32767


def position_slices(num_tokens: int, num_slices: int) -> np.ndarray:
    """(B,) int16: the slice of each token by position, as in an engine without a plan."""
    return (np.arange(num_tokens) // slice_size(num_tokens, num_slices)).astype(np.int16)


def slice_size(num_tokens: int, num_slices: int) -> int:
    """Rows per slice, padding included: reduce-scatter gives every rank equally many rows."""
    return max(-(-num_tokens // num_slices), 1)


@dataclass(frozen=True, kw_only=True)
class ByPosition:
    """Token policy that assigns slices in the order of the batch, as an engine does without a plan."""

    kind: ClassVar[str] = "by-position"
    by_tables: ClassVar[bool] = False

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """No arrays are needed."""
        return {}

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: all False, since no token is looked up."""
        return np.zeros(len(token_ids), bool)

    def evidence(self, trace: RoutingTrace, plan: Plan, group: np.ndarray, decoding: bool) -> Iterator[Evidence]:
        """Yield the policy itself for every layer: it needs no other evidence."""
        for _ in range(trace.fingerprint.num_layers):
            yield self

    def slices(self, rows: np.ndarray, num_slices: int) -> np.ndarray:
        """(B,) equal slices in the order of the batch."""
        return position_slices(len(rows), num_slices)

    def expected_local(self, rows: np.ndarray, slices: np.ndarray) -> float:
        """Return 0, since nothing is predicted."""
        return 0.0


@dataclass(frozen=True, kw_only=True)
class Looks:
    """The planes that a prediction reads: a token's K experts at each earlier layer, nearest first; none at layer 0."""

    lookback: int  # the number of planes; early layers have fewer
    ordered: int  # the number of leading planes that have one row per place in the order of weights

    def number(self, layer: int) -> int:
        """J, the number of planes at a layer."""
        return min(self.lookback, layer)

    def rows(self, top_k: int, num_experts: int) -> int:
        """F, the number of path rows."""
        return (self.ordered * top_k + self.lookback - self.ordered) * num_experts

    def planes(self, trace: RoutingTrace, layer: int) -> np.ndarray:
        """(J, T, K): the planes of all tokens of a trace at a layer."""
        return trace.expert_ids[:, max(layer - self.lookback, 0) : layer][:, ::-1].transpose(1, 0, 2)


@dataclass(frozen=True, kw_only=True)
class PathScores(Checked):
    """Token policy of the path predictor: tables whose rows sum to a token's expected number of experts on each rank.

    Values are integers in units of 1 / SCALE: all devices compute the same bits. `tokens.predictor` explains the rows.
    """

    kind: ClassVar[str] = "path-scores"
    by_tables: ClassVar[bool] = True
    token_rows: np.ndarray  # (V + 1,) int32: the row of each token id; row V is for ids outside the vocabulary
    token_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR
    token_scores: np.ndarray  # (L, N + 1, G) int8, to be shifted left by token_shift; the last row is the mean
    token_shift: np.ndarray  # (L,) uint8
    path_scores: np.ndarray  # (L, F, G) int16
    history_scores: np.ndarray  # (L, 2E + 1, G) int16: running mean, previous token, no token before
    lookback: int = number(..., 0, MOST_LOOKBACK)  # layers
    # how many of the first planes have one row per position by weight
    ordered: int = number(..., 0, MOST_LOOKBACK)

    @property
    def looks(self) -> Looks:
        """What its path rows look at."""
        return Looks(lookback=self.lookback, ordered=self.ordered)

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """What each array must be; raises ValueError for a look-back that does not fit."""
        L, E = fingerprint.num_layers, fingerprint.num_experts
        G, V = topology.ep_size, fingerprint.vocab_size
        lookback, ordered = self.lookback, self.ordered
        if lookback > L or ordered > lookback:
            raise ValueError(f"lookback {lookback} with {ordered} ordered is out of range")
        rows = self.token_scores.shape[1] if self.token_scores.ndim == 3 else 0
        path_rows = self.looks.rows(fingerprint.top_k, E)
        return {
            "token_rows": Declared((V + 1,), np.int32, 0, rows - 1),
            "token_source": Declared((V + 1,), np.uint8, 0, NEIGHBOUR),
            "token_scores": Declared((L, rows, G), np.int8, -INT8, INT8),
            "token_shift": Declared((L,), np.uint8, 0, 15),
            "path_scores": Declared((L, path_rows, G), np.int16, -INT16, INT16),
            "history_scores": Declared((L, 2 * E + 1, G), np.int16, -INT16, INT16),
        }

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: tokens for which only the prior is known."""
        return self.token_source[token_ids] == PRIOR

    def evidence(self, trace: RoutingTrace, plan: Plan, group: np.ndarray, decoding: bool) -> Iterator[Evidence]:
        """Yield for each layer the scores of every token over the ranks of its group."""
        for l in range(trace.fingerprint.num_layers):
            yield ScoreEvidence(trace_scores(self, l, trace, plan.topology, group, decoding))


@dataclass(frozen=True)
class ScoreEvidence:
    """Scores (T, S) int32 of every token over the ranks of its group."""

    scores: np.ndarray

    def slices(self, rows: np.ndarray, num_slices: int) -> np.ndarray:
        """(B,) equal slices with nearly the largest sum of scores."""
        return assign(self.scores[rows])

    def expected_local(self, rows: np.ndarray, slices: np.ndarray) -> float:
        """The sum of the scores of `rows` at `slices`, in (token, expert) pairs."""
        return float(self.scores[rows, slices].sum()) / SCALE


def home_ranks(evidence: Evidence, group: np.ndarray, rows: np.ndarray, topology: Topology) -> np.ndarray:
    """(B,) the rank of each token `rows` (B,) of a batch: its attention group, and its slice inside the group.

    evidence: on all tokens; group (T,): their attention groups.
    """
    S = topology.attn_tp_size
    groups = group[rows]
    if S == 1:
        return groups
    home = np.empty(len(rows), np.int64)
    for d in range(topology.dp_size):
        inside = np.flatnonzero(groups == d)
        home[inside] = d * S + evidence.slices(rows[inside], S)
    return home


def trace_scores(
    tables: PathScores, layer: int, trace: RoutingTrace, topology: Topology, group: np.ndarray, decoding: bool
) -> np.ndarray:
    """(T, S) int32: scores of all tokens at one layer over the ranks of their group; group (T,): attention groups."""
    S = topology.attn_tp_size
    planes = tables.looks.planes(trace, layer)
    history = trace_history(tables, layer, trace) if decoding else None
    out = np.empty((trace.num_tokens, S), np.int32)
    for d in range(topology.dp_size):
        rows = np.flatnonzero(group == d)
        known = None if history is None else history[rows]
        tokens = look_up_tokens(tables, [layer], d * S, S, trace.token_ids[rows])[0]
        out[rows] = score(tables, layer, d * S, tokens, np.ascontiguousarray(planes[:, rows]), known)
    return out


def look_up_tokens(
    tables: PathScores, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: np.ndarray
) -> np.ndarray:
    """(L, B, S) int32: scores of ranks `first_rank` to first_rank + S from token_ids (B,) alone, at each of `layers`.

    No routing is needed, so that an engine looks up all layers before the first one runs.
    """
    rows = tables.token_rows[known_rows(token_ids, len(tables.token_rows))]
    out = np.empty((len(layers), len(rows), num_slices), np.int32)
    for i, layer in enumerate(layers):
        kernels.look_up(out[i], rows, tables.token_scores[layer], int(tables.token_shift[layer]), first_rank)
    return out


def score(
    tables: PathScores,
    layer: int,
    first_rank: int,
    tokens: np.ndarray,
    earlier: np.ndarray,
    history: np.ndarray | None = None,
) -> np.ndarray:
    """(B, S) int32: experts of each token that ranks `first_rank` to first_rank + S are expected to host, times SCALE.

    tokens (B, S) int32: scores of this layer from `look_up_tokens`. earlier (J, B, K): the planes of `Looks`, experts
    by falling weight. history (B, G) int32: contributions of earlier tokens for decoded ones, or None.
    """
    out = np.empty_like(tokens)
    none = tables.history_scores[layer, -1:]
    kernels.score(
        out,
        tokens,
        tables.path_scores[layer],
        earlier,
        tables.ordered,
        (tables.history_scores.shape[1] - 1) // 2,
        none.astype(np.int32) if history is None else history,
        history is not None,
        first_rank,
    )
    return out


def trace_history(tables: PathScores, layer: int, trace) -> np.ndarray:
    """(T, G) int32: the history contribution to every token of a RoutingTrace, after its request's earlier tokens."""
    rows = tables.history_scores[layer]
    previous = np.tile(rows[-1].astype(np.int32), (trace.num_requests, 1))
    running, seen = np.zeros_like(previous), np.zeros(trace.num_requests, np.int64)
    out = np.tile(rows[-1].astype(np.int32), (trace.num_tokens, 1))
    tokens = trace.request_of_token(), trace.expert_ids[:, layer]
    kernels.observe(running, previous, seen, *tokens, rows, out, trace.phase == DECODE)
    return out


def assign(scores: np.ndarray) -> np.ndarray:
    """(B,) int16: tokens to slices of at most ceil(B / S) so that the sum of scores (B, S) int32 is nearly the largest.

    Dual ascent first finds a price per slice, which rises while the slice overflows; every token takes the slice of
    highest score less price. Then the tokens that lose least move from overfull slices to slices with room (`_level`).
    Scores must be below 2**23 in absolute value. A large batch is assigned in `chunks`, each to equal slices.
    Worked example, two slices for four tokens with scores [9, 1], [5, 4], [7, 0], [0, 6]: tokens 0, 1 and 2 prefer
    slice 0, which has room for two; token 1 loses least by moving: [0, 1, 0, 1].
    """
    if kernels.num_chunks(*scores.shape) == 1:
        return kernels.assign(scores)
    out = np.empty(len(scores), np.int16)
    for rows in kernels.chunks(*scores.shape):
        out[rows] = kernels.assign(scores[rows])
    return out
