"""What the sections of a page show: figures of a plan's layers, of where it pays and of methods, with their tables."""

from fractions import Fraction
from typing import Any

import numpy as np

from semmoe.costs.timing import WORTH
from semmoe.evaluation.results import DemoFile, Expected, Layer, ReplayFile
from semmoe.report import words
from semmoe.report.verdict import Replayed
from semmoe.report.view import Figure, Key, Panel, Table
from semmoe.report.words import LAR, LOAD, REMOTE, Column, cells

VANILLA, PLAN = Key("vanilla", "vanilla"), Key("plan", "plan")
BUSIEST: Column = ("busiest rank", "load_per_rank", lambda pairs: str(int(np.argmax(pairs))) if pairs else words.NONE)
PREDICTED_LAR: Column = ("LAR predicted", "predicted_lar", words.share)
REPLAYED: list[Column] = [
    ("LAR", "lar", words.share),
    ("remote ranks", "remote_ranks_per_token", words.ratio),
    ("bytes vs linear", "bytes_ratio", words.share),
    ("load max/mean", "load_max_over_mean", words.ratio),
    ("unknown tokens", "unknown_token_share", words.share),
    ("solved in, s", "solve_seconds", words.ratio),
]


def payoffs(demo: DemoFile, id: str = "payoffs") -> Figure:
    """Return the table of where a plan pays: a row for each attention and links, a column for each model and batch."""
    names: dict[str, None] = {}  # in order, without repetition
    rows: dict[str, list[str]] = {}
    for one in demo.payoffs:  # of each row all columns, in one order
        names["\n".join([*words.name(one.model).rsplit("-", 1), words.whole(one.batch_tokens)])] = None
        kind = words.name(f"{one.attention.upper()}, {one.links}")
        rows.setdefault(kind, [kind]).append(f"{one.gain:.0%}" if one.worth_it else "no")
    ranks = len(demo.set_ups[0].all_to_all_bytes_per_rank_pair)
    title = f"Predicted share of a MoE layer's time that a plan saves, {words.count(ranks, 'rank')}"
    return Figure(id=id, table=Table(title, ["attention, links", *names], list(rows.values())))


def pays(expected: Expected | None, id: str = "pays") -> Figure | None:
    """The gain on slower and faster links and in smaller and larger batches; None if it was not predicted."""
    if expected is None or expected.elsewhere is None or expected.links is None:
        return None
    grid = expected.elsewhere
    gains = 100 * np.array(grid.gains)
    links = ["these" if x == 1 else f"{Fraction(x).limit_denominator(64)} times" for x in grid.bandwidths]
    batches = [words.whole(n) for n in grid.batch_tokens]
    high = max(float(gains.max()), 100 * WORTH)
    row = int(np.argmin(np.abs(np.array(grid.batch_tokens) - expected.tokens_per_batch)))
    here = row, int(np.argmin(np.abs(np.array(grid.bandwidths) - 1)))
    rows = [[batch, *(f"{gain:+.1f}" for gain in row)] for batch, row in zip(batches, gains, strict=True)]
    shares = (gains / high).clip(0, 1).tolist()
    table = Table("Gain in per cent, by tokens per batch and bandwidth of the links", ["tokens", *links], rows, shares)
    return Figure(id=id, table=table, scale=("0 % or less", f"{high:+.0f} %", "gain"), framed=here)


def layers(replayed: Replayed, id: str = "layers") -> Figure:
    """LAR, remote ranks and load of each layer."""
    plan, limit = replayed.plan.layers, replayed.load_limit
    vanilla = replayed.vanilla.layers if replayed.vanilla else []
    vanilla = vanilla if len(vanilla) == len(plan) else []
    predicted = [layer.predicted_lar for layer in plan if layer.predicted_lar is not None]
    points = predicted if len(predicted) == len(plan) else []
    ranks = len(plan[0].load_per_rank)
    panels = [
        _panel(LAR, plan, vanilla, points=points, line=1 / ranks if ranks else None),
        _panel(REMOTE, plan, vanilla, digits=2),
        _panel(LOAD, plan, vanilla, line=limit, digits=2, line_mark="dash"),
    ]
    keys = [VANILLA, PLAN] if vanilla else [PLAN]
    keys += [Key("predicted", "predicted", "point")] if points else []
    keys += [Key("chance: 1 / ranks", "muted", "dot")] if ranks else []
    keys += [Key(f"load limit {limit:g}, of the mean over layers", "muted", "dash")] if limit else []
    return Figure(id=id, panels=panels, table=_layer_table(plan, vanilla), keys=keys)


def _panel(column: Column, plan: list[Layer], vanilla: list[Layer], digits: int = 3, **look: Any) -> Panel:
    """One quantity of each layer, vanilla beside plan; `look` is for `Panel`."""
    title, field, _ = column
    values, others = [getattr(layer, field) for layer in plan], [getattr(layer, field) for layer in vanilla]
    beside = f", vanilla {_span(others, digits)}" if others else ""
    label = f"{title} of {words.count(len(values), 'layer')}: plan {_span(values, digits)}{beside}"
    sides = {"vanilla": others, "plan": values} if others else {"plan": values}
    return Panel(title=title, label=label, sides=sides, digits=digits, **look)


def _span(values: list[float], digits: int) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def _layer_table(plan: list[Layer], vanilla: list[Layer]) -> Table:
    columns = ["layer", "LAR, plan", "LAR predicted", "remote ranks, plan", "load, plan", "busiest rank, plan"]
    rows = [[str(layer.layer), *cells(layer, [LAR, PREDICTED_LAR, REMOTE, LOAD, BUSIEST])] for layer in plan]
    if vanilla:
        columns += ["LAR, vanilla", "remote ranks, vanilla", "load, vanilla", "busiest rank, vanilla"]
        rows = [[*row, *cells(layer, [LAR, REMOTE, LOAD, BUSIEST])] for row, layer in zip(rows, vanilla, strict=True)]
    return Table("Figures of each layer", columns, rows)


def methods(replay: ReplayFile, id: str = "methods") -> Figure:
    """What each method of a replay would gain: figures beside bars, the longest of a column for its highest figure."""
    rows = [[words.name(name), *cells(method, REPLAYED)] for name, method in replay.methods.items()]
    figures = np.array([[getattr(m, field) or 0.0 for _, field, _ in REPLAYED] for m in replay.methods.values()])
    shares = figures / np.maximum(figures.max(axis=0), 1e-9)
    return Figure(id=id, table=Table("Methods", ["method", *(title for title, *_ in REPLAYED)], rows, shares.tolist()))
