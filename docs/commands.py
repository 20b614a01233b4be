"""Writes the table of commands in `reference.md` from the command line's own help."""

import re
from collections.abc import Iterator
from pathlib import Path

import typer
from blocks import filled

from semmoe.cli import app

PAGE = Path(__file__).with_name("reference.md")
EXAMPLE = re.compile(r"`semmoe ([^`]+)`")


def page() -> str:
    rows = "".join(f"| `{name}` | {_effect(text)} | `semmoe {_example(text)}` |\n" for name, text in _helps())
    table = f"| command | effect | example |\n|---|---|---|\n{rows}"
    return filled(PAGE.read_text(encoding="utf-8"), "commands", table)


def _helps() -> Iterator[tuple[str, str]]:
    """Yield every command, those of groups with both words, and its help."""
    for name, command in typer.main.get_command(app).commands.items():
        inner = getattr(command, "commands", {"": command})
        yield from ((f"{name} {word}".strip(), one.help) for word, one in inner.items() if not command.hidden)


def _effect(text: str) -> str:
    return text.strip().splitlines()[0].rstrip(".")


def _example(text: str) -> str:
    """The first example of a command's help, on one line."""
    return " ".join(EXAMPLE.search(text[text.index("Example") :])[1].split())


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
