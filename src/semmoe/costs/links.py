"""The speed of links and experts: written by `python -m lab calibrate`, or shipped with semmoe."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, model_validator

from semmoe.costs.rows import RowCosts, kind_costs
from semmoe.io.files import load_json
from semmoe.settings import LOCAL_PAIR
from semmoe.topology import Topology

SHIPPED = Path(__file__).parents[1] / "links"
Positive = Field(gt=0, allow_inf_nan=False)
NotNegative = Field(ge=0, allow_inf_nan=False)
MOST_PAIRED = 1024  # ranks or nodes whose pairs have speeds of their own
Row = Annotated[list[Annotated[float, NotNegative]], Field(max_length=MOST_PAIRED)]


class Tier(BaseModel):
    """The speed of one kind of link for one rank, which sends and receives at the same time."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dispatch_latency_us: float = NotNegative  # fixed time of an all-to-all; between nodes, for each doubling of nodes
    combine_latency_us: float = NotNegative
    gigabytes_per_second: float = Positive  # in an all-to-all
    all_reduce_latency_us: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # as a dispatch
    all_reduce_gigabytes_per_second: float | None = Field(default=None, gt=0, allow_inf_nan=False)  # as all-to-alls

    def all_reduce_seconds(self, moved: float) -> float:
        """The time of an all-reduce in which a rank sends `moved` bytes."""
        latency = self.dispatch_latency_us if self.all_reduce_latency_us is None else self.all_reduce_latency_us
        speed = self.all_reduce_gigabytes_per_second or self.gigabytes_per_second
        return moved / (speed * 1e9) + latency * 1e-6


class Experts(BaseModel):
    """The speed at which one rank computes experts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fixed_us: float = NotNegative
    teraflops: float = Positive


class PairSpeeds(BaseModel):
    """The speed of each pair of ranks (G, G), or of nodes (N, N), row by row by sender; the diagonal is not read."""

    model_config = ConfigDict(extra="forbid", strict=True)
    gigabytes_per_second: Annotated[list[Row], Field(min_length=1, max_length=MOST_PAIRED)]  # above 0
    latency_us: Annotated[list[Row], Field(max_length=MOST_PAIRED)] | None = None  # in addition to the tier's

    @model_validator(mode="after")
    def _check(self) -> "PairSpeeds":
        for rows in (self.gigabytes_per_second, self.latency_us or self.gigabytes_per_second):
            if {len(rows), *map(len, rows)} != {self.size}:
                raise ValueError("the figures of pairs are not square, or of different sizes")
        if min(map(min, self.gigabytes_per_second)) <= 0:
            raise ValueError("the speed of a pair must be above 0")
        return self

    @property
    def size(self) -> int:
        return len(self.gigabytes_per_second)


class Links(BaseModel):
    """A calibration of links and experts: written by `python -m lab calibrate`, or shipped with semmoe."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    kind: Literal["measured", "nominal"]
    source: str
    inside_node: Tier
    between_nodes: Tier | None = None
    pairs: PairSpeeds | None = None  # in place of the tiers' bandwidths: of all pairs of ranks, or of pairs of nodes
    all_to_all: Literal["per-rank", "per-node", "per-pair"] = "per-rank"  # the rows that it sends: rows.KINDS
    shared: bool = False
    dispatch_bytes_per_value: int = Field(ge=1, le=8)
    combine_bytes_per_value: int = Field(ge=1, le=8)
    routing_bytes: int = Field(ge=0, le=64)  # id and weight that a dispatched row carries per choice
    experts: Experts


def shipped() -> list[str]:
    """Names of the calibrations that are shipped with semmoe."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_links(name: str, topology: Topology | None = None) -> Links:
    """The calibration of a shipped name or of a file.

    Raises ValueError if there is none, if it is damaged, or if it does not describe the links of a topology.
    """
    path = SHIPPED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there are no links called {name!r}: give a file, or one of {', '.join(shipped())}")
    links = load_json(path, Links)
    if topology is not None:
        seconds_per_gigabyte(links, topology)
    return links


def seconds_per_gigabyte(links: Links, topology: Topology) -> np.ndarray:
    """(G, G) time of a gigabyte from rank i to rank j; the diagonal is zero.

    Raises ValueError if the links do not describe this topology.
    """
    G, N, node, pairs = topology.ep_size, topology.num_nodes, topology.node_of, links.pairs
    if pairs is not None and pairs.size not in (G, N):
        raise ValueError(
            f"links {links.name!r} have speeds of {pairs.size} x {pairs.size} pairs, not of {G} ranks or {N} nodes"
        )
    inside, between = links.inside_node.gigabytes_per_second, tier_of(links, N > 1).gigabytes_per_second
    speeds = np.where(node[:, None] == node, inside, between)
    if pairs is not None:
        speeds = of_pairs(pairs.gigabytes_per_second, speeds, topology)
    return (1 - np.eye(G)) / speeds


def of_pairs(rows: list[list[float]], inside: np.ndarray, topology: Topology) -> np.ndarray:
    """(G, G) figures of rank pairs from those of pairs of ranks or nodes; the latter do not say what is `inside`."""
    given, node = np.array(rows), topology.node_of
    if len(rows) == topology.ep_size:
        return given
    return np.where(node[:, None] == node, inside, given[node[:, None], node])


@dataclass(frozen=True)
class PhaseLinks:
    """The links of each phase, which may differ in their all-to-all."""

    prefill: Links
    decode: Links

    def costs(self, topology: Topology, activation: float, per_row: float) -> tuple[RowCosts, RowCosts]:
        """What a plan is charged for tokens of each phase, by its code; the same object twice if they do not differ."""
        prefill = row_costs(self.prefill, topology, activation, per_row)
        same = self.decode == self.prefill
        return prefill, prefill if same else row_costs(self.decode, topology, activation, per_row)

    def described(self) -> dict[str, dict[str, str]]:
        """Names and kinds of the all-to-alls by phase, for a plan's settings."""
        return {
            phase: {"links": links.name, "all_to_all": links.all_to_all}
            for phase, links in (("prefill", self.prefill), ("decode", self.decode))
        }


def row_costs(links: Links, topology: Topology, activation: float = LOCAL_PAIR, per_row: float = 1.0) -> RowCosts:
    """What a plan is charged on these links: rows by the kind of their all-to-all, in rows of the fastest pair."""
    seconds = seconds_per_gigabyte(links, topology)
    fastest = seconds[seconds > 0].min(initial=np.inf)
    return kind_costs(links.all_to_all, topology, seconds / fastest, activation, per_row)


def tier_of(links: Links, between: bool) -> Tier:
    tier = links.between_nodes if between else links.inside_node
    if tier is None:
        raise ValueError(f"links {links.name!r} say nothing of several nodes")
    return tier
