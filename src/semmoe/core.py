"""The data that flows from a profile to an engine, as arrays with fixed shapes.

Shape legend, one meaning per letter everywhere:
    T  routed tokens (rows of a trace)     R  requests
    L  MoE layers                          V  token ids in the tables (vocabulary size)
    K  experts chosen per token            B  tokens of a batch, all ranks together
    E  logical experts of a layer          G  expert-parallel ranks (`ep_size`)
    P  physical experts (copies counted)   D  attention-DP groups (`dp_size`)
    X  most copies of an expert            S  ranks inside an attention-DP group (`attn_tp_size`), G = D * S
    N  tokens or rows of a call, n those of a rank; other letters are explained where they stand
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Protocol

import numpy as np

from semmoe.io.bounds import Checked, Declared, check_offsets, check_range, check_shape, check_table, choice, number
from semmoe.topology import Fingerprint, Topology, physical_experts

PREFILL, DECODE = 0, 1
PER_TOKEN = ("token_ids", "expert_ids", "phase")  # the arrays of a trace that have a row for each token


@dataclass(frozen=True, kw_only=True)
class RoutingTrace:
    """Which experts each token chose, request by request, in the order in which the model saw the tokens."""

    token_ids: np.ndarray  # (T,) int32
    expert_ids: np.ndarray  # (T, L, K) uint8 or int16, by falling routing weight
    request_offsets: np.ndarray  # (R + 1,) int64, rows of request r: offsets[r] to offsets[r + 1]
    phase: np.ndarray  # (T,) uint8, PREFILL or DECODE
    prompt_ids: np.ndarray  # (M,) int32, the prompts of all requests, routed or not
    prompt_offsets: np.ndarray  # (R + 1,) int64
    fingerprint: Fingerprint
    left_out: int = 0  # tokens that reading left out, since no router routes them so

    def __post_init__(self) -> None:
        f, tokens = self.fingerprint, len(self.token_ids)
        check_shape("expert_ids", self.expert_ids, (tokens, f.num_layers, f.top_k))
        check_shape("phase", self.phase, (tokens,))
        check_range("phase", self.phase, 2, "phases: 0 (prompt) and 1 (decoded)")
        check_offsets("request_offsets", self.request_offsets, tokens)
        check_offsets("prompt_offsets", self.prompt_offsets, len(self.prompt_ids))
        if len(self.request_offsets) != len(self.prompt_offsets):
            raise ValueError("requests and prompts differ in number")
        check_range("expert id", self.expert_ids, f.num_experts, "experts")
        check_range("token id", self.token_ids, f.vocab_size, "vocabulary entries")
        check_range("prompt token id", self.prompt_ids, f.vocab_size, "vocabulary entries")

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
            self,
            **{name: getattr(self, name)[rows] for name in PER_TOKEN},
            request_offsets=offsets,
            prompt_ids=self.prompt_ids[prompt_rows],
            prompt_offsets=prompt_offsets,
            left_out=0,
        )

    def digest(self) -> str:
        """SHA-256 of the trace's contents."""
        sha = hashlib.sha256()
        offsets = (self.request_offsets, self.prompt_offsets)
        for array in (self.token_ids, self.expert_ids, self.phase, self.prompt_ids, *offsets):
            sha.update(str(array.shape).encode() + np.ascontiguousarray(array).tobytes())
        return sha.hexdigest()

    def request_hashes(self) -> np.ndarray:
        """(R,) uint64: a hash of each request's prompt and routed tokens, by which it is found in other traces."""
        out = np.empty(self.num_requests, np.uint64)
        for r in range(self.num_requests):
            prompt = self.prompt(r)
            content = np.concatenate([[len(prompt)], prompt, self.token_ids[self.rows(r)]]).astype("<i4").tobytes()
            out[r] = int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")
        return out


def _ragged_rows(offsets: np.ndarray, chosen: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Row indices of the chosen segments, one after the other, and the new offsets."""
    lengths = np.diff(offsets)[chosen]
    new_offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    rows = np.arange(new_offsets[-1]) + np.repeat(offsets[:-1][chosen] - new_offsets[:-1], lengths)
    return rows, new_offsets


@dataclass(frozen=True, kw_only=True)
class Placement(Checked):
    """The rank of each expert: rank g holds physical experts g * P / G to (g + 1) * P / G of every layer."""

    physical_to_logical_map: np.ndarray  # (L, P) int32
    num_experts: int
    ep_size: int
    # (L, G, E) int16: the rank whose copy each rank uses first; None: `copychoice.preferred_copies`
    static_dispatch: np.ndarray | None = None
    copy_choice: str = choice("static", ("static", "cover"))  # the rule: see `copychoice`
    # (L, G, E) bool: experts of which each rank uses the preferred copy alone under the rule `cover`; None: of none
    fixed_copies: np.ndarray | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.physical_to_logical_map.ndim != 2:
            raise ValueError("physical_to_logical_map must be (layers, physical experts)")
        layers, physical = self.physical_to_logical_map.shape
        if physical < self.num_experts:
            raise ValueError(f"{physical} physical experts cannot hold {self.num_experts} experts")
        physical_experts(self.num_experts, physical - self.num_experts, self.ep_size)
        check_table("layers x ranks x experts", layers, self.ep_size, self.num_experts)
        check_table("layers x physical experts", layers, physical)
        check_range("expert id", self.physical_to_logical_map, self.num_experts, "experts")
        missing = np.argwhere(self.logical_replica_count == 0)
        if len(missing) != 0:
            layer, expert = missing[0]
            raise ValueError(f"expert {expert} of layer {layer} is on no rank")
        if self.static_dispatch is not None:
            check_shape("static_dispatch", self.static_dispatch, (layers, self.ep_size, self.num_experts))
            check_range("static dispatch rank", self.static_dispatch, self.ep_size, "ranks")
            served = np.take_along_axis(self.hosts, self.static_dispatch.astype(np.int64), axis=1)
            if not served.all():
                raise ValueError("static_dispatch sends an expert to a rank that does not host it")
        if self.fixed_copies is not None:
            check_shape("fixed_copies", self.fixed_copies, (layers, self.ep_size, self.num_experts))

    @property
    def experts_per_rank(self) -> int:
        return self.physical_to_logical_map.shape[1] // self.ep_size

    @property
    def logical_replica_count(self) -> np.ndarray:
        """(L, E) int64: copies of each expert."""
        return np.stack([np.bincount(row, minlength=self.num_experts) for row in self.physical_to_logical_map])

    @property
    def logical_to_physical_map(self) -> np.ndarray:
        """(L, E, X) int32: the physical ids of each expert's copies, padded with -1."""
        (layers, physical), copies = self.physical_to_logical_map.shape, self.logical_replica_count
        most = int(copies.max())
        check_table("layers x experts x most copies", layers, self.num_experts, most)
        order = np.argsort(self.physical_to_logical_map, axis=1, kind="stable")  # by expert
        experts = np.take_along_axis(self.physical_to_logical_map, order, axis=1)
        first = np.cumsum(copies, axis=1) - copies  # where each expert's copies begin
        place = np.arange(physical) - np.take_along_axis(first, experts, axis=1)
        out = np.full((layers, self.num_experts, most), -1, np.int32)
        out[np.arange(layers)[:, None], experts, place] = order
        return out

    @property
    def ranks_with_copies(self) -> np.ndarray:
        """(L, E, X): the ranks with copies of each expert, padded with -1."""
        copies = self.logical_to_physical_map
        return np.where(copies >= 0, copies // self.experts_per_rank, -1)

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
        """Make a placement from rank labels (L, E) with equally many experts per rank, kept in ascending order."""
        experts = physical_experts(expert_ranks.shape[1], 0, ep_size)
        sizes = (expert_ranks[:, :, None] == np.arange(ep_size)).sum(axis=1)
        assert (sizes == experts // ep_size).all(), "every rank must hold equally many experts"
        order = np.argsort(expert_ranks, axis=1, kind="stable").astype(np.int32)
        return cls(physical_to_logical_map=order, num_experts=experts, ep_size=ep_size)


class Evidence(Protocol):
    """A token policy's predictions for all tokens of a trace at one layer."""

    def slices(self, rows: np.ndarray, num_slices: int) -> np.ndarray:
        """Return the slice (B,) of each token in `rows` (B,), a group's tokens in a batch; slices have equal sizes."""

    def expected_local(self, rows: np.ndarray, slices: np.ndarray) -> float:
        """Number of local (token, expert) pairs that the policy expects if tokens `rows` (B,) go to `slices` (B,)."""


class Policy(Protocol):
    """Decides where requests or tokens go; a dataclass of arrays and numbers."""

    kind: ClassVar[str]  # its name in plan.json
    by_tables: ClassVar[bool]  # False: its decisions do not depend on the tokens

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """What each array must be, by name. Raises ValueError for numbers that do not fit topology and fingerprint."""

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: tokens for which only the prior is known; all False if the policy looks up no token."""


class TokenPolicy(Policy, Protocol):
    """Decides the rank of its attention group to which each token's row goes."""

    def evidence(self, trace: RoutingTrace, plan: Plan, group: np.ndarray, decoding: bool) -> Iterator[Evidence]:
        """Yield the evidence of each layer.

        group: (T,) attention group of each token. decoding: whether a request's tokens came one by one.
        """


RequestPolicy = Policy  # decides the attention group to which each request goes
NEVER = 1 << 31  # more rows than a pass can have

# where a table row comes from: the prior, the token's own counts, a neighbour's counts
PRIOR, PROFILED, NEIGHBOUR = range(3)


@dataclass(frozen=True, kw_only=True, repr=False)
class Plan(Checked):
    """A method's offline decisions, which an engine reads: placement, token policy and request policy."""

    topology: Topology
    placement: Placement
    tokens: TokenPolicy
    requests: RequestPolicy
    fingerprint: Fingerprint
    method: str
    settings: dict[str, Any] = field(default_factory=dict)
    trace_hash: str = ""
    # (N,) uint64, ascending: hashes of the profiled requests; None: unknown
    profiled_requests: np.ndarray | None = None
    expected: dict[str, Any] | None = None
    # attention-TP: the least rows of a group's pass that is shuffled; passes with fewer keep contiguous slices
    shuffle_from: int = number(1, 1, NEVER)

    def __repr__(self) -> str:
        placement, layers = self.placement, len(self.placement.physical_to_logical_map)
        experts = f"{layers} layers of {placement.num_experts} experts and {placement.redundant_experts} redundant"
        ranks = f"{self.topology.ep_size} ranks, attention {self.topology.attention}"
        policies = f"tokens {self.tokens.kind}, requests {self.requests.kind}"
        return f"Plan({self.method!r}, {self.fingerprint.model!r}: {experts} over {ranks}, {policies})"

    def check(self, model: Fingerprint) -> None:
        """Raise ValueError unless this plan was made for `model`."""
        self.fingerprint.check_same(model, "this plan was made for another model or tokenizer:")
