"""The nouns: everything that flows from a profile to an engine, as arrays with fixed shapes.

Shape legend, one meaning per letter everywhere:
    T  routed tokens (rows of a trace)     R  requests
    L  MoE layers                          V  token ids the tables know (vocabulary size)
    K  experts chosen per token            B  tokens of one batch, all ranks together
    E  logical experts of a layer          G  expert-parallel ranks (`ep_size`)
    P  physical experts (copies counted)   D  attention-DP groups (`dp_size`)
    X  most copies of one expert           S  ranks inside an attention-DP group (`attn_tp_size`), G = D * S
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from scipy.sparse import csr_matrix

PREFILL, DECODE = 0, 1


def require(condition: bool, message: str) -> None:
    """Raise `ValueError(message)` unless `condition`: for what a user or a file got wrong."""
    if not condition:
        raise ValueError(message)


# Sizes that a file may declare: beyond any model and cluster, and small enough for what is allocated by them.
MOST_RANKS = 4096
MOST_VOCABULARY = 1 << 22
MOST_LAYERS = 1024
MOST_EXPERTS = 4096  # of a layer
MOST_TABLE = 1 << 28  # entries of an array by layer and expert, by layer and token id, or of layer x rank x expert


def number(default: Any, low: float, high: float) -> Any:
    """A dataclass field whose value lies between `low` and `high`, both included; None where that is the default.

    `check_numbers` holds values to it, and the command line takes an option's bounds from it.
    """
    return field(default=default, metadata={"low": low, "high": high})


def required_number(low: float, high: float) -> Any:
    """As `number`, without a default."""
    return field(metadata={"low": low, "high": high})


def bounds(kind: Any, name: str) -> tuple[float, float]:
    """The bounds of a field that `number` made."""
    metadata = kind.__dataclass_fields__[name].metadata
    return metadata["low"], metadata["high"]


def check_numbers(settings: Any) -> None:
    """Raise ValueError naming the first field of a dataclass whose value is outside the bounds of its `number`."""
    for one in fields(settings):
        value = getattr(settings, one.name)
        if not one.metadata or (value is None and one.default is None):
            continue
        low, high = one.metadata["low"], one.metadata["high"]
        if isinstance(value, bool) or not isinstance(value, (int, float, np.number)) or not low <= value <= high:
            raise ValueError(f"{one.name} must lie between {low:,} and {high:,}, not {value}")


def physical_experts(num_experts: int, redundant: int, ep_size: int) -> int:
    """P, if ranks can hold as many each. Raises ValueError saying what would fit."""
    total, reason = num_experts + redundant, ""
    if redundant:
        fit = ", ".join(str(-num_experts % ep_size + i * ep_size) for i in range(3))
        reason = f" ({num_experts} and {redundant} redundant: {fit}, ... fit)"
    require(total % ep_size == 0, f"ep_size {ep_size} does not divide {total} experts{reason}")
    return total


@dataclass(frozen=True, kw_only=True)
class Topology:
    """How ranks share the work: experts over `ep_size` ranks, attention over `dp_size` groups of `attn_tp_size`.

    Rank g belongs to group g // attn_tp_size and to node g // (ep_size // num_nodes).
    """

    ep_size: int = required_number(1, MOST_RANKS)
    dp_size: int = number(1, 1, MOST_RANKS)
    attn_tp_size: int = number(0, 0, MOST_RANKS)  # 0: ep_size // dp_size
    num_nodes: int = number(1, 1, MOST_RANKS)

    def __post_init__(self) -> None:
        check_numbers(self)
        require(self.ep_size % self.dp_size == 0, f"dp_size {self.dp_size} does not divide ep_size {self.ep_size}")
        if self.attn_tp_size == 0:
            object.__setattr__(self, "attn_tp_size", self.ep_size // self.dp_size)
        product = self.dp_size * self.attn_tp_size
        require(product == self.ep_size, f"dp_size x attn_tp_size is {product}, not ep_size {self.ep_size}")
        divides = self.ep_size % self.num_nodes == 0
        require(divides, f"num_nodes {self.num_nodes} does not divide ep_size {self.ep_size}")

    @classmethod
    def for_attention(
        cls, attention: str, ep_size: int, dp_size: int | None = None, num_nodes: int | None = None
    ) -> Topology:
        """`tp`: one group of all ranks; `dp`: every rank a group; `hybrid`: `dp_size` groups. num_nodes: by default 1.

        Raises ValueError for sizes that do not fit together.
        """
        require(attention in ("tp", "dp", "hybrid"), f"attention must be tp, dp or hybrid, not {attention!r}")
        if attention == "hybrid":
            groups = dp_size or 0
            require(1 < groups < ep_size, f"hybrid attention needs a dp_size between 1 and {ep_size=}, not {dp_size}")
        else:
            implied = {"tp": 1, "dp": ep_size}[attention]
            require(dp_size in (None, implied), f"attention {attention} has dp_size {implied}, not {dp_size}")
            dp_size = implied
        assert dp_size is not None
        return cls(ep_size=ep_size, dp_size=dp_size, num_nodes=1 if num_nodes is None else num_nodes)

    @property
    def node_of(self) -> np.ndarray:
        """(G,) int64: the node of each rank."""
        return np.arange(self.ep_size) // (self.ep_size // self.num_nodes)

    @property
    def attention(self) -> str:
        return "tp" if self.dp_size == 1 else "dp" if self.attn_tp_size == 1 else "hybrid"


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a trace or plan was made for; a plan is refused on a model or tokenizer that differs."""

    model: str  # a name for people; not compared
    architecture_hash: str  # SHA-256 of the configuration fields that shape routing
    tokenizer_hash: str  # SHA-256 of the vocabulary, token by token
    vocab_size: int = required_number(1, MOST_VOCABULARY)
    num_layers: int = required_number(1, MOST_LAYERS)  # MoE layers only
    num_experts: int = required_number(1, MOST_EXPERTS)
    top_k: int = required_number(1, MOST_EXPERTS)
    num_groups: int = number(1, 1, MOST_EXPERTS)  # group-limited gating (DeepSeek's n_group)
    hidden_size: int = number(0, 0, 1 << 24)  # 0: not known
    expert_size: int = number(0, 0, 1 << 24)  # width of one expert's feed-forward network; 0: not known

    def __post_init__(self) -> None:
        check_numbers(self)
        _check_table("num_layers x num_experts x num_experts", self.num_layers, self.num_experts, self.num_experts)
        _check_table("num_layers x vocab_size", self.num_layers, self.vocab_size)
        require(self.top_k <= self.num_experts, f"top_k {self.top_k} exceeds {self.num_experts} experts")
        divides = self.num_experts % self.num_groups == 0
        require(divides, f"{self.num_groups} gate groups do not divide {self.num_experts} experts")

    def mismatch(self, other: Fingerprint) -> str | None:
        """The first field in which `other` differs, in words, or None; sizes before hashes, which say less.

        What carries this fingerprint is called "there", what carries `other` is called "here".
        """
        there, here = (f" ({one.model})" if self.model != other.model else "" for one in (self, other))
        for name, mine in sorted(asdict(self).items(), key=lambda field: field[0].endswith("_hash")):
            theirs = getattr(other, name)
            unknown = name in ("hidden_size", "expert_size") and 0 in (mine, theirs)
            if name != "model" and mine != theirs and not unknown:
                return f"{name} is {mine} there{there} and {theirs} here{here}"
        return None


@dataclass(frozen=True, kw_only=True)
class RoutingTrace:
    """Which experts each token chose, request by request, in the order in which the model saw the tokens."""

    token_ids: np.ndarray  # (T,) int32
    expert_ids: np.ndarray  # (T, L, K) uint8 or int16, by falling routing weight
    request_offsets: np.ndarray  # (R + 1,) int64, rows of request r: offsets[r] to offsets[r + 1]
    phase: np.ndarray  # (T,) uint8, PREFILL or DECODE
    prompt_ids: np.ndarray  # (M,) int32, every request's prompt, routed or not
    prompt_offsets: np.ndarray  # (R + 1,) int64
    fingerprint: Fingerprint

    def __post_init__(self) -> None:
        f, tokens = self.fingerprint, len(self.token_ids)
        shape = (tokens, f.num_layers, f.top_k)
        require(self.expert_ids.shape == shape, f"expert_ids has shape {self.expert_ids.shape}, expected {shape}")
        require(self.phase.shape == (tokens,), f"phase has shape {self.phase.shape}, expected {(tokens,)}")
        _check_offsets("request_offsets", self.request_offsets, tokens)
        _check_offsets("prompt_offsets", self.prompt_offsets, len(self.prompt_ids))
        require(len(self.request_offsets) == len(self.prompt_offsets), "requests and prompts differ in number")
        _check_range("expert id", self.expert_ids, f.num_experts, "experts")
        _check_range("token id", self.token_ids, f.vocab_size, "vocabulary entries")
        _check_range("prompt token id", self.prompt_ids, f.vocab_size, "vocabulary entries")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_requests(self) -> int:
        return len(self.request_offsets) - 1

    def prompt(self, request: int) -> np.ndarray:
        return self.prompt_ids[self.prompt_offsets[request] : self.prompt_offsets[request + 1]]

    def rows(self, request: int) -> slice:
        return slice(int(self.request_offsets[request]), int(self.request_offsets[request + 1]))

    def request_of_token(self) -> np.ndarray:
        """(T,) int64: the request of each row."""
        return np.repeat(np.arange(self.num_requests), np.diff(self.request_offsets))

    def select(self, requests: np.ndarray) -> RoutingTrace:
        """The trace of `requests` alone, in the order given."""
        rows, offsets = _ragged_rows(self.request_offsets, requests)
        prompt_rows, prompt_offsets = _ragged_rows(self.prompt_offsets, requests)
        return replace(
            self, token_ids=self.token_ids[rows], expert_ids=self.expert_ids[rows], phase=self.phase[rows],
            request_offsets=offsets, prompt_ids=self.prompt_ids[prompt_rows], prompt_offsets=prompt_offsets,
        )  # fmt: skip

    def digest(self) -> str:
        """SHA-256 of the trace's contents."""
        sha = hashlib.sha256()
        offsets = (self.request_offsets, self.prompt_offsets)
        for array in (self.token_ids, self.expert_ids, self.phase, self.prompt_ids, *offsets):
            sha.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()

    def request_hashes(self) -> np.ndarray:
        """(R,) uint64: what each request is known by in another trace, from its prompt and its routed tokens."""
        out = np.empty(self.num_requests, np.uint64)
        for r in range(self.num_requests):
            prompt = self.prompt(r)
            content = np.concatenate([[len(prompt)], prompt, self.token_ids[self.rows(r)]]).astype("<i4").tobytes()
            out[r] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        return out


def _check_table(what: str, *sizes: int) -> None:
    """Raise ValueError where an array of these sizes would not be allocated for any real model."""
    entries = math.prod(sizes)
    require(entries <= MOST_TABLE, f"{what} is {entries:,}: more than {MOST_TABLE:,}, which no model that is known has")


def _check_offsets(name: str, offsets: np.ndarray, end: int) -> None:
    valid = (
        offsets.ndim == 1
        and len(offsets) >= 1
        and offsets[0] == 0
        and offsets[-1] == end
        and np.all(np.diff(offsets) >= 0)
    )
    require(bool(valid), f"{name} must rise from 0 to {end}")


def _check_range(name: str, ids: np.ndarray, size: int, what: str) -> None:
    require(np.issubdtype(ids.dtype, np.integer), f"{name}s are {ids.dtype}, expected integers")
    if ids.size:
        low, high = int(ids.min()), int(ids.max())
        require(low >= 0 and high < size, f"{name} {low if low < 0 else high} is out of range for {size} {what}")


def _ragged_rows(offsets: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of the chosen segments, one after the other, and the new offsets."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return rows, new_offsets


@dataclass(frozen=True, kw_only=True)
class Affinity:
    """How often each token and each request activates each expert: the paper's T^(L), from which C_p follows."""

    token_counts: list[csr_matrix]  # L matrices (V, E) int32: activations of expert e by token id v
    request_counts: list[csr_matrix]  # L matrices (R, E) int32
    path_counts: np.ndarray  # (L - 1, E, E) int64: tokens that chose e at layer l and e' at layer l + 1
    token_frequency: np.ndarray  # (V,) int64
    request_lengths: np.ndarray  # (R,) int64, routed tokens
    fingerprint: Fingerprint

    @property
    def expert_load(self) -> np.ndarray:
        """(L, E) int64: activations per expert."""
        return np.stack([np.asarray(counts.sum(axis=0)).ravel() for counts in self.token_counts]).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Which expert sits where: rank g holds physical experts g * P / G to (g + 1) * P / G of every layer."""

    physical_to_logical_map: np.ndarray  # (L, P) int32
    num_experts: int
    ep_size: int
    static_dispatch: np.ndarray | None = None  # (L, G, E) int16: the rank that serves e to source rank g; None: by rule

    def __post_init__(self) -> None:
        require(self.physical_to_logical_map.ndim == 2, "physical_to_logical_map must be (layers, physical experts)")
        layers, physical = self.physical_to_logical_map.shape
        require(physical >= self.num_experts, f"{physical} physical experts cannot hold {self.num_experts} experts")
        require(physical % self.ep_size == 0, f"ep_size {self.ep_size} does not divide {physical} physical experts")
        _check_table("layers x ranks x experts", layers, self.ep_size, self.num_experts)
        _check_table("layers x physical experts", layers, physical)
        _check_range("expert id", self.physical_to_logical_map, self.num_experts, "experts")
        missing = np.argwhere(self.logical_replica_count == 0)
        require(len(missing) == 0, f"expert {missing[:1, 1]} of layer {missing[:1, 0]} is on no rank" if layers else "")
        if self.static_dispatch is not None:
            shape = (layers, self.ep_size, self.num_experts)
            require(
                self.static_dispatch.shape == shape,
                f"static_dispatch has shape {self.static_dispatch.shape}, not {shape}",
            )
            _check_range("static dispatch rank", self.static_dispatch, self.ep_size, "ranks")
            served = np.take_along_axis(self.hosts, self.static_dispatch.astype(np.int64), axis=1)
            require(bool(served.all()), "static_dispatch sends an expert to a rank that does not host it")

    @property
    def experts_per_rank(self) -> int:
        return self.physical_to_logical_map.shape[1] // self.ep_size

    @property
    def logical_replica_count(self) -> np.ndarray:
        """(L, E) int64: copies of each expert."""
        layers = len(self.physical_to_logical_map)
        cells = self.physical_to_logical_map + self.num_experts * np.arange(layers)[:, None]
        counts = np.bincount(cells.ravel(), minlength=layers * self.num_experts)
        return counts.reshape(layers, self.num_experts)

    @property
    def logical_to_physical_map(self) -> np.ndarray:
        """(L, E, X) int32: the physical ids of each expert's copies, padded with -1."""
        layers, physical = self.physical_to_logical_map.shape
        most = int(self.logical_replica_count.max())
        _check_table("layers x experts x most copies of one", layers, self.num_experts, most)
        out = np.full((layers, self.num_experts, most), -1, np.int32)
        filled = np.zeros((layers, self.num_experts), np.int64)
        rows = np.arange(layers)
        for p in range(physical):
            experts = self.physical_to_logical_map[:, p]
            out[rows, experts, filled[rows, experts]] = p
            filled[rows, experts] += 1
        return out

    @property
    def redundant_experts(self) -> int:
        """Physical experts of a layer beyond the logical ones."""
        return self.physical_to_logical_map.shape[1] - self.num_experts

    @property
    def hosts(self) -> np.ndarray:
        """(L, G, E) bool: rank g has a copy of expert e."""
        layers = len(self.physical_to_logical_map)
        out = np.zeros((layers, self.ep_size, self.num_experts), bool)
        ranks = np.arange(self.physical_to_logical_map.shape[1]) // self.experts_per_rank
        out[np.arange(layers)[:, None], ranks, self.physical_to_logical_map] = True
        return out

    @classmethod
    def from_labels(cls, expert_ranks: np.ndarray, ep_size: int) -> Placement:
        """From (L, E) rank labels, equally many experts a rank; experts of a rank stay in ascending order."""
        experts = expert_ranks.shape[1]
        require(experts % ep_size == 0, f"ep_size {ep_size} does not divide {experts} experts")
        sizes = (expert_ranks[:, :, None] == np.arange(ep_size)).sum(axis=1)
        assert (sizes == experts // ep_size).all(), "every rank must hold equally many experts"
        order = np.argsort(expert_ranks, axis=1, kind="stable").astype(np.int32)
        return cls(physical_to_logical_map=order, num_experts=experts, ep_size=ep_size)


@dataclass(frozen=True, kw_only=True)
class CoClustering:
    """What a placement method decides: where experts go and, if it clusters data too, where data should go."""

    placement: Placement
    token_ranks: np.ndarray | None = None  # (L, D, V) int16: rank inside group d for token v; -1: not profiled
    request_groups: np.ndarray | None = None  # (R,) int16: the group of each profiled request
    gap: dict[str, float | None] | None = None  # of programs solved: relative gap to the optimum, None if unknown


@dataclass(frozen=True, kw_only=True)
class RequestTable:
    """Attention-DP: what Algorithm 2 sums over a prompt's tokens."""

    request_scores: np.ndarray  # T, (V + 1, D) float32: group shares of each token
    request_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR


@dataclass(frozen=True, kw_only=True)
class RequestMap:
    """Attention-DP: a linear map from a prompt to groups; the score of group d estimates its share of the pairs.

    score = bias + (sum of token_scores over the distinct ids of the prompt) / sqrt(sum of their token_weights).
    Row V serves ids outside the vocabulary.
    """

    token_scores: np.ndarray  # (V + 1, D) float32
    token_weights: np.ndarray  # (V + 1,) float32, idf squared
    bias: np.ndarray  # (D,) float32
    prices: np.ndarray  # (D,) float32: what a group's score must exceed others by, so that the profile's load is even
    score_spread: float  # standard deviation of the profile's scores: the unit of online price changes
    mean_length: float  # decode tokens of a profiled request
    cache_weight: float = 0.0  # score of a prompt that is wholly in a group's prefix cache


@dataclass(frozen=True, kw_only=True)
class ShuffleTables:
    """Attention-TP: where Algorithm 3 looks up the rank, inside its group, that will host a token's experts."""

    token_ranks: np.ndarray  # T, (L, D, V + 1) int16
    token_confidence: np.ndarray  # T_p, (L, D, V + 1) float16
    path_ranks: np.ndarray  # A, (L, D, S ** lookback) int16
    path_confidence: np.ndarray  # A_p, (L, D, S ** lookback) float16
    token_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR
    lookback: int


@dataclass(frozen=True, kw_only=True)
class ScoreTables:
    """Attention-TP: rows whose sum is how many of a token's experts every rank can expect to host, in 1 / SCALE.

    Integers, so that every device and backend comes to the same bits. `predictor` says what the rows mean.
    """

    token_rows: np.ndarray  # (V + 1,) int32: the row of each token id; row V serves ids outside the vocabulary
    token_source: np.ndarray  # (V + 1,) uint8: PRIOR, PROFILED or NEIGHBOUR
    token_scores: np.ndarray  # (L, N + 1, G) int8, to be shifted left by token_shift; the last row is the layer's mean
    token_shift: np.ndarray  # (L,) uint8
    path_scores: np.ndarray  # (L, F, G) int16
    history_scores: np.ndarray  # (L, 2E + 1, G) int16: running mean, previous token, no token before
    lookback: int  # layers
    ordered: int  # of these, the nearest ones whose experts have a row for each place in the order of weights


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The tables that the online side looks up (paper, section 3.3 and appendix B).

    Row V of every table with V + 1 rows serves token ids that are outside the vocabulary.
    """

    requests: RequestTable | RequestMap | None  # None with one group
    shuffle: ShuffleTables | ScoreTables | None  # None where a group is one rank, or tokens go by position


PRIOR, PROFILED, NEIGHBOUR = 0, 1, 2  # what serves a table row: the prior, its own counts, a neighbour's
MAX_PATHS = 1 << 20  # rows of A


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The one artefact that crosses from offline to online."""

    topology: Topology
    placement: Placement
    schedule: Schedule | None  # None: tokens by position, requests in turn
    fingerprint: Fingerprint
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    trace_hash: str = ""
    profiled_requests: np.ndarray | None = None  # (N,) uint64, rising: hashes of the requests solved on; None: unknown
    expected: dict[str, Any] | None = None

    def check(self, model: Fingerprint) -> None:
        """Raise ValueError unless this plan was made for `model`."""
        difference = self.fingerprint.mismatch(model)
        if difference is not None:
            raise ValueError(f"this plan was made for another model or tokenizer: {difference}")
