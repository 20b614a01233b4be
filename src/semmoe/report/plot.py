"""Figures for notebooks: the report's panels as one Plotly figure, in the report's light colours."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semmoe.core import Plan, RoutingTrace
from semmoe.report import experts, figures, maps, words
from semmoe.report.view import Figure, Panel
from semmoe.solver import Comparison

if TYPE_CHECKING:
    from plotly.graph_objects import Figure as PlotlyFigure

METHOD_COLUMNS = (words.LAR, words.REMOTE, words.LOAD)
SYMBOLS = {"box": "square", "round": "circle", "diamond": "diamond"}  # of the marks of a legend that a figure here has


def plot(item: Comparison | Plan | RoutingTrace, trace: RoutingTrace | None = None) -> "PlotlyFigure":
    """Draw what a library call returned: methods side by side, a plan's placement, or the load of a trace's experts.

    trace: shades a plan's experts by how much its tokens use them; without one, by the rank that holds them in vanilla.
    Needs Plotly (the extra `report`). Raises ValueError for a trace of another model's shape than the plan's, and
    TypeError for what it cannot draw.
    """
    if isinstance(item, Comparison):
        return drawn(_methods(item))
    if isinstance(item, Plan):
        if trace is not None:
            item.check(trace.fingerprint)
        return drawn(maps.placement(item.placement, trace))
    if isinstance(item, RoutingTrace):
        return drawn(_load(item))
    raise TypeError(f"plot draws a Comparison, a Plan or a RoutingTrace, not a {type(item).__name__}")


def _methods(found: Comparison) -> Figure:
    names = list(found.results)
    colours = ["plan" if name == "semmoe" else "vanilla" for name in names]
    rows = [result.as_dict() for result in found.results.values()]
    panels = []
    for title, field, write in METHOD_COLUMNS:
        values = [row[field] for row in rows]
        panels.append(Panel(title, figures.named_bars(names, values, colours, [write(v) for v in values]), title))
    return Figure(title="Methods on the same requests", says="", panels=panels, tables=[], columns=len(panels))


def _load(trace: RoutingTrace) -> Figure:
    load = experts.load_over_mean(trace.expert_ids, trace.fingerprint.num_experts)
    spec = figures.heat_map(load, "expert", "layer", 0.0, float(load.max()), digits=1, height=60 + 26 * len(load))
    return Figure(
        title="Load of each expert over the mean of its layer", says="", panels=[Panel("", spec, "")], tables=[]
    )


def drawn(view: Figure) -> "PlotlyFigure":
    """A view's panels side by side, with its legend."""
    from plotly.subplots import make_subplots

    out = make_subplots(cols=len(view.panels), subplot_titles=[panel.title for panel in view.panels])
    theme = colours()
    for column, panel in enumerate(view.panels, 1):
        spec = painted(panel.spec, theme)
        for data in spec["data"]:
            out.add_trace({**data, "showlegend": False}, 1, column)
        out.update_xaxes(spec["layout"]["xaxis"], row=1, col=column)
        out.update_yaxes(spec["layout"]["yaxis"], row=1, col=column)
    for key in view.keys:
        look = {"color": theme.get(key.colour, key.colour), "symbol": SYMBOLS[key.mark], "size": 10}
        out.add_scatter(x=[None], y=[None], mode="markers", marker=look, name=key.label)
    height = max(panel.spec["layout"]["height"] for panel in view.panels) + 60
    return out.update_layout(title=view.title, height=height, template="plotly_white", barmode="overlay")


def colours() -> dict[str, str]:
    """The light theme's colours by name, from the report's style sheet."""
    light = (Path(__file__).parent / "style.css").read_text(encoding="utf-8").partition("}")[0]
    return dict(re.findall(r"--([\w]+):\s*([^;]+);", light))


def painted(value: Any, theme: dict[str, str], key: str = "") -> Any:
    """A copy of a figure in which "@name", where a colour stands, is the theme's, as in page.js."""
    if isinstance(value, dict):
        return {k: painted(v, theme, k) for k, v in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return [painted(v, theme, key) for v in value]
    if not isinstance(value, str) or not value.startswith("@") or "color" not in key:
        return value
    if value == "@sequential":
        return [[i / 5, theme[f"s{i}"]] for i in range(6)]
    return theme[value[1:]]
