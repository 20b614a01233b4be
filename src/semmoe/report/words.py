"""Numbers and names as the page writes them: one format for each quantity."""

from collections.abc import Callable, Sequence
from typing import Any

from semmoe.results import LinksNote
from semmoe.topology import Topology

LONGEST = 80  # characters of a name that comes from a file


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


Column = tuple[str, str, Callable[[Any], str]]  # title, field of an item, how its value is written
LAR: Column = ("Local activation rate", "lar", share)
REMOTE: Column = ("Remote ranks per token", "remote_ranks_per_token", ratio)
LOAD: Column = ("Expert load, max / mean", "load_max_over_mean", ratio)


def cells(item: object, columns: Sequence[Column]) -> list[str]:
    """An item's row of a table."""
    return [write(getattr(item, field)) for _, field, write in columns]


def percent(value: float) -> str:
    return f"{value:.1%}".replace("%", "\u00a0%").replace("-", "\u2212")


def bytes_of(value: float) -> str:
    """Bytes in GB, MB, kB or B, whichever suits them."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def whole(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def name(text: object, longest: int = LONGEST) -> str:
    """Text from a file on one line: at most `longest` characters, all of them printable."""
    line = "".join(c if c.isprintable() else " " for c in str(text)).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def label(text: object) -> str:
    """The same as `name`, for Plotly, which interprets tags and entities in its labels."""
    return name(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def links(note: LinksNote) -> str:
    """Links by name, how they are known, and what a row of their all-to-all is."""
    return f"{name(note.name)} ({name(note.kind)}, a row {name(note.all_to_all).replace('-', ' ')})"


def attention(topology: Topology) -> str:
    return {"tp": "Attention TP", "dp": "Attention DP", "hybrid": "Hybrid attention"}[topology.attention]


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def fewer(change: float) -> str:
    """A share that was saved, in words; a negative one was lost."""
    return f"{percent(abs(change))} {'fewer' if change >= 0 else 'more'}"


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
