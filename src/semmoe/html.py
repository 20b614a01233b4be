"""Tables as HTML, for notebooks."""

from collections.abc import Sequence
from html import escape


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """An HTML table with a caption; all text is escaped."""
    head = "".join(f"<th>{escape(name)}</th>" for name in columns)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><caption>{escape(title)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
