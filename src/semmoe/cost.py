"""Metrics + what links and experts cost -> predicted time of a MoE layer, and the verdict whether a plan pays.

One layer, one batch of all ranks, bytes b[i, j] from rank i to rank j in dispatch (combine sends as many rows back):

    all-to-all   the slowest rank's  max(sent, received) / bandwidth  in each tier, added over tiers, + latency
    experts      fixed + floating-point operations of the most loaded rank / speed
    layer        dispatch + experts + combine

A tier is the inside of a node or the network between nodes. `shared` links (processes on one machine) pass all ranks'
bytes one after the other, so that their sum counts. A model's layers are predicted one by one, since each has busy
ranks of its own; their mean is what is reported. In attention-TP a plan competes with expert parallelism without
all-to-all as well: there every rank computes its experts for all rows, and one more all-reduce joins them. (The
all-reduce after attention is the plan's reduce-scatter and all-gather: equal bytes, left out on both sides.)

Worked example, 2 ranks, no latency, 1 GB/s, b = [[0, 3], [1, 0]] MB: rank 0 sends 3 and receives 1, rank 1 the other
way round: dispatch takes 3 ms; over shared links 4 ms.
"""

from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semmoe.files import load_json
from semmoe.topology import Topology

SHIPPED = Path(__file__).parent / "links"
WORTH = 0.02  # of a layer's time: gains below that are lost in what the model leaves out

Positive = Field(gt=0, allow_inf_nan=False)
NotNegative = Field(ge=0, allow_inf_nan=False)


class Tier(BaseModel):
    """What one kind of link does for one rank, which sends and receives at the same time."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dispatch_latency_us: float = NotNegative  # of an all-to-all that uses the tier, whatever it carries
    combine_latency_us: float = NotNegative
    gigabytes_per_second: float = Positive  # of an all-to-all
    all_reduce_latency_us: float = NotNegative
    all_reduce_gigabytes_per_second: float = Positive


class Experts(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    fixed_us: float = NotNegative
    teraflops: float = Positive  # of one rank


class Links(BaseModel):
    """A calibration: JSON that `semmoe calibrate` writes, or one that is shipped."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    kind: Literal["measured", "nominal"]
    source: str
    inside_node: Tier
    between_nodes: Tier | None = None
    shared: bool = False
    dispatch_bytes_per_value: int = Field(ge=1, le=8)
    combine_bytes_per_value: int = Field(ge=1, le=8)
    routing_bytes: int = Field(ge=0, le=64)  # that a dispatched row carries for each of its K choices: id and weight
    experts: Experts


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """What a MoE layer's rows and experts measure."""

    hidden_size: int  # H
    expert_size: int  # width of one expert's gated feed-forward network
    top_k: int

    @property
    def flops_per_pair(self) -> int:
        """Gate, up and down projections of one row, two operations a weight."""
        return 6 * self.hidden_size * self.expert_size


@dataclass(frozen=True)
class LayerTime:
    """Seconds of one MoE layer and batch."""

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
    """Names of the calibrations that come with semmoe."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_links(name: str, num_nodes: int = 1) -> Links:
    """A shipped calibration by its name, or a file.

    Raises ValueError if there is none, it is damaged, or it says nothing of links between as many nodes.
    """
    path = SHIPPED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        if not path.is_file():
            raise ValueError(f"there are no links called {name!r}: a file, or one of {', '.join(shipped())}")
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
    """What the time of an all-to-all of `sent` (G, G) bytes goes by; the diagonal stays at home."""
    moved = sent * ~np.eye(len(sent), dtype=bool)
    return float(moved.sum() if shared else max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def all_reduce_bytes(tokens: float, shape: LayerShape, ranks: int, links: Links) -> float:
    """What the time of an all-reduce of `tokens` rows over `ranks` goes by: 2 (n - 1) / n of the rows, from each."""
    return 2 * (ranks - 1) / ranks * tokens * combine_row_bytes(shape, links) * (ranks if links.shared else 1)


def layer_time(
    rows: np.ndarray, busiest_pairs: float, shape: LayerShape, topology: Topology, links: Links
) -> LayerTime:
    """Time of a layer that dispatches rows (G, G) and whose most loaded rank computes `busiest_pairs`."""
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
    """Time of a layer without all-to-all: experts on all `tokens` rows of the batch, joined by an all-reduce.

    On N nodes of S ranks, as libraries do it: rows are summed inside nodes, each rank exchanges its S-th of the sums
    with the other nodes, and shares the result inside its own.
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
    """Seconds of an all-to-all of `sent` (G, G) bytes; a tier that carries nothing costs nothing."""
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
    """A method's mean layer on held-out batches."""

    method: str
    rows: np.ndarray  # (G, G) dispatched in a batch, mean of layers
    busiest_pairs: float  # of the most loaded rank, mean of layers
    time: LayerTime


def predict(
    method: str, rows: np.ndarray, busiest_pairs: np.ndarray, shape: LayerShape, topology: Topology, links: Links
) -> Prediction:
    """From the rows (L, G, G) that each layer dispatches in a batch and the pairs (L,) of its most loaded rank."""
    times = [layer_time(r, p, shape, topology, links) for r, p in zip(rows, busiest_pairs, strict=True)]
    mean = LayerTime(*np.mean([astuple(time) for time in times], axis=0).tolist())
    return Prediction(method=method, rows=rows.mean(axis=0), busiest_pairs=float(busiest_pairs.mean()), time=mean)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    worth_it: bool
    gain: float  # share of the best alternative's layer time that the plan saves; negative if it loses
    against: str  # the best alternative
    sentence: str


def verdict(plan: Prediction, others: list[Prediction], without_all_to_all: LayerTime | None = None) -> Verdict:
    """Whether `plan` pays over the best of `others` (at least one), and of expert parallelism without all-to-all."""
    rivals = [(other.method, other.time) for other in others]
    if without_all_to_all is not None:
        rivals.append(("expert parallelism without all-to-all", without_all_to_all))
    name, best = min(rivals, key=lambda rival: rival[1].total)
    gain = 1 - plan.time.total / best.total if best.total > 0 else 0.0
    reason = _reason(plan.time, best, gain)
    changes = (
        f"communication {_change(plan.time.communication - best.communication)}, "
        f"experts {_change(plan.time.experts - best.experts)} a layer, against {name}"
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
    if gain <= 0 or saved >= WORTH * best.total:  # it would be worth it if experts took no longer
        return "not worth it: what locality saves, its imbalance of expert load costs"
    return f"not worth it: it saves {gain:.1%} of a MoE layer's time, less than {WORTH:.0%}"


def _change(seconds: float) -> str:
    return f"{abs(seconds) * 1e6:,.0f} us {'less' if seconds <= 0 else 'more'}"


def microseconds(time: LayerTime) -> dict[str, float]:
    """For JSON: by part, and their sum."""
    parts = {f"{name}_us": seconds * 1e6 for name, seconds in asdict(time).items()}
    return {**parts, "all_to_all_us": (time.dispatch + time.combine) * 1e6, "layer_us": time.total * 1e6}
