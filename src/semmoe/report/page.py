"""Write one HTML file that contains all it needs: style, script, Plotly and data."""

import base64
import gzip
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from semmoe.files import atomic_file
from semmoe.report import measurements, plans, serving, sources, verdict, words
from semmoe.report.gather import Inputs, PlanFile, gather
from semmoe.report.verdict import Pair, Replayed
from semmoe.report.view import Card, Figure, Section

HERE = Path(__file__).parent
MOST_BYTES = 8_000_000


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
    if len(content) > MOST_BYTES:
        size = f"{len(content):,} bytes, more than {MOST_BYTES:,}"
        raise ValueError(f"the page would have {size}: put fewer plans or traces in {folder}")
    with atomic_file(out) as staged:
        staged.write_bytes(content)
    return Written(out, len(content), inputs, cards)


def render(inputs: Inputs, command: str) -> tuple[str, list[Card]]:
    """The page as text, and its verdicts."""
    import jinja2
    import plotly.offline

    pairs = [verdict.measured_pair(inputs, plan) for plan in inputs.plans]
    replays = [verdict.replayed_of(inputs, plan) for plan in inputs.plans]
    ids = [f"plan-{i}" for i in range(len(inputs.plans))]
    of_plans = list(zip(inputs.plans, pairs, replays, ids, strict=True))
    cards = [verdict.card(*four) for four in of_plans]
    sections = _sections(inputs, of_plans)
    provenance, tables = sources.section(inputs, command)
    plotly_js, page_js = plotly.offline.get_plotlyjs(), (HERE / "page.js").read_text(encoding="utf-8")
    assert "</script" not in plotly_js.lower()
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    html = environment.get_template("page.html.j2").render(
        title=words.name(inputs.plans[0].plan.fingerprint.model),
        lead=verdict.lead(inputs, pairs),
        cards=cards,
        sections=sections,
        provenance=provenance,
        sources=tables,
        figures=embedded(specs(sections)),
        style=(HERE / "style.css").read_text(encoding="utf-8"),
        plotly=packed(plotly_js),
        page_js=page_js,
        scripts=" ".join(_digest(script) for script in (plotly_js, page_js)),
    )
    return html, cards


def _sections(inputs: Inputs, of_plans: list[tuple[PlanFile, Pair | None, Replayed | None, str]]) -> list[Section]:
    """The sections that have content, then one with what all the others would show."""
    plan_sections = [plans.section(inputs, *four) for four in of_plans]
    measured, rest = measurements.generated(inputs), [measurements.methods(inputs), measurements.routing(inputs)]
    found = [measured, *plan_sections, *rest, serving.section(inputs)]
    present = [s for s in found if s.shown or any(isinstance(part, Figure) for part in s.parts)]
    missing = [part for s in found if s not in present for part in s.parts]
    more = Section(id="more", title="What else this page can show", short="More", parts=missing)
    return [*present, *([more] if missing else [])]


def specs(sections: list[Section]) -> dict[str, Any]:
    """Plotly figures by the id of their element in the page."""
    return {
        f"{section.id}-{i}-{j}": panel.spec
        for section in sections
        for i, figure in enumerate(section.parts)
        if isinstance(figure, Figure)
        for j, panel in enumerate(figure.panels)
    }


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
