"""Metrics + what links and experts cost -> predicted time of a MoE layer, and the verdict whether a plan pays.

One layer, one batch of all ranks, bytes b[i, j] from rank i to rank j in dispatch (combine sends as many rows back):

    all-to-all   the slowest rank's  max(sent, received) / bandwidth  in each tier, added over tiers, + latency
    experts      fixed + floating-point operations of the most loaded rank / speed
    layer        dispatch + experts + combine

A tier is the inside of a node or the network between nodes. `shared` links (processes on one machine) pass all ranks'
bytes one after the other, so that their sum counts. In attention-TP a plan competes with expert parallelism without
all-to-all as well: there every rank computes its experts for all rows, and one more all-reduce joins them.

Worked example, 2 ranks, no latency, 1 GB/s, b = [[0, 3], [1, 0]] MB: rank 0 sends 3 and receives 1, rank 1 the other
way round: 3 ms each way; shared, 4 ms.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from semmoe.core import Topology, require
from semmoe.files import load_json

SHIPPED = Path(__file__).parent / "links"
WORTH = 0.02  # of a layer's time: gains below that are lost in what the model leaves out

Positive = Field(gt=0, allow_inf_nan=False)
NotNegative = Field(ge=0, allow_inf_nan=False)


class Tier(BaseModel):
    """What one kind of link does for one rank."""

    model_config = ConfigDict(extra="forbid", strict=True)
    dispatch_latency_us: float = NotNegative  # of an all-to-all that uses the tier, whatever it carries
    combine_latency_us: float = NotNegative
    all_reduce_latency_us: float = NotNegative
    gigabytes_per_second: float = Positive  # that a rank sends, and receives at the same time


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
    def all_to_all(self) -> float:
        return self.dispatch + self.combine

    @property
    def total(self) -> float:
        return self.dispatch + self.experts + self.combine + self.all_reduce


def shipped() -> list[str]:
    """Names of the calibrations that come with semmoe."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def load_links(name: str) -> Links:
    """A shipped calibration by its name, or a file. Raises ValueError if there is none or it is damaged."""
    path = SHIPPED / f"{name}.json"
    if not path.is_file():
        path = Path(name)
        require(path.is_file(), f"there are no links called {name!r}: a file, or one of {', '.join(shipped())}")
    return load_json(path, Links)


def dispatch_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.dispatch_bytes_per_value + shape.top_k * links.routing_bytes


def combine_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.combine_bytes_per_value


def all_to_all_bytes(rows: np.ndarray, shape: LayerShape, links: Links) -> np.ndarray:
    """(G, G) bytes that rank i sends to rank j in dispatch and combine together, from rows (G, G) dispatched."""
    return rows * dispatch_row_bytes(shape, links) + rows.T * combine_row_bytes(shape, links)


def layer_time(
    rows: np.ndarray, busiest_pairs: float, shape: LayerShape, topology: Topology, links: Links
) -> LayerTime:
    """Time of a layer that dispatches rows (G, G) and whose most loaded rank computes `busiest_pairs`."""
    dispatch = rows * float(dispatch_row_bytes(shape, links))
    combine = rows.T * float(combine_row_bytes(shape, links))
    return LayerTime(
        dispatch=_exchange_seconds(dispatch, topology, links, "dispatch_latency_us"),
        experts=links.experts.fixed_us * 1e-6 + busiest_pairs * shape.flops_per_pair / (links.experts.teraflops * 1e12),
        combine=_exchange_seconds(combine, topology, links, "combine_latency_us"),
    )


def all_reduce_time(
    tokens: float, busiest_pairs: float, shape: LayerShape, topology: Topology, links: Links
) -> LayerTime:
    """Time of a layer without all-to-all: experts on all `tokens` rows of the batch, joined by an all-reduce."""
    G, nodes = topology.ep_size, topology.num_nodes
    sent = 2 * (G - 1) / G * tokens * combine_row_bytes(shape, links) * (G if links.shared else 1)
    tier = _tier(links, between=nodes > 1)
    seconds = sent / (tier.gigabytes_per_second * 1e9) + tier.all_reduce_latency_us * 1e-6 if G > 1 else 0.0
    experts = layer_time(np.zeros((G, G)), busiest_pairs, shape, topology, links).experts
    return LayerTime(dispatch=0.0, experts=experts, combine=0.0, all_reduce=seconds)


def _tier(links: Links, between: bool) -> Tier:
    if not between:
        return links.inside_node
    require(links.between_nodes is not None, f"links {links.name!r} say nothing of several nodes")
    assert links.between_nodes is not None
    return links.between_nodes


def _exchange_seconds(sent: np.ndarray, topology: Topology, links: Links, latency: str) -> float:
    """Seconds of an all-to-all of `sent` (G, G) bytes; the diagonal stays at home."""
    node = np.arange(topology.ep_size) // (topology.ep_size // topology.num_nodes)
    same, total = node[:, None] == node, 0.0
    moved = sent * ~np.eye(len(sent), dtype=bool)
    for between in (False, True):
        part = moved * (same != between)
        if not part.any():
            continue
        tier = _tier(links, between)
        busiest = part.sum() if links.shared else max(part.sum(axis=0).max(), part.sum(axis=1).max())
        total += busiest / (tier.gigabytes_per_second * 1e9) + getattr(tier, latency) * 1e-6
    return float(total)


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A method's mean layer on held-out batches."""

    method: str
    rows: np.ndarray  # (G, G) dispatched, mean of batches and layers
    busiest_pairs: float  # of the most loaded rank, mean of batches and layers
    tokens: float  # of a batch
    time: LayerTime


def predict(method: str, replayed: dict[str, Any], shape: LayerShape, topology: Topology, links: Links) -> Prediction:
    """From what `ReplayResult.as_dict` says; all of its batches and layers count alike."""
    layers, tokens = len(replayed["layers"]), replayed["tokens_per_batch"]
    rows = np.array(replayed["rows_per_rank_pair"], np.float64) / (layers * replayed["num_batches"])
    busiest = replayed["load_max_over_mean"] * tokens * shape.top_k / topology.ep_size
    time = layer_time(rows, busiest, shape, topology, links)
    return Prediction(method=method, rows=rows, busiest_pairs=busiest, tokens=tokens, time=time)


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
    moved = best.all_to_all + best.all_reduce - plan.time.all_to_all - plan.time.all_reduce
    computed = plan.time.experts - best.experts
    why = f"communication {_change(moved)}, experts {_change(-computed)} a layer, against {name}"
    worth = gain >= WORTH
    if worth:
        sentence = f"worth it: a MoE layer takes {gain:.1%} less time ({why})"
    elif moved > 0 and computed > moved * (1 - WORTH):
        sentence = f"not worth it: what locality saves, its imbalance of expert load costs ({why})"
    elif moved <= 0:
        sentence = f"not worth it: these links carry the plan's traffic no faster ({why})"
    else:
        sentence = f"not worth it: it saves {gain:.1%} of a MoE layer's time, less than {WORTH:.0%} ({why})"
    return Verdict(worth_it=worth, gain=gain, against=name, sentence=sentence)


def _change(seconds: float) -> str:
    return f"{abs(seconds) * 1e6:,.0f} us {'less' if seconds >= 0 else 'more'}"


def as_dict(prediction: Prediction) -> dict[str, Any]:
    """For JSON: microseconds by part."""
    parts = {f"{name}_us": seconds * 1e6 for name, seconds in asdict(prediction.time).items()}
    return {**parts, "all_to_all_us": prediction.time.all_to_all * 1e6, "layer_us": prediction.time.total * 1e6}
