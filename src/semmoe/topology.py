"""The setting that a plan is made for: how ranks share the work, and which model and tokenizer they run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from semmoe.io.bounds import MOST_EXPERTS, MOST_LAYERS, MOST_RANKS, MOST_VOCABULARY, Checked, check_table, number


def nearest(size: int, sizes: Sequence[int]) -> str:
    """Return in words those of `sizes`, ascending, that are next to `size`."""
    below, above = [n for n in sizes if n < size], [n for n in sizes if n > size]
    return " and ".join(map(str, below[-1:] + above[:1]))


def check_divides(name: str, size: int, number: int, of: str, remedy: str = "") -> None:
    """Raise ValueError, naming the nearest sizes that fit, unless `size` divides the `number` of `of`."""
    if number % size != 0:
        fit = nearest(size, [n for n in range(1, number + 1) if number % n == 0])
        raise ValueError(f"{name} {size} does not divide {of} (nearest: {fit}){remedy}")


def physical_experts(num_experts: int, redundant: int, ep_size: int) -> int:
    """P, the physical experts of a layer. Raises ValueError, saying which sizes fit, unless ranks divide it evenly."""
    total = num_experts + redundant
    copies = nearest(redundant, range(-num_experts % ep_size, redundant + ep_size + 1, ep_size))
    of = f"{total} experts ({redundant} redundant)" if redundant else f"{total} experts"
    check_divides("ep_size", ep_size, total, of, f"; redundant experts that fit: {copies}")
    return total


@dataclass(frozen=True, kw_only=True)
class Topology(Checked):
    """How ranks share the work: experts over `ep_size` ranks, attention over `dp_size` groups of `attn_tp_size`.

    Rank g belongs to group g // attn_tp_size and to node g // (ep_size // num_nodes).
    """

    ep_size: int = number(..., 1, MOST_RANKS)
    dp_size: int = number(1, 1, MOST_RANKS)
    attn_tp_size: int = number(0, 0, MOST_RANKS)  # 0: ep_size // dp_size
    num_nodes: int = number(1, 1, MOST_RANKS)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("dp_size", "num_nodes"):
            check_divides(name, getattr(self, name), self.ep_size, f"ep_size {self.ep_size}")
        if self.attn_tp_size == 0:
            object.__setattr__(self, "attn_tp_size", self.ep_size // self.dp_size)
        product = self.dp_size * self.attn_tp_size
        if product != self.ep_size:
            fit = self.ep_size // self.dp_size
            raise ValueError(
                f"dp_size x attn_tp_size is {product}, not ep_size {self.ep_size} (attn_tp_size {fit} fits)"
            )

    @classmethod
    def for_attention(
        cls, attention: str, ep_size: int, dp_size: int | None = None, num_nodes: int | None = None
    ) -> Topology:
        """`tp`: one group of all ranks; `dp`: every rank a group; `hybrid`: `dp_size` groups. num_nodes: by default 1.

        Raises ValueError for sizes that do not fit together.
        """
        groups = {"tp": 1, "dp": ep_size, "hybrid": dp_size or 0}.get(attention)
        if groups is None:
            raise ValueError(f"attention must be tp, dp or hybrid, not {attention!r}")
        if attention == "hybrid" and not 1 < groups < ep_size:
            raise ValueError(f"hybrid attention needs a dp_size between 1 and {ep_size=}, not {dp_size}")
        if dp_size not in (None, groups):
            raise ValueError(f"attention {attention} has dp_size {groups}, not {dp_size}")
        return cls(ep_size=ep_size, dp_size=groups, num_nodes=1 if num_nodes is None else num_nodes)

    @property
    def node_of(self) -> np.ndarray:
        """(G,) int64: the node of each rank."""
        return np.arange(self.ep_size) // (self.ep_size // self.num_nodes)

    @property
    def attention(self) -> str:
        return "tp" if self.dp_size == 1 else "dp" if self.attn_tp_size == 1 else "hybrid"


@dataclass(frozen=True, kw_only=True)
class Fingerprint(Checked):
    """The model and tokenizer that a trace or plan was made for; a plan is refused on any other."""

    model: str  # a name for people; not compared
    architecture_hash: str  # SHA-256 of the configuration fields that shape routing
    tokenizer_hash: str  # SHA-256 of the vocabulary, token by token
    vocab_size: int = number(..., 1, MOST_VOCABULARY)
    num_layers: int = number(..., 1, MOST_LAYERS)  # MoE layers only
    num_experts: int = number(..., 1, MOST_EXPERTS)
    top_k: int = number(..., 1, MOST_EXPERTS)
    num_groups: int = number(1, 1, MOST_EXPERTS)  # group-limited gating (DeepSeek's n_group)
    hidden_size: int = number(0, 0, 1 << 24)  # 0: not known
    expert_size: int = number(0, 0, 1 << 24)  # width of an expert's feed-forward network; 0: not known

    def __post_init__(self) -> None:
        super().__post_init__()
        check_table("num_layers x num_experts x num_experts", self.num_layers, self.num_experts, self.num_experts)
        check_table("num_layers x vocab_size", self.num_layers, self.vocab_size)
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds {self.num_experts} experts")
        if self.num_experts % self.num_groups != 0:
            raise ValueError(f"{self.num_groups} gate groups do not divide {self.num_experts} experts")

    def check_same(self, other: Fingerprint, what: str) -> None:
        """Raise ValueError, beginning with `what`, that names the first field in which `other` differs, sizes first.

        In the message "there" is this fingerprint and "here" is `other`.
        """
        there, here = (f" ({one.model})" if self.model != other.model else "" for one in (self, other))
        for name, mine in sorted(asdict(self).items(), key=lambda field: field[0].endswith("_hash")):
            theirs = getattr(other, name)
            unknown = name in ("hidden_size", "expert_size") and 0 in (mine, theirs)
            if name != "model" and mine != theirs and not unknown:
                raise ValueError(f"{what} {name} is {mine} there{there} and {theirs} here{here}")
