"""Parts of a page, before they are HTML: cards, figures and their tables. All text is plain."""

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
    """An entry of a legend. colour: a name of the theme; mark: box, dash, dot or diamond."""

    label: str
    colour: str
    mark: str = "box"


@dataclass(frozen=True)
class Panel:
    """One plot. spec: Plotly data and layout; label: what it shows, for readers who do not see it."""

    title: str
    spec: dict[str, Any]
    label: str


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels that belong together. id: of its element in the page, where the template explains it."""

    id: str
    panels: list[Panel]
    tables: list[Table]
    keys: list[Key] = field(default_factory=list)
    scale: tuple[str, str, str] | None = None  # the colors' lowest and highest value, and the quantity


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

    @property
    def badge(self) -> str:
        """The verdict in two words."""
        return BADGES[self.state]
