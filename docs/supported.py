"""Writes the tables of `support.md`, what runs on which engine, from the table by which doctor and serve decide."""

from collections.abc import Iterable, Iterator
from importlib import import_module
from itertools import groupby
from pathlib import Path

from blocks import filled

from semmoe.engines import support

PAGE = Path(__file__).with_name("support.md")
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
WEIGHTS = "weights"


def page() -> str:
    return filled(PAGE.read_text(encoding="utf-8"), "tables", "\n".join(map(_section, support.FAMILIES)))


def _section(engine: str) -> str:
    version = import_module(f"semmoe.engines.{engine}.targets").TRIED
    rows = "".join(f"| {what} | {state} | {_cell(note)} |\n" for what, state, note in _joined(support.table(engine)))
    head = f"## {TITLES[engine]}\n\nTried on {version}.\n\n"
    return f"{head}| family or feature | state | test or message |\n|---|---|---|\n{rows}"


def _joined(rows: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str, str]]:
    """The rows, where consecutive kinds of weights with the same state and note share one."""
    for (kind, state, note), group in groupby(rows, lambda row: (row[0].partition(": ")[0], *row[1:])):
        names = [what for what, *_ in group]
        joined = ", ".join(name.removeprefix(f"{WEIGHTS}: ") for name in names)
        yield from [(f"{WEIGHTS}: {joined}", state, note)] if kind == WEIGHTS else [(n, state, note) for n in names]


def _cell(note: str) -> str:
    return f"`{note}`" if note.startswith("tests/") else note.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
