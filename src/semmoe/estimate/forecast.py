"""Time of a decoding step and of a prefill, for vanilla, EPLB and a plan; what follows from them.

    step        of every MoE layer: compute + dispatch + combine; of every dense layer: compute; the output head once
    overlapped  a batch in two halves that take turns: of every MoE layer twice the longer of compute and communication
                of a half. DeepEP's normal mode takes 20 of 132 SMs for itself, its low-latency mode none.
    throughput  requests of a GPU / time per output token

Communication is that of `cost.py` on the given links, where every rank sends and receives the same.
"""

from dataclasses import dataclass, replace

from semmoe import cost
from semmoe.calibration import Links, tier_of
from semmoe.estimate import roofline
from semmoe.estimate.hardware import COMMUNICATING, FITTED_ON, HOOKED_ON, Gpu
from semmoe.estimate.model import Latent, ModelSizes
from semmoe.estimate.roofline import HEAD, ROUTED, Parts, Work
from semmoe.estimate.routing import Routing
from semmoe.estimate.settings import EstimateSettings
from semmoe.topology import Topology

DISPATCH, COMBINE, ALL_REDUCE, SMS = "dispatch", "combine", "all-reduces", "SMs of communication"
HOOKS = "semmoe's own kernels"
TRAVELS = (DISPATCH, COMBINE, ALL_REDUCE)
EXTRAPOLATED_FROM = 128  # ranks
FITTED_NODES = 4  # that shipped links were held against


@dataclass(frozen=True, kw_only=True)
class Outside:
    """The parts of a pass that another performance model says, in seconds of all layers, with their labels."""

    seconds: Parts
    labels: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, what it runs on and what is asked of it."""

    model: ModelSizes
    gpu: Gpu
    topology: Topology
    links: Links  # of prefill
    decode_links: Links
    settings: EstimateSettings
    outside: dict[bool, Outside] | None = None  # by whether it is decoding; in place of parts of the roofline

    def links_of(self, decode: bool) -> Links:
        return self.decode_links if decode else self.links


@dataclass(frozen=True)
class Pass:
    """Seconds of a decoding step or a prefill on the busiest rank."""

    parts: Parts  # of all layers
    hidden: float = 0.0  # of communication or compute, by overlap

    @property
    def communication(self) -> float:
        return sum(self.parts.get(name, 0.0) for name in TRAVELS)

    @property
    def exposed(self) -> float:
        """The share of the time in which nothing but communication happens."""
        return (self.communication - min(self.hidden, self.communication)) / self.total

    @property
    def total(self) -> float:
        return sum(self.parts.values()) - self.hidden


def work_of(case: Case, routing: Routing, decode: bool) -> Work:
    """What a rank does in a step, halfway through the answers, or in a prefill."""
    asked, topology = case.settings, case.topology
    requests = asked.batch if decode else asked.prompts
    return Work(
        decode=decode,
        rows=requests if decode else requests * asked.input_length,
        requests=requests,
        context=asked.input_length + asked.output_length / 2 if decode else (asked.input_length + 1) / 2,
        attn_ranks=topology.attn_tp_size,
        ep_size=topology.ep_size,
        local_experts=(case.model.num_experts + routing.redundant_experts) / topology.ep_size,
        kept_bytes=asked.kept_bytes,
    )


def run(case: Case, routing: Routing, decode: bool) -> Pass:
    """Time of a pass of one method."""
    work, halves = work_of(case, routing, decode), 2 if case.settings.overlap else 1
    work = work.half() if case.settings.overlap else work
    computed, elsewhere = _computed(case, work, routing)
    sent = _sent(case, work, routing)
    if routing.hooked:
        own = cost.hooks(work.rows * work.ep_size, case.topology, routing.redundant_experts > 0)
        computed[HOOKS] = own * case.model.moe_layers
    if case.settings.overlap and case.links_of(decode).all_to_all == "per-node" and DISPATCH in sent:
        computed[SMS] = sum(computed.values()) * COMMUNICATING / (1 - COMMUNICATING)
    hidden = min(sum(computed.values()), sum(sent.values())) if case.settings.overlap else 0.0
    parts = _sum(*[computed, elsewhere, sent] * halves)
    parts[HEAD] = roofline.head(case.model, work_of(case, routing, decode), case.gpu)
    return Pass({name: seconds for name, seconds in parts.items() if seconds > 0}, halves * hidden)


def _computed(case: Case, work: Work, routing: Routing) -> tuple[Parts, Parts]:
    """Seconds of the parts of all MoE layers, and of all dense layers; of another performance model where it says."""
    model, gpu = case.model, case.gpu
    if case.outside is None:
        moe, dense = (roofline.layer(model, work, kind, gpu) for kind in (True, False))
        found = _times(moe, model.moe_layers), _times(dense, model.dense_layers)
    else:
        said = case.outside[work.decode].seconds
        found = _times(said, model.moe_layers / model.num_layers), _times(said, model.dense_layers / model.num_layers)
    found[0][ROUTED] = roofline.routed(model, work, routing.load, gpu) * model.moe_layers
    return found


def _times(parts: Parts, factor: float) -> Parts:
    return {name: seconds * factor for name, seconds in parts.items()}


def _sum(*several: Parts) -> Parts:
    names = dict.fromkeys(name for parts in several for name in parts)
    return {name: sum(parts.get(name, 0.0) for parts in several) for name in names}


def _sent(case: Case, work: Work, routing: Routing) -> Parts:
    """Seconds of communication of all layers."""
    model, topology, links = case.model, case.topology, case.links_of(work.decode)
    found: Parts = {}
    if not routing.all_reduce:
        rows = routing.matrix(links.all_to_all, topology) * work.rows
        time = cost.layer_time(rows, 0.0, model.layer_shape, topology, links)
        found = {DISPATCH: time.dispatch * model.moe_layers, COMBINE: time.combine * model.moe_layers}
    if work.attn_ranks > 1:
        ranks, nodes = work.attn_ranks, max(work.attn_ranks * topology.num_nodes // topology.ep_size, 1)
        group = Topology(ep_size=ranks, num_nodes=nodes)
        one = cost.all_reduce_time(work.group_rows, 0.0, model.layer_shape, group, links).all_reduce
        found[ALL_REDUCE] = one * ((2 if routing.all_reduce else 1) * model.moe_layers + 2 * model.dense_layers)
    return found


def gain(plan: Pass, others: list[Pass]) -> float:
    """The share of the best alternative's time that a plan saves; negative if it is slower."""
    return 1 - plan.total / min(other.total for other in others)


def with_batch(case: Case, batch: int) -> Case:
    """The same with another batch. Another performance model's figures hold for one batch, so the roofline is used."""
    return replace(case, settings=replace(case.settings, batch=batch), outside=None)


def with_bandwidth(case: Case, gigabytes_per_second: float) -> Case:
    """The same on decoding links of another speed: between nodes, or inside if there is one node."""
    links, between = case.decode_links, case.topology.num_nodes > 1
    speed = {"gigabytes_per_second": gigabytes_per_second}
    tier = tier_of(links, between).model_copy(update=speed)
    changed = links.model_copy(update={"between_nodes" if between else "inside_node": tier, "pairs": None})
    return replace(case, decode_links=changed)


def label(case: Case, part: str, decode: bool) -> str:
    """How a part's figure was found: measured, fitted, nominal or extrapolated."""
    links = case.links_of(decode)
    if part in TRAVELS:
        if links.kind == "nominal" or part == ALL_REDUCE:
            return "nominal"
        return "fitted" if case.topology.num_nodes <= FITTED_NODES else "extrapolated"
    if part == HOOKS:
        return "measured" if case.gpu.name == HOOKED_ON else "extrapolated"
    if case.outside is not None and part in case.outside[decode].labels:
        return case.outside[decode].labels[part]
    fitted = case.gpu.name == FITTED_ON and isinstance(case.model.attention, Latent) and case.model.dense_bytes == 1
    return "fitted" if fitted and case.topology.ep_size < EXTRAPOLATED_FROM else "extrapolated"
