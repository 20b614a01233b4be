"""What a page is made of, before it is HTML: cards, sections, figures and their tables. All text is plain."""

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Table:
    """A table of text; the first cell of each row is its heading."""

    caption: str
    columns: list[str]
    rows: list[list[str]]


@dataclass(frozen=True)
class Key:
    """An entry of a legend. colour: #rrggbb or a name of the theme; mark: box, line, dash, dot, round or diamond."""

    label: str
    colour: str
    mark: str = "box"


@dataclass(frozen=True)
class Scale:
    """The colour bar of heat maps: what its lowest and its highest colour stand for."""

    low: str
    high: str
    what: str


@dataclass(frozen=True)
class Panel:
    """One plot. spec: Plotly data and layout; label: what it shows, for readers who do not see it."""

    title: str
    spec: dict[str, Any]
    label: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels that belong together, side by side in up to `columns` columns."""

    title: str
    says: str  # what it shows, and which values are good
    panels: list[Panel]
    tables: list[Table]
    keys: list[Key] = field(default_factory=list)
    scale: Scale | None = None
    columns: int = 1


@dataclass(frozen=True)
class Missing:
    """What the directory does not hold, and the command that makes it."""

    title: str
    says: str
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """A part of the page with a heading of its own."""

    id: str
    title: str
    short: str  # its title in the navigation
    intro: str = ""
    shown: Table | None = None  # a table before the figures that is always open
    parts: list[Figure | Missing] = field(default_factory=list)


@dataclass(frozen=True)
class Number:
    """A key number of a plan. compared: how it compares with vanilla, in a few words."""

    label: str
    plan: str
    compared: str


BADGES = {"yes": "Worth it", "no": "Not worth it", "open": "No verdict", "wrong": "Outputs differ"}


@dataclass(frozen=True)
class Card:
    """The verdict on one plan. state: yes, no, open (not known) or wrong (outputs differ)."""

    title: str
    state: str
    sentences: list[str]
    numbers: list[Number]
    source: str  # of the numbers
    target: str  # id of the plan's section

    @property
    def badge(self) -> str:
        return BADGES[self.state]
