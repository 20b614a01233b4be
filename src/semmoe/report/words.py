"""Numbers and names as the page writes them: one format for each quantity."""

from semmoe.topology import Topology

LONGEST = 80  # characters of a name that came from a file


def share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def ratio(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def percent(value: float) -> str:
    return f"{value:.1%}".replace("%", "\u00a0%").replace("-", "\u2212")


def bytes_of(value: float) -> str:
    """In the unit that suits it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,.0f} B"


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def name(text: object, longest: int = LONGEST) -> str:
    """Text of a file in one line: bounded, without characters that do not print."""
    line = "".join(c if c.isprintable() else " " for c in str(text)).strip()
    return line if len(line) <= longest else line[: longest - 1] + "…"


def label(text: object) -> str:
    """As `name`, for Plotly, which reads tags and entities in its labels."""
    return name(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def attention(topology: Topology) -> str:
    return {"tp": "Attention TP", "dp": "Attention DP", "hybrid": "Hybrid attention"}[topology.attention]


def count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def fewer(change: float) -> str:
    """A saved share in words; negative: lost."""
    return f"{percent(abs(change))} {'fewer' if change >= 0 else 'more'}"


def listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
