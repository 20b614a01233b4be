"""What the sections of a page show: figures of a plan's layers, of where it pays and of methods, with their tables."""

from fractions import Fraction
from typing import Any

import numpy as np

from semmoe.costs.timing import WORTH
from semmoe.evaluation.results import Expected, Layer, ReplayFile
from semmoe.report import figures, words
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


def pays(expected: Expected | None, id: str = "pays") -> Figure | None:
    """The gain on slower and faster links and in smaller and larger batches; None if it was not predicted."""
    if expected is None or expected.elsewhere is None or expected.links is None:
        return None
    grid = expected.elsewhere
    gains = 100 * np.array(grid.gains)
    links, batches = [_times(factor) for factor in grid.bandwidths], [words.whole(n) for n in grid.batch_tokens]
    high = max(float(gains.max()), 100 * WORTH)
    row = int(np.argmin(np.abs(np.array(grid.batch_tokens) - expected.tokens_per_batch)))
    here = row, int(np.argmin(np.abs(np.array(grid.bandwidths) - 1)))
    spec = figures.named_grid(gains, links, batches, "bandwidth of the links", "tokens per batch", high, here)
    label = f"Gain of the plan from {gains.min():+.0f} % to {gains.max():+.0f} % over links and batches"
    rows = [[batch, *(f"{gain:+.1f}" for gain in row)] for batch, row in zip(batches, gains, strict=True)]
    table = Table("Gain in per cent, by tokens per batch and bandwidth", ["tokens", *links], rows)
    scale = ("0 % or less", f"{high:+.0f} %", "gain")
    return Figure(id=id, panels=[Panel("", spec, label)], tables=[table], scale=scale)


def _times(factor: float) -> str:
    return "these" if factor == 1 else f"{Fraction(factor).limit_denominator(64)} times"


def layers(replayed: Replayed, id: str = "layers") -> Figure:
    """LAR, remote ranks and load of each layer."""
    plan, limit = replayed.plan.layers, replayed.load_limit
    vanilla = replayed.vanilla.layers if replayed.vanilla else []
    vanilla = vanilla if len(vanilla) == len(plan) else []
    predicted = [layer.predicted_lar for layer in plan if layer.predicted_lar is not None]
    marks = predicted if len(predicted) == len(plan) else None
    ranks = len(plan[0].load_per_rank)
    panels = [
        _panel(LAR, plan, vanilla, predicted=marks, baseline=1 / ranks if ranks else None),
        _panel(REMOTE, plan, vanilla, digits=2),
        _panel(LOAD, plan, vanilla, baseline=limit, digits=2, dash="dash"),
    ]
    keys = [VANILLA, PLAN] if vanilla else [PLAN]
    keys += [Key("predicted", "predicted", "diamond")] if marks else []
    keys += [Key("chance: 1 / ranks", "muted", "dot")] if ranks else []
    keys += [Key(f"load limit {limit:g}, of the mean over layers", "muted", "dash")] if limit else []
    return Figure(id=id, panels=panels, tables=[_layer_table(plan, vanilla)], keys=keys)


def _panel(column: Column, plan: list[Layer], vanilla: list[Layer], digits: int = 3, **look: Any) -> Panel:
    """One quantity of each layer; `look` is for `figures.by_layer`."""
    title, field, _ = column
    values, others = [getattr(layer, field) for layer in plan], [getattr(layer, field) for layer in vanilla]
    beside = f", vanilla {_span(others, digits)}" if others else ""
    label = f"{title} of {words.count(len(values), 'layer')}: plan {_span(values, digits)}{beside}"
    return Panel(title, figures.by_layer(others or None, values, digits=digits, **look), label)


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
    """What each method of a replay would gain."""
    names = [words.name(name) for name in replay.methods]
    colours = ["plan" if name == "semmoe" else "vanilla" for name in replay.methods]
    scored = list(replay.methods.values())
    panels = []
    for title, field, write in (LAR, REMOTE, LOAD):
        values = [getattr(method, field) for method in scored]
        texts = [write(value) for value in values]
        values_by_name = "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))
        panels.append(Panel(title, figures.named_bars(names, values, colours, texts), f"{title}: {values_by_name}"))
    rows = [[name, *cells(method, REPLAYED)] for name, method in zip(names, scored, strict=True)]
    table = Table("Methods", ["method", *(title for title, *_ in REPLAYED)], rows)
    return Figure(id=id, panels=panels, tables=[table], keys=[Key("semmoe", "plan"), Key("others", "vanilla")])
