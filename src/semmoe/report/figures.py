"""Plotly figures from arrays, as plain data. A color "@name" is the theme's color of that name, set by page.js."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from semmoe.report import words

MAX_BARS = 24  # layers up to which values are drawn as bars
MAX_TICKS = 16

Spec = dict[str, Any]


def figure(data: list[Spec], height: int, x: Spec, y: Spec, **layout: Any) -> Spec:
    """A figure of these traces and axes. What all figures have in common is a template in page.js."""
    return {"data": data, "layout": {"height": height, "xaxis": x, "yaxis": y, **layout}}


def axis(title: str = "", **look: Any) -> Spec:
    """An axis, with room below its title."""
    return {"title": {"text": title, "standoff": 8}, **look} if title else look


def by_layer(
    vanilla: Sequence[float] | None,
    plan: Sequence[float],
    predicted: Sequence[float] | None = None,
    baseline: float | None = None,
    digits: int = 3,
    dash: str = "dot",
) -> Spec:
    """Values of L layers, vanilla beside plan: bars, or lines if bars would be too thin to tell apart.

    predicted (L,): marks on the plan's bars; baseline: a horizontal line drawn as `dash`.
    """
    sides = [(name, values) for name, values in (("vanilla", vanilla), ("plan", plan)) if values is not None]
    data = [_series(name, values, digits) for name, values in sides]
    if predicted is not None:
        data.append(_marks(predicted, 0.2 if len(sides) == 2 and len(plan) <= MAX_BARS else 0.0, digits))
    lines = [] if baseline is None else [baseline]
    top = max([*plan, *(vanilla or []), *(predicted or []), *lines])
    y = axis(range=[0.0, top * 1.08 if top > 0 else 0.1])
    shapes = [_across(value, dash) for value in lines]
    return figure(data, 230, _counted("MoE layer", len(plan)), y, shapes=shapes, bargap=0.25)


def _series(name: str, values: Sequence[float], digits: int) -> Spec:
    hover = f"{name}, layer %{{x}}: %{{y:.{digits}f}}<extra></extra>"
    points = {"x": list(range(len(values))), "y": rounded(values), "hovertemplate": hover}
    if len(values) <= MAX_BARS:
        return {"type": "bar", **points, "marker": {"color": f"@{name}"}, "offsetgroup": name}
    return {"type": "scatter", "mode": "lines", **points, "line": {"color": f"@{name}", "width": 2}}


def _marks(values: Sequence[float], shift: float, digits: int) -> Spec:
    """Diamonds, `shift` to the right of each layer, where the plan's bar is."""
    layers = list(range(len(values)))
    size = 7 if len(values) <= MAX_BARS else 5
    mark = {"color": "@predicted", "symbol": "diamond", "size": size, "line": {"color": "@soft", "width": 1}}
    hover = f"predicted, layer %{{customdata}}: %{{y:.{digits}f}}<extra></extra>"
    points = {"x": [layer + shift for layer in layers], "y": rounded(values), "customdata": layers}
    return {"type": "scatter", "mode": "markers", **points, "marker": mark, "hovertemplate": hover}


def _across(value: float, dash: str) -> Spec:
    """A horizontal line over the whole width."""
    line = {"color": "@muted", "width": 1.5, "dash": dash}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line}


def rounded(values: Iterable[float]) -> list[float]:
    """The values as a page holds them: five decimals."""
    return [round(float(value), 5) for value in values]


def named_bars(names: Sequence[str], values: Sequence[float], colours: Sequence[str], texts: Sequence[str]) -> Spec:
    """One horizontal bar per name, the first on top, with a text at its end."""
    look = {"type": "bar", "orientation": "h", "width": 0.62, "hoverinfo": "skip"}
    text = {"textposition": "outside", "textangle": 0, "cliponaxis": False}
    data = []
    for colour in dict.fromkeys(colours):  # one trace per color: page.js does not look into lists of colors
        rows = [i for i, own in enumerate(colours) if own == colour]
        bars = {"y": rows, "x": rounded([values[i] for i in rows]), "text": [texts[i] for i in rows]}
        data.append({**look, **text, **bars, "marker": {"color": f"@{colour}"}})
    room = 1.2 + 0.03 * max(map(len, texts))  # to the right of the longest bar, for its text
    x = axis(range=[0, room * max([*values, 1e-9])], showticklabels=False, showgrid=False)
    labels = [label(name) for name in names]
    y = axis(range=[len(names) - 0.4, -0.6], showgrid=False, tickvals=list(range(len(names))), ticktext=labels)
    return figure(data, 30 * len(names) + 20, x, y, barmode="overlay")


def label(text: object) -> str:
    """Text from a file for Plotly, which interprets tags and entities in its labels."""
    return words.name(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def named_grid(
    values: np.ndarray, columns: Sequence[str], rows: Sequence[str], x: str, y: str, high: float, mark: tuple[int, int]
) -> Spec:
    """values (rows, columns) in per cent, written into the cells and colored from 0 to high; the first row below.

    mark: the row and the column of a cell that is framed.
    """
    hover = f"{x} %{{x}}, {y} %{{y}}: %{{z:+.1f}} %<extra></extra>"
    text = [[f"{round(value):+d} %" if round(value) else "0 %" for value in row] for row in values]
    look = {"x": list(columns), "y": list(rows), "xgap": 2, "ygap": 2, "text": text, "texttemplate": "%{text}"}
    scale = {"zmin": 0.0, "zmax": high, "colorscale": "@sequential", "showscale": False}
    z = [rounded(row) for row in values]
    cells = {"type": "heatmap", "z": z, "hovertemplate": hover, **scale, **look}
    row, column = mark
    edges = {"x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    frame = {"type": "rect", **edges, "line": {"color": "@ink", "width": 2}}
    names = {"type": "category", "showgrid": False}
    return figure([cells], 90 + 34 * len(rows), axis(x, **names), axis(y, **names), shapes=[frame])


def _counted(title: str, count: int, **look: Any) -> Spec:
    """An axis of `count` whole numbers, of which at most MAX_TICKS are written."""
    step = max(1, -(-count // MAX_TICKS))
    return axis(title, showgrid=False, tickmode="linear", tick0=0, dtick=step, **look)
