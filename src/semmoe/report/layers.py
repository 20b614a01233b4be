"""Figures of a plan's layers and ranks, vanilla beside plan: activation, remote ranks, load, bytes per rank pair."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from semmoe.report import figures, words
from semmoe.report.verdict import Pair, Replayed
from semmoe.report.view import Figure, Key, Missing, Panel, Scale, Table
from semmoe.report.words import LAR, LOAD, REMOTE, Column, cells
from semmoe.results import Figures, Layer

VANILLA, PLAN, PREDICTED = Key("vanilla", "vanilla"), Key("plan", "plan"), Key("predicted", "predicted", "diamond")
MOST_PAIRS = 32  # ranks up to which a table has every pair
PREDICTED_LAR: Column = ("LAR predicted", "predicted_lar", words.share)


def layers(replayed: Replayed) -> Figure:
    """LAR, remote ranks and load of each layer."""
    mine, vanilla, limit = replayed.plan.layers, replayed.vanilla, replayed.load_limit
    theirs = vanilla.layers if vanilla and len(vanilla.layers) == len(mine) else None
    predicted = [layer.predicted_lar for layer in mine if layer.predicted_lar is not None]
    marks = predicted if len(predicted) == len(mine) else None
    ranks = len(mine[0].load_per_rank)
    panels = [
        _panel(LAR, mine, theirs, predicted=marks, baseline=1 / ranks if ranks else None),
        _panel(REMOTE, mine, theirs, digits=2),
        _panel(LOAD, mine, theirs, baseline=limit, digits=2, dash="dash"),
    ]
    keys = [*([VANILLA] if theirs else []), PLAN, *([PREDICTED] if predicted else [])]
    keys += [Key("chance: 1 / ranks", "muted", "dot")] if ranks else []
    keys += [Key(f"load limit {limit:g}, of the mean over layers", "muted", "dash")] if limit else []
    says = "Local activations should rise above vanilla's and remote ranks fall below; load is best at 1."
    if predicted:
        says += " Diamonds are what the plan's own tables predict; where they stand on the bars, the tables are right."
    tables = [_layer_table(mine, theirs)]
    return Figure(title="Layer by layer", says=says, panels=panels, tables=tables, keys=keys, columns=3)


def _panel(column: Column, mine: list[Layer], theirs: list[Layer] | None, digits: int = 3, **look: Any) -> Panel:
    """One quantity of each layer; `look` is for `figures.by_layer`."""
    title, field, _ = column
    plan = [getattr(layer, field) for layer in mine]
    vanilla = None if theirs is None else [getattr(layer, field) for layer in theirs]
    beside = f", vanilla {_span(vanilla, digits)}" if vanilla else ""
    label = f"{title} of {words.count(len(plan), 'layer')}: plan {_span(plan, digits)}{beside}"
    return Panel(title, figures.by_layer(vanilla, plan, digits=digits, **look), label)


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _layer_table(mine: list[Layer], theirs: list[Layer] | None) -> Table:
    columns = ["layer", "LAR, plan", "LAR predicted", "remote ranks, plan", "load, plan"]
    rows = [[str(layer.layer), *cells(layer, [LAR, PREDICTED_LAR, REMOTE, LOAD])] for layer in mine]
    if theirs:
        columns += ["LAR, vanilla", "remote ranks, vanilla", "load, vanilla"]
        rows = [[*row, *cells(v, [LAR, REMOTE, LOAD])] for row, v in zip(rows, theirs, strict=True)]
    return Table("Figures of each layer", columns, rows)


def load(replayed: Replayed) -> Figure | None:
    """Expert load of each rank and layer over the mean of the layer; None where ranks were not recorded."""
    sides = [(name, values) for name, side in replayed.sides() if (values := load_over_mean(side)).size]
    if not sides:
        return None
    low, high = min(v.min() for _, v in sides), max(v.max() for _, v in sides)
    panels, tables = [], []
    for name, values in sides:
        height = 76 + 26 * min(values.shape[1], 16)
        spec = figures.heat_map(values.T, "layer", "rank", low, high, digits=2, height=height)
        span = f"{values.min():.2f} to {values.max():.2f} times the mean"
        panels.append(Panel(name.capitalize(), spec, f"Expert load by rank and layer, {name}: {span}"))
        rows = [[f"layer {l}", *(f"{v:.2f}" for v in row)] for l, row in enumerate(values)]
        tables.append(Table(f"Load over mean, {name}", ["layer", *_numbered("rank", values.shape[1])], rows))
    return Figure(
        title="Expert load of each rank",
        says="(Token, expert) pairs that a rank computes at a layer, over all batches, divided by the mean of ranks: "
        "one shade everywhere is even. The busiest rank decides how long a layer takes.",
        panels=panels,
        tables=tables,
        scale=Scale(f"{low:.2f}", f"{high:.2f}", "load over mean"),
        columns=2,
    )


def load_over_mean(side: Figures) -> np.ndarray:
    """(L, G) pairs of each rank over the mean of its layer; empty if they are not known, or a layer has none."""
    pairs = np.array([layer.load_per_rank for layer in side.layers], float)
    if pairs.size == 0 or (pairs.sum(axis=1) == 0).any():
        return np.zeros((0, 0))
    return pairs / pairs.mean(axis=1, keepdims=True)


@dataclass(frozen=True)
class Sent:
    """What ranks send each other: (G, G) of vanilla and plan, in `unit`."""

    sides: list[tuple[str, np.ndarray]]
    what: str
    unit: str
    source: str
    size: float = 0.0  # bytes per unit; 0 where the unit is rows

    def total(self, values: np.ndarray) -> str:
        return words.bytes_of(values.sum() * self.size) if self.size else f"{values.sum():,.1f} {self.unit}"


def rank_pairs(pair: Pair | None, replayed: Replayed | None) -> Figure | Missing:
    """Bytes (or rows) that each rank sends to every other rank, vanilla and plan on one scale."""
    sent = _sent(pair, replayed)
    if sent is None:
        command = "semmoe generate MODEL --plan PLAN --json > on-the-plan.json"
        return Missing("Bytes per rank pair", "There is no measurement of what ranks send each other.", command)
    unit = sent.unit
    high = max(*(float(values.max()) for _, values in sent.sides), 1e-9)
    panels = []
    for name, values in sent.sides:
        total = sent.total(values)
        label = f"{sent.what} per rank pair, {name}: {total} in all, at most {values.max():,.1f} {unit} per pair"
        height = 280 + 5 * min(len(values), 32)
        spec = figures.heat_map(values, "to rank", "from rank", 0.0, high, f" {unit}", 1, height)
        panels.append(Panel(f"{name.capitalize()}: {total}", spec, label))
    totals = [values.sum() for _, values in sent.sides]
    saved = (
        f" The plan sends {words.fewer(1 - totals[1] / totals[0])} in all." if len(totals) == 2 and totals[0] else ""
    )
    return Figure(
        title=f"{sent.what} per rank pair",
        says=f"What each rank (row) sends to every other rank (column): {sent.source}. Less is better, and no row or "
        f"column should stand out.{saved}",
        panels=panels,
        tables=[_pair_table(name, values, unit) for name, values in sent.sides],
        scale=Scale("0", f"{high:,.1f}", unit),
        columns=2,
    )


def _sent(pair: Pair | None, replayed: Replayed | None) -> Sent | None:
    """What was measured is preferred to what was replayed, and bytes to rows."""
    if pair is not None:
        both = [("vanilla", pair.vanilla), ("plan", pair.plan)]
        sides = [(name, np.array(row.all_to_all_bytes_per_rank_pair) / 1e6) for name, row in both]
        source = f"dispatch and combine of all layers, measured while generating ({words.name(pair.run.path)})"
        return Sent(sides, "Bytes", "MB", source, 1e6)
    if replayed is None:
        return None
    found = replayed.sides()
    if all(side.bytes_per_rank_pair for _, side in found):
        most = max(float(np.max(side.bytes_per_rank_pair)) for _, side in found)
        size, unit = (1e6, "MB") if most >= 1e6 else (1e3, "kB")
        sides = [(name, np.array(side.bytes_per_rank_pair) / size) for name, side in found]
        source = f"dispatch and combine of the mean layer and batch, replayed on {replayed.source}"
        return Sent(sides, "Bytes", unit, source, size)
    if all(side.rows_per_rank_pair for _, side in found):
        sides = [(name, np.array(side.rows_per_rank_pair) / 1e3) for name, side in found]
        return Sent(sides, "Rows", "thousand rows", f"dispatched over all layers, {replayed.source}")
    return None


def _pair_table(name: str, values: np.ndarray, unit: str) -> Table:
    G = len(values)
    if G > MOST_PAIRS:
        rows = [[f"rank {g}", f"{values[g].sum():,.1f}", f"{values[:, g].sum():,.1f}"] for g in range(G)]
        return Table(f"{unit} of each rank, {name}", ["rank", "sends", "receives"], rows)
    rows = [[f"from {i}", *(f"{v:,.1f}" for v in values[i])] for i in range(G)]
    return Table(f"{unit}, {name}", ["rank", *_numbered("to", G)], rows)


def _numbered(word: str, count: int) -> list[str]:
    return [f"{word} {i}" for i in range(count)]
