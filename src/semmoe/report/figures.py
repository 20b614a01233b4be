"""Plotly figures from arrays, as plain data. A colour "@name" is the theme's colour of that name, set by page.js."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from semmoe.report import words

KINDS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#a6761d")  # Okabe-Ito, and a brown
EVEN_COLOUR = "#b4b9c0"
MOST_TEXT = 16  # rows and columns of a heat map up to which its numbers are written into the cells
MOST_BARS = 24  # layers up to which values are drawn as bars
MOST_LINES = 16  # ranks up to which lines separate them
SKIP = {"hoverinfo": "skip"}

Spec = dict[str, Any]


def figure(data: list[Spec], height: int, x: Spec, y: Spec, **more: Any) -> Spec:
    """A figure of these traces and axes. What all figures have in common is a template in page.js."""
    return {"data": data, "layout": {"height": height, "xaxis": x, "yaxis": y, **more}}


def axis(title: str = "", **more: Any) -> Spec:
    return {"title": {"text": title, "standoff": 8}, **more} if title else more


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
        data.append(_marks(predicted, 0.2 if len(sides) == 2 and len(plan) <= MOST_BARS else 0.0, digits))
    shapes = [] if baseline is None else [_across(baseline, dash)]
    top = max([*plan, *(vanilla or []), *(predicted or []), *([] if baseline is None else [baseline])])
    y = axis(range=[0.0, top * 1.08 if top > 0 else 0.1])
    return figure(data, 230, _counted("MoE layer", len(plan)), y, shapes=shapes, bargap=0.25)


def _series(name: str, values: Sequence[float], digits: int) -> Spec:
    hover = f"{name}, layer %{{x}}: %{{y:.{digits}f}}<extra></extra>"
    points = {"x": list(range(len(values))), "y": rounded(values), "hovertemplate": hover}
    if len(values) <= MOST_BARS:
        return {"type": "bar", **points, "marker": {"color": f"@{name}"}, "offsetgroup": name}
    return {"type": "scatter", "mode": "lines", **points, "line": {"color": f"@{name}", "width": 2}}


def _marks(values: Sequence[float], shift: float, digits: int) -> Spec:
    """Diamonds, `shift` to the right of each layer, where the plan's bar is."""
    layers, size = list(range(len(values))), 7 if len(values) <= MOST_BARS else 5
    mark = {"color": "@predicted", "symbol": "diamond", "size": size, "line": {"color": "@soft", "width": 1}}
    hover = f"predicted, layer %{{customdata}}: %{{y:.{digits}f}}<extra></extra>"
    points = {"x": [layer + shift for layer in layers], "y": rounded(values), "customdata": layers}
    return {"type": "scatter", "mode": "markers", **points, "marker": mark, "hovertemplate": hover}


def _across(value: float, dash: str = "dot") -> Spec:
    """A horizontal line over the whole width."""
    line = {"color": "@muted", "width": 1.5, "dash": dash}
    return {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": value, "y1": value, "line": line}


def rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]


def named_bars(names: Sequence[str], values: Sequence[float], colours: Sequence[str], texts: Sequence[str]) -> Spec:
    """One horizontal bar per name, the first on top, with a text at its end."""
    look = {"type": "bar", "orientation": "h", "width": 0.62, **SKIP}
    text = {"textposition": "outside", "textangle": 0, "cliponaxis": False}
    data = []
    for colour in dict.fromkeys(colours):  # one trace per colour: page.js replaces a colour's name only where it stands
        rows = [i for i, c in enumerate(colours) if c == colour]
        bars = {"y": rows, "x": rounded([values[i] for i in rows]), "text": [texts[i] for i in rows]}
        data.append({**look, **text, **bars, "marker": {"color": f"@{colour}"}})
    room = 1.2 + 0.03 * max(map(len, texts))
    x = axis(range=[0, room * max([*values, 1e-9])], showticklabels=False, showgrid=False)
    y = axis(range=[len(names) - 0.4, -0.6], **_ticks(range(len(names)), map(words.label, names)))
    return figure(data, 30 * len(names) + 20, x, y, barmode="overlay")


def _ticks(at: Any, texts: Any) -> Spec:
    return {"tickmode": "array", "tickvals": list(at), "ticktext": list(texts), "showgrid": False}


def heat_map(
    values: np.ndarray, x: str, y: str, low: float, high: float, unit: str = "", digits: int = 1, height: int = 260
) -> Spec:
    """values (rows, columns), the first row on top, coloured from low to high; numbers in the cells if they are few."""
    rows, columns = values.shape
    hover = f"{y} %{{y}}, {x} %{{x}}: %{{z:.{digits}f}}{unit}<extra></extra>"
    trace = _heat([rounded(row) for row in values], low, high, hovertemplate=hover)
    trace |= {"xgap": _gap(columns), "ygap": _gap(rows)}
    if columns <= MOST_TEXT and rows <= MOST_TEXT:
        trace["texttemplate"] = f"%{{z:.{digits}f}}"
    return figure([trace], height, _counted(x, columns), _counted(y, rows, autorange="reversed"))


def named_grid(
    values: np.ndarray, columns: Sequence[str], rows: Sequence[str], x: str, y: str, high: float, mark: tuple[int, int]
) -> Spec:
    """values (rows, columns) in per cent, written into the cells and coloured from 0 to high; the first row below.

    mark: the row and the column of a cell that is framed.
    """
    hover = f"{x} %{{x}}, {y} %{{y}}: %{{z:+.1f}} %<extra></extra>"
    text = [[f"{round(value):+d} %" if round(value) else "0 %" for value in row] for row in values]
    look = {"x": list(columns), "y": list(rows), "xgap": 2, "ygap": 2, "text": text, "texttemplate": "%{text}"}
    trace = _heat([rounded(row) for row in values], 0.0, high, hovertemplate=hover, **look)
    names, (row, column) = {"type": "category", "showgrid": False}, mark
    frame = {"type": "rect", "x0": column - 0.5, "x1": column + 0.5, "y0": row - 0.5, "y1": row + 0.5}
    shapes = [{**frame, "line": {"color": "@ink", "width": 2}}]
    return figure([trace], 90 + 34 * len(rows), axis(x, **names), axis(y, **names), shapes=shapes)


def _heat(z: Any, low: float, high: float, scale: Any = "@sequential", **more: Any) -> Spec:
    return {"type": "heatmap", "z": z, "zmin": low, "zmax": high, "colorscale": scale, "showscale": False, **more}


def _gap(cells: int) -> int:
    """Pixels between cells; many cells need the room themselves."""
    return 2 if cells <= 16 else 1 if cells <= 40 else 0


def _counted(title: str, count: int, **more: Any) -> Spec:
    """An axis of `count` whole numbers, of which at most 16 are written."""
    return axis(title, showgrid=False, tickmode="linear", tick0=0, dtick=max(1, -(-count // 16)), **more)


def placement_map(
    slots: np.ndarray,
    ep_size: int,
    colour_of: np.ndarray,
    colours: Sequence[str],
    about: np.ndarray,
    copies: np.ndarray,
) -> Spec:
    """Layers by physical experts, with a gap between ranks; all arrays are (L, P).

    slots: the expert in each; colour_of: an index of `colours`, or a value on the sequential scale if there are none;
    about: a description; copies: whether to mark it.
    """
    L, P = slots.shape
    at = slot_columns(P, ep_size)
    data = [_experts(slots, at, colour_of, colours, about)]
    if copies.any():
        layers, places = np.nonzero(copies)
        line = {"color": "@soft", "width": int(P <= 96)}
        mark = {"symbol": "circle", "size": 5 if P <= 96 else 3, "color": "@ink", "line": line}
        points = {"x": at[places].tolist(), "y": (layers - 0.34).tolist(), "marker": mark}
        data.append({"type": "scatter", "mode": "markers", **points, **SKIP})
    centres = at.reshape(ep_size, -1).mean(axis=1).tolist()
    every = max(1, -(-ep_size // MOST_LINES))
    ticks = _ticks(centres[::every], map(str, range(0, ep_size, every)))
    x = axis("rank", tickangle=0, range=[-0.6, float(at[-1]) + 0.6], **ticks)
    y = _counted("MoE layer", L, range=[L - 0.5, -0.6])
    return figure(data, min(56 + (28 if P <= 64 else 14) * L, 900), x, y)


def slot_columns(P: int, ep_size: int) -> np.ndarray:
    """(P,) the column of each slot, with a free column after each rank. Two ranks of two slots: 0, 1, 3, 4."""
    return np.arange(P) + np.arange(P) // (P // ep_size)


def _experts(
    slots: np.ndarray, at: np.ndarray, colour_of: np.ndarray, colours: Sequence[str], about: np.ndarray
) -> Spec:
    """The cells of a placement map, in the columns at (P,)."""
    low, high, scale = (-0.5, len(colours) - 0.5, _steps(colours)) if colours else _sequential(colour_of)
    cells = _heat(_spread(colour_of, at, None), low, high, scale, xgap=int(len(at) <= 96), ygap=2, hoverongaps=False)
    if colours:
        cells["textfont"] = {"color": "#14181c"}
    if len(at) <= 64:
        cells["texttemplate"] = "%{text}"
    labels = _spread(np.vectorize(words.label, otypes=[object])(about), at, "")
    hover = "layer %{y}: expert %{customdata}<extra></extra>"
    return {**cells, "text": _spread(slots, at, ""), "customdata": labels, "hovertemplate": hover}


def _spread(values: np.ndarray, at: np.ndarray, empty: Any) -> list[list[Any]]:
    """values (L, P) in the columns at (P,), `empty` in the others."""
    out = np.full((len(values), int(at[-1]) + 1), empty, dtype=object)
    out[:, at] = values
    return out.tolist()


def _sequential(values: np.ndarray) -> tuple[float, float, str]:
    """Lowest and highest value, and the colour scale between them."""
    return float(np.min(values)), float(np.max(values)), "@sequential"


def _steps(colours: Sequence[str]) -> list[list[Any]]:
    """A colour scale of equal steps that does not blend."""
    n = len(colours)
    return [[edge, colour] for i, colour in enumerate(colours) for edge in (i / n, (i + 1) / n)]


def affinity_map(shares: np.ndarray, rank_of_expert: np.ndarray, ranks: np.ndarray, high: float) -> Spec:
    """Tokens (U) by experts (E), one byte each: the root of their share of `high`, so that small shares are seen.

    Lines are drawn where the rank of experts (E,) or of tokens (U,) changes, if there are few ranks; empty arrays draw
    none.
    """
    scaled = np.rint(255 * np.sqrt(np.clip(shares / max(high, 1e-9), 0, 1))).astype(np.uint8)
    U, E = scaled.shape
    packed = {"dtype": "u1", "bdata": base64.b64encode(scaled.tobytes()).decode(), "shape": f"{U}, {E}"}
    line = {"type": "line", "line": {"color": "@ink", "width": 1}}
    few = len(np.unique(rank_of_expert)) <= MOST_LINES
    columns, rows = ((np.flatnonzero(np.diff(r) * few) + 0.5).tolist() for r in (rank_of_expert, ranks))
    shapes = [{**line, "x0": c, "x1": c, "y0": -0.5, "y1": U - 0.5} for c in columns]
    shapes += [{**line, "x0": -0.5, "x1": E - 0.5, "y0": r, "y1": r} for r in rows]
    plain = {"showgrid": False, "showticklabels": False}
    y = axis("tokens", autorange="reversed", **plain)
    return figure([_heat(packed, 0, 255, **SKIP)], 330, axis("experts", **plain), y, shapes=shapes)


Line = tuple[str, str, str, Sequence[float], Sequence[float]]  # name, colour, dash, requests/s, ms


def curves(lines: Sequence[Line], objective: float | None) -> Spec:
    """Latency over throughput, points in order of load."""
    data = []
    for name, colour, dash, x, y in lines:
        hover = f"{words.label(name)}<br>%{{x:.1f}} requests/s, %{{y:,.0f}} ms<extra></extra>"
        look = {"line": {"color": f"@{colour}", "width": 2, "dash": dash}, "marker": {"color": f"@{colour}", "size": 7}}
        points = {"x": rounded(x), "y": rounded(y), "hovertemplate": hover}
        data.append({"type": "scatter", "mode": "lines+markers", **points, **look})
    shapes = [] if objective is None else [_across(objective)]
    top = 1.08 * max([*(v for line in lines for v in line[4]), objective or 0.0, 1e-9])
    x_axis = axis("requests per second", rangemode="tozero")
    return figure(data, 260, x_axis, axis(range=[0, top], tickformat=",.0f"), shapes=shapes)


def band(x: Sequence[int], low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> Spec:
    """A line over layers with a band around it, of values up to 1."""
    edge = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, **SKIP}
    filled = {**edge, "y": rounded(high), "fill": "tonexty", "fillcolor": "@band"}
    look = {"line": {"color": "@plan"}, "marker": {"color": "@plan"}}
    line = {"type": "scatter", "mode": "lines+markers", "x": list(x), "y": rounded(middle), **look}
    line["hovertemplate"] = "layer %{x}: %{y:.3f}<extra></extra>"
    return figure([{**edge, "y": rounded(low)}, filled, line], 230, axis("MoE layer"), axis(range=[0, 1.02]))
