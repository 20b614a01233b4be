"""Numbers and names as the page writes them: one format for each quantity."""

from collections.abc import Callable, Sequence
from typing import Any

from semmoe.evaluation.results import LinksNote
from semmoe.topology import Topology

MAX_NAME = 80  # characters of a name that comes from a file
NONE = "–"
PAYOFFS = """A cell is the predicted share of a MoE layer's time that a plan saves against the best
alternative: vanilla or, with attention-TP, expert parallelism without all-to-all; "no":
not worth it. Columns are models, and tokens of a batch over all ranks: 1,024 is about a
step of decoding, 16,384 one of prefill. Rows are attention and links; 100g and 400g
(Gbit/s) join two nodes. Routing is taken to be as predictable as the shipped model's,
whose counts follow. For your own model run semmoe profile, then semmoe solve --links."""


def share(value: float | None) -> str:
    return NONE if value is None else f"{value:.3f}"


def ratio(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f}"


def whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def percent(value: float) -> str:
    return f"{value:.1%}".replace("%", "\u00a0%").replace("-", "\u2212")


def fewer(change: float) -> str:
    """A share that was saved, in words; a negative one was lost."""
    return f"{percent(abs(change))} {'fewer' if change >= 0 else 'more'}"


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def name(text: object, longest: int = MAX_NAME) -> str:
    """Return text from a file on one line: at most `longest` characters, all printable."""
    line = "".join(c if c.isprintable() else " " for c in str(text)).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def links(note: LinksNote) -> str:
    """Return the name of links, the kind of their source, and the rows of their all-to-all."""
    return f"{name(note.name)} ({name(note.kind)}, a row {name(note.all_to_all).replace('-', ' ')})"


def attention(topology: Topology) -> str:
    return {"tp": "Attention TP", "dp": "Attention DP", "hybrid": "Hybrid attention"}[topology.attention]


Column = tuple[str, str, Callable[[Any], str]]  # title, field of an item, how its value is written
LAR: Column = ("Local activation rate", "lar", share)
REMOTE: Column = ("Remote ranks per token", "remote_ranks_per_token", ratio)
LOAD: Column = ("Expert load, max / mean", "load_max_over_mean", ratio)


def cells(item: object, columns: Sequence[Column]) -> list[str]:
    """An item's row of a table."""
    return [write(getattr(item, field)) for _, field, write in columns]
