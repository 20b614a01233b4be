"""Parts of a page, before they are HTML: cards, figures and their tables. All text is plain."""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Table:
    """A table of text; the first cell of each row is its heading. shares: of the other cells, from 0 to 1, drawn."""

    caption: str
    columns: list[str]
    rows: list[list[str]]
    shares: list[list[float]] = field(default_factory=list)


@dataclass(frozen=True)
class Key:
    """An entry of a legend. colour: a name of the theme; mark: box, dash, dot or point."""

    label: str
    colour: str
    mark: str = "box"


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One quantity of L layers as bars. label: a description for readers who do not see it."""

    title: str
    label: str
    sides: dict[str, list[float]]  # (L,) by the name of a color: vanilla, plan
    points: list[float] = field(default_factory=list)  # (L,) on the plan's bars, or none
    line: float | None = None  # across all layers
    line_mark: str = "dot"
    digits: int = 3

    @property
    def top(self) -> float:
        """The value at the upper edge."""
        lines = [] if self.line is None else [self.line]
        highest = max([value for values in self.sides.values() for value in values] + self.points + lines)
        return 1.08 * highest if highest > 0 else 0.1

    def write(self, value: float) -> str:
        return f"{value:.{self.digits}f}"


@dataclass(frozen=True, kw_only=True)
class Figure:
    """Panels that belong together with their data, or a table that is drawn. id: of its element in the page."""

    id: str
    table: Table
    panels: list[Panel] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    scale: tuple[str, str, str] | None = None  # the colors' lowest and highest value, and the quantity
    framed: tuple[int, int] | None = None  # row and column of the table's cell that is framed


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
