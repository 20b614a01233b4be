"""Write one HTML file that contains all it needs: style, script, Plotly and data."""

import base64
import gzip
import hashlib
import json
import platform
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from semmoe import __version__
from semmoe.costs.timing import WORTH
from semmoe.io.files import atomic_file
from semmoe.report import sections, verdict, words
from semmoe.report.gather import Inputs, PlanFile, gather
from semmoe.report.verdict import Pair, Replayed
from semmoe.report.view import Card, Figure

HERE = Path(__file__).parent
MAX_PAGE_BYTES = 8_000_000


@dataclass(frozen=True)
class Written:
    """A report that was written."""

    path: Path
    size: int  # bytes
    inputs: Inputs
    cards: list[Card]


def write(folder: Path, out: Path, command: str = "") -> Written:
    """Write one page from everything in `folder`; raises ValueError if there is no plan, or too much for one page."""
    inputs = gather(folder, page=out)
    html, cards = render(inputs, command or f"semmoe report {folder}")
    content = html.encode()
    if len(content) > MAX_PAGE_BYTES:
        size = f"{len(content):,} bytes, more than {MAX_PAGE_BYTES:,}"
        raise ValueError(f"the page would have {size}: put fewer plans or measurements in {folder}")
    with atomic_file(out) as staged:
        staged.write_bytes(content)
    return Written(out, len(content), inputs, cards)


@dataclass(frozen=True)
class PlanView:
    """A plan, its verdict and its figures."""

    id: str
    entry: PlanFile
    pair: Pair | None
    replayed: Replayed | None
    card: Card
    pays: Figure | None
    layers: Figure | None


def render(inputs: Inputs, command: str) -> tuple[str, list[Card]]:
    """The page as text, and its verdicts."""
    import plotly.offline

    plans = [_view(inputs, entry, f"plan-{i}") for i, entry in enumerate(inputs.plans)]
    methods = [sections.methods(replay, f"methods-{i}") for i, (_, replay) in enumerate(inputs.replays)]
    figures = [figure for plan in plans for figure in (plan.pays, plan.layers) if figure is not None] + methods
    specs = {f"{figure.id}-{i}": panel.spec for figure in figures for i, panel in enumerate(figure.panels)}
    plotly_js, page_js = plotly.offline.get_plotlyjs(), _file("page.js")
    assert "</script" not in plotly_js.lower()
    html = _template().render(
        inputs=inputs,
        lead=verdict.lead(inputs, [plan.pair for plan in plans]),
        plans=plans,
        methods=[(path, replay, part) for (path, replay), part in zip(inputs.replays, methods, strict=True)],
        facts=_facts(command),
        figures=embedded(specs),
        plotly=packed(plotly_js),
        style=_file("style.css"),
        page_js=page_js,
        scripts=" ".join(_digest(script) for script in (plotly_js, page_js)),
    )
    return html, [plan.card for plan in plans]


def _view(inputs: Inputs, entry: PlanFile, id: str) -> PlanView:
    pair, replayed = verdict.measured_pair(inputs, entry), verdict.replayed_of(inputs, entry)
    pays = sections.pays(entry.expected, f"{id}-pays")
    layers = sections.layers(replayed, f"{id}-layers") if replayed else None
    return PlanView(id, entry, pair, replayed, verdict.card(entry, pair, replayed), pays, layers)


def _facts(command: str) -> dict[str, str]:
    """The command, versions and machine that wrote the page; measurements name their own."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("plotly", "jinja2", "numpy"))
    machine = f"{platform.machine()}, {platform.system()}"
    python = platform.python_version()
    return {"command": command, "semmoe": __version__, "Python": python, "packages": packages, "machine": machine}


def _template() -> Any:
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.globals |= {"words": words, "worth": WORTH}
    return environment.get_template("page.html.j2")


def _file(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")


def embedded(value: Any) -> str:
    """JSON without NaN, packed."""
    return packed(json.dumps(value, allow_nan=False, separators=(",", ":")))


def packed(text: str) -> str:
    """Text as base 85 of gzip, for page.js; it is safe inside a <script>, whose end needs a slash."""
    out = base64.b85encode(gzip.compress(text.encode(), 9, mtime=0)).decode()
    return out if "<!--" not in out else packed(text + " ")  # a comment would begin there


def _digest(script: str) -> str:
    """The hash by which the content security policy allows a script to run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
