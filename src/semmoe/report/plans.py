"""The section of one plan."""

from semmoe.report import layers, maps, words
from semmoe.report.gather import Inputs, PlanFile, TraceFile
from semmoe.report.pays import pays
from semmoe.report.verdict import Pair, Replayed
from semmoe.report.view import Figure, Missing, Section


def section(inputs: Inputs, entry: PlanFile, pair: Pair | None, replayed: Replayed | None, id: str) -> Section:
    trace = trace_of(inputs, entry)
    parts: list[Figure | Missing | None] = []
    if replayed is None:
        says = "The plan holds no figures for its layers."
        parts.append(Missing("Layer by layer", says, f"semmoe solve TRACE --out {words.name(entry.path)}"))
    else:
        parts += [pays(entry.expected), layers.layers(replayed), layers.load(replayed)]
    routed = trace.trace if trace is not None else None
    placed = maps.placement(entry.plan.placement, routed, inputs.domains)
    parts += [layers.rank_pairs(pair, replayed), placed, maps.affinity(entry, trace)]
    title, attention = words.attention(entry.plan.topology), entry.plan.topology.attention
    if sum(p.plan.topology.attention == attention for p in inputs.plans) > 1:
        title += f", {words.name(entry.path)}"
    source = f" The figures of layers are replayed: {replayed.source}." if replayed else ""
    return Section(
        id=id,
        title=f"The plan for {title[0].lower()}{title[1:]}",
        short=title.removeprefix("Attention "),
        intro=_intro(entry) + source,
        parts=[part for part in parts if part is not None],
    )


def _intro(entry: PlanFile) -> str:
    t, f = entry.plan.topology, entry.plan.fingerprint
    groups = f"{words.count(t.dp_size, 'attention group')} of {words.count(t.attn_tp_size, 'rank')}"
    redundant = words.count(entry.plan.placement.redundant_experts, "redundant expert")
    return (
        f"{words.count(t.ep_size, 'rank')}, {groups}, {words.count(t.num_nodes, 'node')}; {f.num_layers} MoE layers of "
        f"{f.num_experts} experts, {f.top_k} per token, {redundant}; method {words.name(entry.plan.method)}."
    )


def trace_of(inputs: Inputs, entry: PlanFile) -> TraceFile | None:
    """The trace that a plan was solved on, else one of the same model, else None."""
    fits = [t for t in inputs.traces if entry.plan.fingerprint.mismatch(t.trace.fingerprint) is None]
    own = [t for t in fits if t.digest == entry.plan.trace_hash]
    return next(iter([*own, *fits]), None)
