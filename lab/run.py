"""Items made one after another: their files, and the table that sets the published beside the measured."""

import csv
import json
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from os import cpu_count
from pathlib import Path
from typing import Any

from lab import maps, plans, routing, runtime, serving
from lab.inputs import Inputs
from lab.item import Item, LackingError, Result
from semmoe.io.files import atomic_file

EVERY = (*routing.ITEMS, *maps.ITEMS, *plans.ITEMS, *runtime.ITEMS, *serving.ITEMS)
ITEMS: dict[str, Item] = {
    item.name: item for item in sorted(EVERY, key=lambda i: (i.name[:6] != "figure", not i.name[-1].isdigit(), i.name))
}  # the paper's figures, its tables, and what it says in passing
COLUMNS = ("item", "what", "published", "measured", "why they differ")
SUMMARY = "summary.md"


def choose(names: Sequence[str]) -> list[Item]:
    """Raises ValueError for a name that there is not."""
    unknown = [name for name in names if name not in ITEMS]
    if unknown:
        raise ValueError(f"there is no item {', '.join(unknown)}: choose of {', '.join(ITEMS)}")
    return [ITEMS[name] for name in dict.fromkeys(names)] if names else list(ITEMS.values())


def make(item: Item, inputs: Inputs, out: Path) -> dict[str, Any]:
    """Make one item and write `NAME.csv`, `NAME.json` and `NAME.svg`; returns what the JSON file holds.

    Where the item's inputs are not there, nothing is written and `lacks` says what it needs.
    """
    began = time.perf_counter()
    record: dict[str, Any] = {"item": item.name, "title": item.title}
    try:
        result = item.make(inputs)
    except LackingError as error:
        return {**record, "lacks": str(error), "comparisons": []}
    record |= {
        "seconds": round(time.perf_counter() - began, 1),
        "stated": _stated(item, inputs, result),
        "columns": result.columns,
        "rows": result.rows,
        "comparisons": [asdict(c) for c in result.comparisons],
    }
    _write(item, result, record, out)
    return record


def _stated(item: Item, inputs: Inputs, result: Result) -> dict[str, Any]:
    stated: dict[str, Any] = {"hardware": f"{platform.machine()}, {cpu_count()} cores", "seed": inputs.seed}
    if item.needs == plans.SUBJECTS:
        stated["workload"] = "; ".join(source.described() for source in inputs.others)
    elif item.needs == "routing":
        stated["workload"] = "; ".join(source.described() for source in inputs.sources)
    return stated | result.stated


def _write(item: Item, result: Result, record: dict[str, Any], out: Path) -> None:
    with atomic_file(out / f"{item.name}.csv") as staged, staged.open("w", newline="") as file:
        csv.writer(file).writerows([result.columns, *result.rows])
    with atomic_file(out / f"{item.name}.svg") as staged:
        result.picture.savefig(staged, format="svg", dpi=150)
    with atomic_file(out / f"{item.name}.json") as staged:
        staged.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def compared(records: list[dict[str, Any]]) -> list[list[str]]:
    """Rows of COLUMNS, one a comparison; an item that was not made has one that says what it needs."""
    out = []
    for record in records:
        if "lacks" in record:
            out.append([record["item"], record["title"], "", "not made", f"needs {record['lacks']}"])
        for c in record["comparisons"]:
            out.append([record["item"], c["what"], c["published"], c["measured"], c["why"]])
    return out


def write_summary(records: list[dict[str, Any]], out: Path) -> Path:
    """`compared` as a table in Markdown, of these records and of what lies in the folder from before."""
    now = {record["item"] for record in records}
    before = (out / f"{name}.json" for name in ITEMS if name not in now)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in before if path.is_file()]
    rows = [list(COLUMNS), ["---"] * len(COLUMNS), *compared([*records, *found])]
    with atomic_file(out / SUMMARY) as staged:
        staged.write_text("".join(f"| {' | '.join(_cell(c) for c in row)} |\n" for row in rows), encoding="utf-8")
    return out / SUMMARY


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
