"""Writes `schemas/*.json`, a JSON Schema of every JSON file of semmoe, from the types that check it."""

import json
from pathlib import Path

from pydantic import TypeAdapter

from semmoe.checkpoint.relabel import Record as Relabelling
from semmoe.costs.links import Links
from semmoe.engines.counters import Activity
from semmoe.evaluation import results
from semmoe.live.recorder.files import Control, Status
from semmoe.live.status import SwapStatus
from semmoe.plan import PlanHeader
from semmoe.traces.trace import TraceHeader

FOLDER = Path(__file__).with_name("schemas")
FILES = {
    "trace": TraceHeader,
    "plan": PlanHeader,
    "links": Links,
    "replay": results.ReplayFile,
    "generate": results.GenerateFile,
    "demo": results.DemoFile,
    "relabelling": Relabelling,
    "activity": Activity,
    "control": Control,
    "status": Status,
    "swap": SwapStatus,
}


def schema(name: str) -> str:
    """The text of a schema."""
    stated = TypeAdapter(FILES[name]).json_schema()
    about = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"{name}.json"}
    return json.dumps(about | stated, indent=1) + "\n"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in FILES:
        (FOLDER / f"{name}.json").write_text(schema(name), encoding="utf-8")
