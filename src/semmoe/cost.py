"""Predict the time of a MoE layer from traffic and the speed of links and experts; decide whether a plan pays.

For one layer and one batch of all ranks, with b[i, j] bytes sent from rank i to rank j in dispatch (combine sends as
many rows back):

    all-to-all   the slowest rank's  max(sent, received) / bandwidth  in each tier, added over tiers, + latency
    experts      fixed + floating-point operations of the most loaded rank / speed
    layer        dispatch + experts + combine

A tier is the inside of a node or the network between nodes. `shared` links (processes on one machine) transfer the
bytes of all ranks one after the other, so their sum counts. Each layer is predicted by itself, because each has its own
busiest ranks; the mean of layers is reported. With attention TP, a plan also competes with expert parallelism without
all-to-all: every rank computes its experts for all rows, and one more all-reduce sums the results. (The all-reduce
after attention has the same bytes as the plan's reduce-scatter and all-gather, so it is left out on both sides.)

Worked example, 2 ranks, no latency, 1 GB/s, b = [[0, 3], [1, 0]] MB: rank 0 sends 3 MB and receives 1 MB, rank 1 the
reverse. Dispatch takes 3 ms, or 4 ms over shared links.
"""

from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semmoe.files import load_json
from semmoe.topology import Topology

SHIPPED = Path(__file__).parent / "links"
WORTH = 0.02  # share of a layer's time; smaller gains are below the accuracy of this model

Positive = Field(gt=0, allow_inf_nan=False)
NotNegative = Field(ge=0, allow_inf_nan=False)


class Tier(BaseModel):
    """The speed of one kind of link for one rank, which sends and receives at the same time."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dispatch_latency_us: float = NotNegative  # fixed time of an all-to-all that uses the tier
    combine_latency_us: float = NotNegative
    gigabytes_per_second: float = Positive  # in an all-to-all
    all_reduce_latency_us: float = NotNegative
    all_reduce_gigabytes_per_second: float = Positive


class Experts(BaseModel):
    """The speed at which one rank computes experts."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fixed_us: float = NotNegative
    teraflops: float = Positive


class Links(BaseModel):
    """A calibration of links and experts: written by `semmoe calibrate`, or shipped with semmoe."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    kind: Literal["measured", "nominal"]
    source: str
    inside_node: Tier
    between_nodes: Tier | None = None
    shared: bool = False
    dispatch_bytes_per_value: int = Field(ge=1, le=8)
    combine_bytes_per_value: int = Field(ge=1, le=8)
    routing_bytes: int = Field(ge=0, le=64)  # id and weight that a dispatched row carries per choice
    experts: Experts


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """The sizes of a MoE layer."""

    hidden_size: int  # H
    expert_size: int  # width of one expert's gated feed-forward network
    top_k: int

    @property
    def flops_per_pair(self) -> int:
        """Floating-point operations of gate, up and down projections for one row, two per weight."""
        return 6 * self.hidden_size * self.expert_size


@dataclass(frozen=True)
class LayerTime:
    """Time of one MoE layer and batch, in seconds."""

    dispatch: float
    experts: float
    combine: float
    all_reduce: float = 0.0  # in place of dispatch and combine

    @property
    def communication(self) -> float:
        return self.dispatch + self.combine + self.all_reduce

    @property
    def total(self) -> float:
        return self.communication + self.experts


def shipped() -> list[str]:
    """Names of the calibrations that are shipped with semmoe."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_links(name: str, num_nodes: int = 1) -> Links:
    """The calibration of a shipped name or of a file.

    Raises ValueError if there is none, if it is damaged, or if it lacks links between nodes and `num_nodes` > 1.
    """
    path = SHIPPED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there are no links called {name!r}: give a file, or one of {', '.join(shipped())}")
    links = load_json(path, Links)
    _tier(links, between=num_nodes > 1)
    return links


def dispatch_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.dispatch_bytes_per_value + shape.top_k * links.routing_bytes


def combine_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.combine_bytes_per_value


def all_to_all_bytes(rows: np.ndarray, shape: LayerShape, links: Links) -> np.ndarray:
    """(G, G) bytes that rank i sends to rank j in dispatch and combine together, from rows (G, G) dispatched."""
    return rows * dispatch_row_bytes(shape, links) + rows.T * combine_row_bytes(shape, links)


def busiest_bytes(sent: np.ndarray, shared: bool) -> float:
    """Bytes that determine the time of an all-to-all of `sent` (G, G) bytes; the diagonal is not sent.

    Over shared links all bytes, else the most that one rank sends or receives.
    """
    moved = sent * ~np.eye(len(sent), dtype=bool)
    return float(moved.sum() if shared else max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def all_reduce_bytes(tokens: float, shape: LayerShape, ranks: int, links: Links) -> float:
    """Bytes that determine the time of an all-reduce of `tokens` rows: each of n ranks sends 2 (n - 1) / n of them."""
    return 2 * (ranks - 1) / ranks * tokens * combine_row_bytes(shape, links) * (ranks if links.shared else 1)


def layer_time(
    rows: np.ndarray, busiest_pairs: float, shape: LayerShape, topology: Topology, links: Links
) -> LayerTime:
    """Time of a layer that dispatches rows (G, G) and whose busiest rank computes `busiest_pairs`."""
    dispatch = rows * float(dispatch_row_bytes(shape, links))
    combine = rows.T * float(combine_row_bytes(shape, links))
    return LayerTime(
        dispatch=_exchange_seconds(dispatch, topology, links, "dispatch_latency_us"),
        experts=_expert_seconds(busiest_pairs, shape, links),
        combine=_exchange_seconds(combine, topology, links, "combine_latency_us"),
    )


def all_reduce_time(
    tokens: float, busiest_pairs: float, shape: LayerShape, topology: Topology, links: Links
) -> LayerTime:
    """Time of a layer without all-to-all: experts on all `tokens` rows of the batch, summed by an all-reduce.

    On N nodes of S ranks, the same as in communication libraries: rows are summed inside each node, each rank exchanges
    1/S of the sums with the other nodes, and the result is shared inside each node.
    """
    N, S = topology.num_nodes, topology.ep_size // topology.num_nodes
    seconds = 0.0
    for ranks, rows, between in ((S, tokens, False), (N, tokens / S, True)):
        if ranks > 1:
            tier = _tier(links, between)
            moved = all_reduce_bytes(rows, shape, ranks, links)
            seconds += moved / (tier.all_reduce_gigabytes_per_second * 1e9) + tier.all_reduce_latency_us * 1e-6
    return LayerTime(0.0, _expert_seconds(busiest_pairs, shape, links), 0.0, seconds)


def _expert_seconds(busiest_pairs: float, shape: LayerShape, links: Links) -> float:
    return links.experts.fixed_us * 1e-6 + busiest_pairs * shape.flops_per_pair / (links.experts.teraflops * 1e12)


def _tier(links: Links, between: bool) -> Tier:
    tier = links.between_nodes if between else links.inside_node
    if tier is None:
        raise ValueError(f"links {links.name!r} say nothing of several nodes")
    return tier


def _exchange_seconds(sent: np.ndarray, topology: Topology, links: Links, latency: str) -> float:
    """Time of an all-to-all of `sent` (G, G) bytes in seconds; a tier that carries nothing takes no time."""
    node = topology.node_of
    same, total = node[:, None] == node, 0.0
    for between in (False, True):
        busiest = busiest_bytes(sent * (same != between), links.shared)
        if busiest > 0:
            tier = _tier(links, between)
            total += busiest / (tier.gigabytes_per_second * 1e9) + getattr(tier, latency) * 1e-6
    return total


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one method on held-out batches, as the mean of layers."""

    method: str
    rows: np.ndarray  # (G, G) rows dispatched per batch, mean of layers
    busiest_pairs: float  # (token, expert) pairs of the busiest rank, mean of layers
    time: LayerTime


def predict(
    method: str, rows: np.ndarray, busiest_pairs: np.ndarray, shape: LayerShape, topology: Topology, links: Links
) -> Prediction:
    """Predict from the rows (L, G, G) that each layer dispatches per batch and the pairs (L,) of its busiest rank."""
    times = [layer_time(r, p, shape, topology, links) for r, p in zip(rows, busiest_pairs, strict=True)]
    mean = LayerTime(*np.mean([astuple(time) for time in times], axis=0).tolist())
    return Prediction(method=method, rows=rows.mean(axis=0), busiest_pairs=float(busiest_pairs.mean()), time=mean)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Whether a plan pays, and why."""

    worth_it: bool
    gain: float  # share of the best alternative's layer time that the plan saves; negative if it is slower
    against: str  # name of the best alternative
    sentence: str


def verdict(plan: Prediction, others: list[Prediction], without_all_to_all: LayerTime | None = None) -> Verdict:
    """Whether `plan` beats the best of `others` (at least one) and expert parallelism without all-to-all, if given."""
    rivals = [(other.method, other.time) for other in others]
    if without_all_to_all is not None:
        rivals.append(("expert parallelism without all-to-all", without_all_to_all))
    name, best = min(rivals, key=lambda rival: rival[1].total)
    gain = 1 - plan.time.total / best.total if best.total > 0 else 0.0
    reason = _reason(plan.time, best, gain)
    changes = (
        f"communication {_change(plan.time.communication - best.communication)}, "
        f"experts {_change(plan.time.experts - best.experts)} per layer, against {name}"
    )
    return Verdict(worth_it=gain >= WORTH, gain=gain, against=name, sentence=f"{reason} ({changes})")


def _reason(plan: LayerTime, best: LayerTime, gain: float) -> str:
    saved = best.communication - plan.communication
    if gain >= WORTH:
        return f"worth it: a MoE layer takes {gain:.1%} less time"
    if best.communication == plan.communication == 0:
        return "not worth it: nothing travels between ranks"
    if saved <= 0:
        return "not worth it: these links carry the plan's traffic no faster"
    if gain <= 0 or saved >= WORTH * best.total:  # without the imbalance it would be worth it
        return "not worth it: what locality saves, its imbalance of expert load costs"
    return f"not worth it: it saves {gain:.1%} of a MoE layer's time, less than {WORTH:.0%}"


def _change(seconds: float) -> str:
    return f"{abs(seconds) * 1e6:,.0f} us {'less' if seconds <= 0 else 'more'}"


def microseconds(time: LayerTime) -> dict[str, float]:
    """The parts of a layer's time and their sums in microseconds, for JSON."""
    parts = {f"{name}_us": seconds * 1e6 for name, seconds in asdict(time).items()}
    return {**parts, "all_to_all_us": (time.dispatch + time.combine) * 1e6, "layer_us": time.total * 1e6}
