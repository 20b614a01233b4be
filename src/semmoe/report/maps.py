"""Two maps of a plan: which rank holds which experts, and which tokens use them."""

from collections import Counter
from dataclasses import dataclass

import numpy as np

from semmoe.core import Placement, RoutingTrace
from semmoe.report import experts, figures, words
from semmoe.report.gather import PlanFile, TraceFile
from semmoe.report.view import Figure, Key, Missing, Panel, Scale, Table

MOST_TOKENS = 240  # rows of the affinity map
MOST_LISTED = 50  # rows of its table, which would otherwise be most of the page's text


@dataclass(frozen=True)
class Colouring:
    """What the colours of experts mean. of_expert (L, E): an index of `names`, or any value if there are no names."""

    of_expert: np.ndarray
    names: list[str]
    colours: list[str]
    says: str
    scale: str = ""  # what the values are, if there are no names


def placement(place: Placement, trace: RoutingTrace | None, domains: list[str] | None = None) -> Figure:
    """Experts by rank for each layer, copies marked. domains: the kind of text of each request of the trace."""
    slots = place.physical_to_logical_map.astype(np.int64)
    chosen = _colouring(place, trace, domains)
    colour_of = np.take_along_axis(chosen.of_expert, slots, axis=1)
    copies = np.take_along_axis(place.logical_replica_count, slots, axis=1) > 1
    about = _about(place, copies, colour_of, chosen.names)
    spec = figures.placement_map(slots, place.ep_size, colour_of, chosen.colours, about, copies)
    keys = [Key(name, colour) for name, colour in zip(chosen.names, chosen.colours, strict=True)]
    keys += [Key("has a copy on another rank", "ink", "round")] if copies.any() else []
    scale = None if chosen.names else Scale(f"{colour_of.min():.3g}", f"{colour_of.max():.3g}", chosen.scale)
    label = (
        f"{words.count(slots.shape[1], 'expert')} of {words.count(len(slots), 'layer')} on {place.ep_size} ranks, "
        f"{place.redundant_experts} of them copies; the table below lists all of them"
    )
    return Figure(
        title="Where experts are",
        says=f"A row is a layer, a block a rank, a cell an expert. {chosen.says}",
        panels=[Panel("", spec, label)],
        tables=[_placement_table(place, about)],
        keys=keys,
        scale=scale,
    )


def _colouring(place: Placement, trace: RoutingTrace | None, domains: list[str] | None) -> Colouring:
    """By the kind of text that uses an expert, else by its load, else by the rank that holds it in vanilla."""
    L = len(place.physical_to_logical_map)
    if trace is None:
        of_expert = np.tile(np.arange(place.num_experts) * place.ep_size // place.num_experts, (L, 1)).astype(float)
        says = "The shade is the rank that holds an expert in vanilla, which places experts in order of their numbers."
        return Colouring(of_expert, [], [], says, "rank in vanilla")
    kinds = kinds_of_requests(domains, trace.num_requests)
    if kinds is None:
        says = "The shade is how much an expert is used, over its layer's mean: no rank should hold only busy experts."
        load = experts.load_over_mean(trace.expert_ids, place.num_experts)
        return Colouring(load, [], [], says, "load over mean")
    names, of_request = kinds
    of_token = of_request[trace.request_of_token()]
    kind = experts.uses(trace.expert_ids, of_token, len(names), place.num_experts).kind
    says = (
        "The colour is the kind of text that uses an expert most, or grey if it uses the expert less than "
        f"{experts.EVEN} times as much as the average kind. A rank of few colours serves few kinds of text."
    )
    colours = [*figures.KINDS[: len(names)], figures.EVEN_COLOUR]
    return Colouring(np.where(kind < 0, len(names), kind), [*names, "none in particular"], colours, says)


def kinds_of_requests(domains: list[str] | None, num_requests: int) -> tuple[list[str], np.ndarray] | None:
    """Names of kinds, and the kind (R,) of each request; the rarest beyond seven are merged.

    None if `domains` does not name a kind for each request.
    """
    if domains is None or len(domains) != num_requests:
        return None
    most = len(figures.KINDS)
    common = [kind for kind, _ in Counter(domains).most_common()]
    kept = sorted(common if len(common) <= most else common[: most - 1])
    names = [words.name(kind) for kind in kept] + (["others"] if len(common) > most else [])
    index = {kind: i for i, kind in enumerate(kept)}
    return names, np.array([index.get(kind, len(names) - 1) for kind in domains])


def _about(place: Placement, copies: np.ndarray, colour_of: np.ndarray, names: list[str]) -> np.ndarray:
    """(L, P) description of the expert in each slot: its number, its kind, and whether it has a copy."""
    slots = place.physical_to_logical_map
    out = np.empty(slots.shape, dtype=object)
    for l, p in np.ndindex(*slots.shape):
        kind = f" {names[int(colour_of[l, p])]}" if names and int(colour_of[l, p]) < len(names) - 1 else ""
        out[l, p] = f"{slots[l, p]}{kind}{' (copied)' if copies[l, p] else ''}"
    return out


def _placement_table(place: Placement, about: np.ndarray) -> Table:
    rows = [
        [f"layer {l}", *("; ".join(cells) for cells in np.array_split(row, place.ep_size))]
        for l, row in enumerate(about)
    ]
    return Table("Experts of each rank", ["layer", *(f"rank {g}" for g in range(place.ep_size))], rows)


def affinity(entry: PlanFile, found: TraceFile | None) -> Figure | Missing:
    """Tokens against experts: the middle layer in the model's own order, then three layers in the plan's order."""
    if found is None:
        says = "It needs a trace of the plan's model in the directory."
        return Missing("Which tokens use which experts", says, "semmoe profile MODEL --out DIR/trace")
    L = entry.plan.fingerprint.num_layers
    maps = {l: experts.token_map(found.trace, entry.plan.placement, l, MOST_TOKENS) for l in sorted({0, L // 2, L - 1})}
    high = max(float(m.shares.max()) for m in maps.values())
    panels = [_unordered(L // 2, maps[L // 2], high), *(_ordered(l, m, high) for l, m in maps.items())]
    profiled = (
        "the plan was solved on it" if found.digest == entry.plan.trace_hash else "the plan was solved on another"
    )
    return Figure(
        title="Which tokens use which experts",
        says=f"The {len(maps[0].tokens)} most frequent tokens (rows) of {words.name(found.path)} ({profiled}) and how "
        "much each uses each expert (columns): first as the model numbers them, then sorted by rank, where a token "
        "belongs to the rank that holds most of what it uses. Blocks on the diagonal can stay on their rank; the share "
        f"is in brackets.{_limits(entry)}",
        panels=panels,
        tables=[_token_table(l, m) for l, m in maps.items()],
        scale=Scale("0", f"{high:.2f}", "share of a token's choices (square-root scale)"),
        columns=4 if entry.plan.fingerprint.num_experts <= 64 else 2,
    )


def _limits(entry: PlanFile) -> str:
    """A caveat where attention keeps tokens of a request together."""
    if entry.plan.topology.attn_tp_size > 1:
        return ""
    return " With attention DP whole requests go to a rank, not single tokens, so the real share is lower."


def _unordered(layer: int, m: experts.TokenMap, high: float) -> Panel:
    shares = m.shares[np.argsort(m.tokens)][:, np.argsort(m.experts)]
    none = np.zeros(0, np.int64)
    spec = figures.affinity_map(shares, none, none, high)
    return Panel(f"Layer {layer}, as numbered", spec, f"Tokens against experts of layer {layer}, in order of numbers")


def _ordered(layer: int, m: experts.TokenMap, high: float) -> Panel:
    home = f"{np.average(m.at_home, weights=m.occurrences):.0%}".replace("%", "\u00a0%")
    spec = figures.affinity_map(m.shares, m.rank_of_expert, m.ranks, high)
    label = f"Layer {layer} sorted by rank: {home} of these tokens' choices are experts on the token's own rank"
    return Panel(f"Layer {layer}, by rank ({home})", spec, label)


def _token_table(layer: int, m: experts.TokenMap) -> Table:
    """The most frequent tokens in the map's order, each with its rank and the three experts that it uses most."""
    top = np.argsort(-m.shares, axis=1, kind="stable")[:, :3]
    rows = []
    for i in np.sort(np.argsort(-m.occurrences, kind="stable")[:MOST_LISTED]):
        used = ", ".join(f"{m.experts[e]} ({m.shares[i, e]:.2f})" for e in top[i])
        rows.append([str(m.tokens[i]), str(m.ranks[i]), f"{m.at_home[i]:.3f}", f"{m.occurrences[i]:,}", used])
    columns = ["token id", "rank", "share at home", "occurrences", "most used experts (share)"]
    return Table(f"The {len(rows)} most frequent tokens in layer {layer}", columns, rows)
