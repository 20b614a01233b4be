"""Write one HTML file that contains all it needs: style, drawings and data. It runs no script."""

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
from semmoe.report.verdict import Replayed
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
    """Write one page from everything in `folder`. Raises ValueError without a plan, or beyond MAX_PAGE_BYTES."""
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
    replayed: Replayed | None
    card: Card
    pays: Figure | None
    layers: Figure | None


def render(inputs: Inputs, command: str) -> tuple[str, list[Card]]:
    """The page as text, and its verdicts."""
    plans = [_view(inputs, entry, f"plan-{i}") for i, entry in enumerate(inputs.plans)]
    wrong = any(plan.card.state == "wrong" for plan in plans)  # then nothing comes before that
    html = _template().render(
        inputs=inputs,
        plans=plans,
        payoffs=[] if wrong else [sections.payoffs(demo, f"payoffs-{i}") for i, (_, demo) in enumerate(inputs.demos)],
        methods=[(path, run, sections.methods(run, f"methods-{i}")) for i, (path, run) in enumerate(inputs.replays)],
        facts=_facts(command),
        style=(HERE / "style.css").read_text(encoding="utf-8"),
    )
    return html, [plan.card for plan in plans]


def _view(inputs: Inputs, entry: PlanFile, id: str) -> PlanView:
    pair, replayed = verdict.measured_pair(inputs, entry), verdict.replayed_of(entry)
    pays = sections.pays(entry.expected, f"{id}-pays")
    layers = sections.layers(replayed, f"{id}-layers") if replayed else None
    return PlanView(id, entry, replayed, verdict.card(entry, pair, replayed), pays, layers)


def _facts(command: str) -> dict[str, str]:
    """The command, versions and machine that wrote the page; measurements name their own."""
    packages = ", ".join(f"{name} {version(name)}" for name in ("jinja2", "numpy"))
    places = {"packages": packages, "machine": f"{platform.machine()}, {platform.system()}"}
    return {"command": command, "semmoe": __version__, "Python": platform.python_version(), **places}


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
