"""Arrays -> Plotly figures as plain data. Colours are names with an @, which the page turns into its theme's."""

import base64
from collections.abc import Sequence
from typing import Any

import numpy as np

from semmoe.report import words

KINDS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#d55e00", "#cc79a7", "#a6761d")  # Okabe and Ito's, and a brown
EVEN_COLOUR = "#b4b9c0"
MOST_TEXT = 16  # columns of a heat map up to which its numbers are written into it
MOST_BARS = 24  # layers
MOST_LINES = 16  # ranks that are told apart by lines

Spec = dict[str, Any]


def axis(title: str = "", **more: Any) -> Spec:
    of_title = {"title": {"text": title, "standoff": 8}} if title else {}
    return {
        "gridcolor": "@grid",
        "linecolor": "@grid",
        "zeroline": False,
        "automargin": True,
        "fixedrange": True,
        "ticks": "",
        "tickfont": {"color": "@muted", "size": 11},
        **of_title,
        **more,
    }


def layout(height: int, x: Spec, y: Spec, **more: Any) -> Spec:
    return {
        "height": height,
        "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        "showlegend": False,
        "xaxis": x,
        "yaxis": y,
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "font": {"size": 12, "color": "@ink"},
        "hoverlabel": {"font": {"size": 12}},
        "dragmode": False,
        **more,
    }


def by_layer(
    vanilla: Sequence[float] | None,
    plan: Sequence[float],
    predicted: Sequence[float] | None = None,
    baseline: float | None = None,
    digits: int = 3,
    start: float = 0.0,
    dash: str = "dot",
) -> Spec:
    """Values of L layers, vanilla beside plan: bars, or lines where bars would be too thin to tell apart.

    predicted (L,): marks on the plan's bars; baseline: a line across, drawn as `dash`; start: where the axis begins.
    """
    x = list(range(len(plan)))
    draw = _bars if len(plan) <= MOST_BARS else _line
    data = [draw(name, x, y, digits) for name, y in (("vanilla", vanilla), ("plan", plan)) if y is not None]
    if predicted is not None:
        shift = 0.2 if vanilla is not None and draw is _bars else 0.0
        data.append(_marks([i + shift for i in x], predicted, digits))
    shapes = [] if baseline is None else [_across(baseline, dash)]
    top = max([*plan, *(vanilla or []), *(predicted or []), *([] if baseline is None else [baseline])])
    y_range = [start, start + (top - start) * 1.08 if top > start else start + 0.1]
    y_axis = axis(range=y_range)
    return {"data": data, "layout": layout(230, _counted("MoE layer", len(x)), y_axis, shapes=shapes, bargap=0.25)}


def _bars(name: str, x: list[int], y: Sequence[float], digits: int) -> Spec:
    return {
        "type": "bar",
        "x": x,
        "y": rounded(y),
        "marker": {"color": f"@{name}"},
        "offsetgroup": name,
        "hovertemplate": f"{name}, layer %{{x}}: %{{y:.{digits}f}}<extra></extra>",
    }


def _line(name: str, x: list[int], y: Sequence[float], digits: int) -> Spec:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": x,
        "y": rounded(y),
        "line": {"color": f"@{name}", "width": 2},
        "hovertemplate": f"{name}, layer %{{x}}: %{{y:.{digits}f}}<extra></extra>",
    }


def _marks(x: list[float], y: Sequence[float], digits: int) -> Spec:
    size = 7 if len(x) <= MOST_BARS else 5
    mark = {"color": "@predicted", "symbol": "diamond", "size": size, "line": {"color": "@soft", "width": 1}}
    shown = f"predicted, layer %{{customdata}}: %{{y:.{digits}f}}<extra></extra>"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": x,
        "y": rounded(y),
        "marker": mark,
        "hovertemplate": shown,
        "customdata": list(range(len(x))),
    }


def _across(value: float, dash: str = "dot") -> Spec:
    return {
        "type": "line",
        "xref": "paper",
        "x0": 0,
        "x1": 1,
        "y0": value,
        "y1": value,
        "line": {"color": "@muted", "width": 1.5, "dash": dash},
    }


def rounded(values: Sequence[float] | np.ndarray) -> list[float]:
    return [round(float(value), 5) for value in values]


def named_bars(names: Sequence[str], values: Sequence[float], colours: Sequence[str], texts: Sequence[str]) -> Spec:
    """One horizontal bar for each name, the first on top, with a text at its end."""
    data = []
    for colour in dict.fromkeys(colours):  # a trace each, since a theme's colours are named one by one
        rows = [i for i, c in enumerate(colours) if c == colour]
        data.append(
            {
                "type": "bar",
                "orientation": "h",
                "width": 0.62,
                "y": rows,
                "x": rounded([values[i] for i in rows]),
                "text": [texts[i] for i in rows],
                "textposition": "outside",
                "textangle": 0,
                "cliponaxis": False,
                "marker": {"color": f"@{colour}"},
                "hoverinfo": "skip",
            }
        )
    ticks: Spec = {"tickvals": list(range(len(names))), "ticktext": [words.label(n) for n in names]}
    room = 1.2 + 0.03 * max(map(len, texts))
    x = axis(range=[0, room * max([*values, 1e-9])], showticklabels=False, showgrid=False)
    y = axis(tickmode="array", range=[len(names) - 0.4, -0.6], showgrid=False, **ticks)
    return {"data": data, "layout": layout(30 * len(names) + 20, x, y, barmode="overlay")}


def heat_map(
    values: np.ndarray, x: str, y: str, low: float, high: float, unit: str = "", digits: int = 1, height: int = 260
) -> Spec:
    """values (rows, columns), the first row on top; colours from low to high; numbers written in if they are few."""
    rows, columns = values.shape
    trace = {
        "type": "heatmap",
        "z": [rounded(row) for row in values],
        "zmin": low,
        "zmax": high,
        "xgap": _gap(columns),
        "ygap": _gap(rows),
        "colorscale": "@sequential",
        "showscale": False,
        "hovertemplate": f"{y} %{{y}}, {x} %{{x}}: %{{z:.{digits}f}}{unit}<extra></extra>",
    }
    if columns <= MOST_TEXT and rows <= MOST_TEXT:
        trace["texttemplate"] = f"%{{z:.{digits}f}}"
    return {"data": [trace], "layout": layout(height, _counted(x, columns), _counted(y, rows, autorange="reversed"))}


def _gap(cells: int) -> int:
    """Pixels between cells, of which many need the room themselves."""
    return 2 if cells <= 16 else 1 if cells <= 40 else 0


def _counted(title: str, count: int, **more: Any) -> Spec:
    """An axis with whole numbers, at most 16 of them."""
    return axis(title, showgrid=False, tickmode="linear", tick0=0, dtick=max(1, -(-count // 16)), **more)


def placement_map(
    slots: np.ndarray,
    ep_size: int,
    colour_of: np.ndarray,
    colours: Sequence[str],
    about: np.ndarray,
    copies: np.ndarray,
) -> Spec:
    """Layers by physical experts, ranks apart, all arrays (L, P). slots: the expert in each; colour_of: an index of
    colours, or a value on the sequential scale if there are none; about: words; copies: which to mark."""
    L, P = slots.shape
    at = slot_columns(P, ep_size)
    trace = {
        "type": "heatmap",
        "z": _spread(colour_of, at, None),
        "text": _spread(slots, at, ""),
        "customdata": _spread(np.vectorize(words.label, otypes=[object])(about), at, ""),
        "showscale": False,
        "xgap": int(P <= 96),
        "ygap": 2,
        "hoverongaps": False,
        "textfont": {"color": "#14181c"} if colours else {},
        "hovertemplate": "layer %{y}: expert %{customdata}<extra></extra>",
        **_scale(colour_of, colours),
    }
    if P <= 64:
        trace["texttemplate"] = "%{text}"
    data: list[Spec] = [trace]
    if copies.any():
        layers, places = np.nonzero(copies)
        mark = {
            "symbol": "circle",
            "size": 5 if P <= 96 else 3,
            "color": "@ink",
            "line": {"color": "@soft", "width": int(P <= 96)},
        }
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "x": at[places].tolist(),
                "y": (layers - 0.34).tolist(),
                "hoverinfo": "skip",
                "marker": mark,
            }
        )
    centres = at.reshape(ep_size, -1).mean(axis=1).tolist()
    every = max(1, -(-ep_size // MOST_LINES))
    ticks = {"tickvals": centres[::every], "ticktext": [str(g) for g in range(0, ep_size, every)]}
    x = axis("rank", showgrid=False, tickmode="array", tickangle=0, range=[-0.6, float(at[-1]) + 0.6], **ticks)
    y = _counted("MoE layer", L, range=[L - 0.5, -0.6])
    return {"data": data, "layout": layout(min(56 + (28 if P <= 64 else 14) * L, 900), x, y)}


def slot_columns(P: int, ep_size: int) -> np.ndarray:
    """(P,) the column of each slot, a free one after each rank. Two ranks of two slots: 0, 1, 3, 4."""
    return np.arange(P) + np.arange(P) // (P // ep_size)


def _spread(values: np.ndarray, at: np.ndarray, empty: Any) -> list[list[Any]]:
    """values (L, P) in the columns at (P,), `empty` in the others."""
    out = np.full((len(values), int(at[-1]) + 1), empty, dtype=object)
    out[:, at] = values
    return out.tolist()


def _scale(colour_of: np.ndarray, colours: Sequence[str]) -> Spec:
    """A colour scale of equal steps without blends, or the sequential one over all values."""
    if not colours:
        return {"colorscale": "@sequential", "zmin": float(np.min(colour_of)), "zmax": float(np.max(colour_of))}
    n = len(colours)
    steps = [[edge, colour] for i, colour in enumerate(colours) for edge in (i / n, (i + 1) / n)]
    return {"colorscale": steps, "zmin": -0.5, "zmax": n - 0.5}


def affinity_map(shares: np.ndarray, rank_of_expert: np.ndarray, ranks: np.ndarray, high: float) -> Spec:
    """Tokens (U) by experts (E), a byte each: the root of their share of `high`, so that small shares are seen.

    Lines where the rank of experts (E,) or tokens (U,) changes, if ranks are few; none if these are empty.
    """
    scaled = np.rint(255 * np.sqrt(np.clip(shares / max(high, 1e-9), 0, 1))).astype(np.uint8)
    U, E = scaled.shape
    packed = {"dtype": "u1", "bdata": base64.b64encode(scaled.tobytes()).decode(), "shape": f"{U}, {E}"}
    trace = {
        "type": "heatmap",
        "zmin": 0,
        "zmax": 255,
        "colorscale": "@sequential",
        "showscale": False,
        "z": packed,
        "hoverinfo": "skip",
    }
    line = {"color": "@ink", "width": 1}
    few = len(np.unique(rank_of_expert)) <= MOST_LINES
    columns, rows = (np.flatnonzero(np.diff(r) * few) + 0.5 for r in (rank_of_expert, ranks))
    shapes = [{"type": "line", "x0": c, "x1": c, "y0": -0.5, "y1": U - 0.5, "line": line} for c in columns.tolist()]
    shapes += [{"type": "line", "x0": -0.5, "x1": E - 0.5, "y0": r, "y1": r, "line": line} for r in rows.tolist()]
    plain = {"showgrid": False, "showticklabels": False}
    y = axis("tokens", autorange="reversed", **plain)
    return {"data": [trace], "layout": layout(330, axis("experts", **plain), y, shapes=shapes)}


Line = tuple[str, str, str, Sequence[float], Sequence[float]]  # name, colour, dash, requests/s, ms


def curves(lines: Sequence[Line], objective: float | None) -> Spec:
    """Latency over throughput, points in order of load."""
    data = []
    for name, colour, dash, x, y in lines:
        shown = f"{words.label(name)}<br>%{{x:.1f}} requests/s, %{{y:,.0f}} ms<extra></extra>"
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "x": rounded(x),
                "y": rounded(y),
                "line": {"color": f"@{colour}", "width": 2, "dash": dash},
                "hovertemplate": shown,
                "marker": {"color": f"@{colour}", "size": 7},
            }
        )
    shapes = [] if objective is None else [_across(objective)]
    top = 1.08 * max([*(v for line in lines for v in line[4]), objective or 0.0, 1e-9])
    x_axis = axis("requests per second", rangemode="tozero")
    return {"data": data, "layout": layout(260, x_axis, axis(range=[0, top], tickformat=",.0f"), shapes=shapes)}


def band(x: Sequence[int], low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> Spec:
    """A line over layers with a band around it, of values up to 1."""
    edge = {"type": "scatter", "mode": "lines", "x": list(x), "line": {"width": 0}, "hoverinfo": "skip"}
    data: list[Spec] = [
        {**edge, "y": rounded(low)},
        {**edge, "y": rounded(high), "fill": "tonexty", "fillcolor": "@band"},
        {
            "type": "scatter",
            "mode": "lines+markers",
            "x": list(x),
            "y": rounded(middle),
            "line": {"color": "@plan"},
            "marker": {"color": "@plan"},
            "hovertemplate": "layer %{x}: %{y:.3f}<extra></extra>",
        },
    ]
    return {"data": data, "layout": layout(230, axis("MoE layer"), axis(range=[0, 1.02]))}
