"""Writes the table of `support.md`, what runs on which engine, from the table by which doctor and serve decide."""

from importlib import import_module
from pathlib import Path

from blocks import filled

from semmoe.engines import support

PAGE = Path(__file__).with_name("support.md")
TITLES = {"sglang": "SGLang", "vllm": "vLLM"}
WEIGHTS = "weights"
NAME = "…"  # in a message that several families share


def page() -> str:
    tried = " and ".join(f"{TITLES[e]} {import_module(f'semmoe.engines.{e}.targets').TRIED}" for e in support.FAMILIES)
    head = f"## SGLang and vLLM\n\nTried on {tried}.\n\n| family or feature | engine | state | test or message |\n"
    architectures = "\n| architectures | engine | state | test or message |\n|---|---|---|---|\n" + "".join(
        _architectures()
    )
    text = f"{head}|---|---|---|---|\n" + "".join(_rows()) + architectures
    return filled(PAGE.read_text(encoding="utf-8"), "tables", text)


def _architectures() -> list[str]:
    """The lines of a table of each engine's classes that can hold experts, by state and note."""
    groups: dict[tuple[str, support.Cell], list[str]] = {}
    for engine, cells in support.ARCHITECTURES.items():
        for name, cell in cells.items():
            groups.setdefault((engine, cell), []).append(f"`{name}`")
    return [_row("", (engine,), cell.state.value, cell.note, names) for (engine, cell), names in groups.items()]


def _rows() -> list[str]:
    """The table's lines: families, features, kinds of weights. Those with the same state and note share a line."""
    engines, names = {}, {}
    for engine in support.FAMILIES:
        for what, state, note in support.table(engine):
            engines.setdefault((what, state, note.replace(f"/{engine}/", "/*/")), []).append(engine)
    for (what, state, note), served in engines.items():
        name, _, parts = what.partition(": ")
        name, parts = (parts, name) if name == WEIGHTS else (name, parts)
        names.setdefault((parts, tuple(served), state, note.replace(name, NAME)), []).append(name)
    ordered = sorted(names.items(), key=lambda item: (item[0][0] == WEIGHTS, not item[0][0]))
    return [_row(*key, own) for key, own in ordered]


def _row(parts: str, engines: tuple[str, ...], state: str, note: str, names: list[str]) -> str:
    what = ", ".join(names)
    if parts:
        what = f"{WEIGHTS}: {what}" if parts == WEIGHTS else f"{what}: {parts}"
    engine = "both"
    if len(engines) == 1:
        engine, note = TITLES[engines[0]], note.replace("/*/", f"/{engines[0]}/")
    if len(names) == 1:
        note = note.replace(NAME, names[0])
    note = f"`{note}`" if note.startswith("tests/") else note.replace("|", "\\|")
    return f"| {what} | {engine} | {state} | {note} |\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
