"""Predict the time of a MoE layer from traffic and the speed of links and experts; decide whether a plan pays.

For one layer and one batch of all ranks, with b[i, j] bytes sent from rank i to rank j in dispatch (combine sends as
many rows back):

    all-to-all   in each tier the slowest rank's  max(sending, receiving), where b[i, j] bytes take b[i, j] / bandwidth;
                 the root of the sum of the tiers' squares, since rows inside nodes and between them overlap in part;
                 + latency: that of the inside, and that of the network for every doubling of the number of nodes
    experts      fixed + floating-point operations of the most loaded rank / speed
    layer        dispatch + experts + combine, and with a plan on GPUs what semmoe's own kernels take (`hooks`)

A tier is the inside of a node or the network between nodes. Which rows travel depends on the kind of the all-to-all
(`rows.hops`). How tiers overlap and how latency grows were chosen on DeepEP's measured tables of one and two nodes
and hold on four (tests/test_links.py). `shared` links (processes on one machine) transfer the bytes of all ranks one
after the other, so their sum counts. Each layer is predicted by itself, because each has its own busiest ranks; the
mean of layers is reported. With attention TP, a plan also competes with expert parallelism without all-to-all: every
rank computes its experts for all rows, and one more all-reduce sums the results. (The all-reduce after attention has
the same bytes as the plan's reduce-scatter and all-gather, so it is left out on both sides.)

Worked example, 2 ranks, no latency, 1 GB/s, b = [[0, 3], [1, 0]] MB: rank 0 sends 3 MB and receives 1 MB, rank 1 the
reverse. Dispatch takes 3 ms, or 4 ms over shared links.
"""

from dataclasses import asdict, astuple, dataclass, replace
from math import hypot, log2

import numpy as np

from semmoe.costs.links import Links, of_pairs, seconds_per_gigabyte, tier_of
from semmoe.topology import Topology

WORTH = 0.02  # share of a layer's time; smaller gains are below the accuracy of this model
GPU_TERAFLOPS = 10  # of a rank's experts: no CPU computes as fast, no GPU that serves these models as slowly
# Seconds at a layer, measured on an H100 for 8 ranks (docs/measurements.md): to count rows, to choose copies, and in
# attention-TP above both to shuffle, which takes longer with every row of the group, and less so after the first ones.
COUNTED, COPIES, SHUFFLED, SHUFFLED_ROW, SHUFFLED_MORE, FIRST_ROWS = 5.6e-6, 3.6e-6, 29e-6, 0.1e-6, 0.0155e-6, 512


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
    hooks: float = 0.0

    @property
    def communication(self) -> float:
        return self.dispatch + self.combine + self.all_reduce

    @property
    def total(self) -> float:
        return self.communication + self.experts + self.hooks


def dispatch_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.dispatch_bytes_per_value + shape.top_k * links.routing_bytes


def combine_row_bytes(shape: LayerShape, links: Links) -> int:
    return shape.hidden_size * links.combine_bytes_per_value


def all_to_all_bytes(rows: np.ndarray, shape: LayerShape, links: Links) -> np.ndarray:
    """(G, G) bytes that rank i sends to rank j in dispatch and combine together, from rows (G, G) dispatched."""
    return rows * dispatch_row_bytes(shape, links) + rows.T * combine_row_bytes(shape, links)


def busiest(sent: np.ndarray, shared: bool) -> float:
    """What determines the time of an all-to-all of `sent` (G, G), bytes or seconds; the diagonal is not sent.

    Over shared links the sum, else the most that one rank sends or receives.
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
        dispatch=exchange_seconds(dispatch, topology, links, "dispatch_latency_us"),
        experts=_expert_seconds(busiest_pairs, shape, links),
        combine=exchange_seconds(combine, topology, links, "combine_latency_us"),
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
            moved = all_reduce_bytes(rows, shape, ranks, links)
            seconds += tier_of(links, between).all_reduce_seconds(moved)
    return LayerTime(0.0, _expert_seconds(busiest_pairs, shape, links), 0.0, seconds)


def _expert_seconds(busiest_pairs: float, shape: LayerShape, links: Links) -> float:
    return links.experts.fixed_us * 1e-6 + busiest_pairs * shape.flops_per_pair / (links.experts.teraflops * 1e12)


def hooks(tokens: float, topology: Topology, copies: bool, links: Links) -> float:
    """Seconds of semmoe's own kernels at a layer on GPUs, within 15 % of measurements; 0 on links of CPUs.

    tokens: of a batch, all ranks together.
    """
    if not on_gpus(links):
        return 0.0
    shuffled = float(shuffle_seconds(np.array(tokens / topology.dp_size))) if topology.attn_tp_size > 1 else 0.0
    return COUNTED + COPIES * copies + shuffled


def on_gpus(links: Links) -> bool:
    """Whether GPUs compute the experts behind these links."""
    return links.experts.teraflops >= GPU_TERAFLOPS


def shuffle_seconds(rows: np.ndarray) -> np.ndarray:
    """Seconds that a GPU takes at a layer to shuffle a group's rows; numbers of rows of any shape, and times."""
    return SHUFFLED + SHUFFLED_ROW * np.minimum(rows, FIRST_ROWS) + SHUFFLED_MORE * np.maximum(rows - FIRST_ROWS, 0)


def exchange_seconds(sent: np.ndarray, topology: Topology, links: Links, latency: str) -> float:
    """Time of an all-to-all of `sent` (G, G) bytes in seconds; a tier that carries nothing takes no time."""
    node, doublings = topology.node_of, log2(topology.num_nodes)
    seconds = sent * seconds_per_gigabyte(links, topology) * 1e-9
    same, tiers, fixed = node[:, None] == node, [], _latency_of_pairs(sent, topology, links)
    for between in (False, True):
        tiers.append(busiest(seconds * (same != between), links.shared))
        if tiers[-1] > 0:
            fixed += getattr(tier_of(links, between), latency) * 1e-6 * (doublings if between else 1)
    return (sum(tiers) if links.shared else hypot(*tiers)) + fixed


def _latency_of_pairs(sent: np.ndarray, topology: Topology, links: Links) -> float:
    """The highest latency of a pair that carries anything, in seconds; 0 where pairs have none of their own."""
    if links.pairs is None or links.pairs.latency_us is None:
        return 0.0
    latency = of_pairs(links.pairs.latency_us, np.zeros(sent.shape), topology)
    return float(((sent > 0) * (1 - np.eye(len(sent))) * latency).max()) * 1e-6


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """The predicted time of one method on held-out batches, as the mean of layers."""

    method: str
    rows: np.ndarray  # (G, G) rows that rank i sends to rank j in dispatch per batch, mean of layers
    busiest_pairs: float  # (token, expert) pairs of the busiest rank, mean of layers
    time: LayerTime


def predict(
    method: str, rows: np.ndarray, busiest_pairs: np.ndarray, shape: LayerShape, topology: Topology, links: Links,
    hooks: float = 0.0,
) -> Prediction:  # fmt: skip
    """Predict from the rows (L, G, G) that each layer dispatches per batch and the pairs (L,) of its busiest rank."""
    times = [layer_time(r, p, shape, topology, links) for r, p in zip(rows, busiest_pairs, strict=True)]
    mean = replace(LayerTime(*np.mean([astuple(time) for time in times], axis=0).tolist()), hooks=hooks)
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
    own = f", semmoe's own kernels {_change(plan.time.hooks)}" if plan.time.hooks else ""
    changes = (
        f"communication {_change(plan.time.communication - best.communication)}, "
        f"experts {_change(plan.time.experts - best.experts)}{own} per layer, against {name}"
    )
    return Verdict(worth_it=gain >= WORTH, gain=gain, against=name, sentence=f"{reason} ({changes})")


def end_to_end(share: float, saving: float) -> float:
    """Return how many times as fast a pass is when `saving` of its communication time, `share` of its time, is saved.

    This is Amdahl's law. Worked example: of a share of 0.4 a plan saves 0.3, so 1 / (1 - 0.4 * 0.3) = 1.136.
    """
    return 1 / (1 - share * saving)


def _reason(plan: LayerTime, best: LayerTime, gain: float) -> str:
    saved = best.communication - plan.communication
    if gain >= WORTH:
        return f"worth it: a MoE layer takes {gain:.1%} less time"
    if best.communication == plan.communication == 0:
        return "not worth it: nothing travels between ranks"
    if saved <= 0:
        return "not worth it: these links carry the plan's traffic no faster"
    if gain + plan.hooks / best.total >= WORTH:
        return "not worth it: what locality saves, semmoe's own kernels cost"
    if gain <= 0 or saved >= WORTH * best.total:  # without the imbalance it would be worth it
        return "not worth it: what locality saves, its imbalance of expert load costs"
    return f"not worth it: it saves {gain:.1%} of a MoE layer's time, less than {WORTH:.0%}"


def _change(seconds: float) -> str:
    return f"{abs(seconds) * 1e6:,.0f} us {'less' if seconds <= 0 else 'more'}"


def microseconds(time: LayerTime) -> dict[str, float]:
    """The parts of a layer's time and their sums in microseconds, for JSON."""
    parts = {f"{name}_us": seconds * 1e6 for name, seconds in asdict(time).items()}
    return {**parts, "all_to_all_us": (time.dispatch + time.combine) * 1e6, "layer_us": time.total * 1e6}
