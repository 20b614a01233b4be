"""Result files of benchmarks, as the lab reads them: text for people, each part of it ended by a line of JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

LIGHT, AT_ONCE = "light", "all at once"  # names of runs; the others are "R requests/s" and "N tokens"
PAIRED = {"output_throughput": "request_throughput"}  # in proportion: every answer has as many tokens
Values = dict[str, float]


class Objectives(BaseModel):
    """The objectives and rates that vanilla's first visit fixed, per attention."""

    model_config = ConfigDict(extra="forbid")
    objectives: Values  # the most that each may be, in ms
    rates: list[float]  # requests/s that were tried


class Visit(BaseModel):
    """What one server did in one round. runs: by name, in requests/s, tokens/s and ms."""

    model_config = ConfigDict(extra="forbid")
    round: int
    name: str
    attention: str
    runs: dict[str, Values]
    goodput: float  # the highest rate at which the objectives held
    activity: Values  # the server's own counters; none without all-to-all


class Claim(BaseModel):
    """A figure over vanilla's of the same rounds, and whether it differs from a placebo's."""

    model_config = ConfigDict(extra="forbid")
    name: str
    run: str
    column: str
    ratio: float
    low: float
    high: float
    placebo: list[float]  # what the placebos span; nothing without any
    rounds: int
    says: str  # the ratio and its interval, or why nothing is claimed


class ServingSweep(BaseModel):
    """What `benchmarks/bench_served.py report` printed, or the benchmark before it.

    Set-ups are named "ATTENTION, ...", vanilla "ATTENTION, vanilla".
    """

    model_config = ConfigDict(extra="forbid")
    settings: dict[str, Any]
    sweeps: dict[str, Objectives]  # by attention
    visits: list[Visit]
    claims: list[Claim] = []  # none in files of the benchmark before

    def figure(self, name: str, run: str, column: str) -> float | None:
        """Median over rounds, None without any; of paired ones vanilla's by the median ratio, since days differ."""
        vanilla = f"{name.split(',')[0]}, vanilla"
        if name != vanilla and (claim := self.claim(name, run, PAIRED.get(column, column))):
            return (base := self.figure(vanilla, run, column)) and claim.ratio * base
        found = [v.runs[run][column] for v in self.visits if v.name == name and column in v.runs.get(run, {})]
        return median(found) if found else None

    def claim(self, name: str, run: str, column: str) -> Claim | None:
        """None where nothing was measured in pairs."""
        return next((c for c in self.claims if (c.name, c.run, c.column) == (name, run, column)), None)

    def runs(self, name: str) -> list[str]:
        """Names of a set-up's runs, in the order in which they were made."""
        return list(dict.fromkeys(run for v in self.visits if v.name == name for run in v.runs))

    def names(self, attention: str) -> list[str]:
        return list(dict.fromkeys(v.name for v in self.visits if v.attention == attention))


@dataclass(frozen=True)
class Part:
    """One benchmark's run in a file."""

    path: Path
    command: str  # that made it; empty where the file does not say
    described: str  # the line that names the machine
    data: dict[str, Any]


def parts(path: Path) -> Iterator[Part]:
    """Yield all parts of a file. A line without a JSON object is text."""
    text: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        data = _object(line)
        if data is None:
            text.append(line)
            continue
        lines = [line for line in text if line.strip()]
        command = lines[0][2:] if lines and lines[0].startswith("$ ") else ""
        described = next((line for line in lines if not line.startswith(("$ ", "("))), "")
        yield Part(path, command, described, data)
        text = []


def _object(line: str) -> dict[str, Any] | None:
    if not line.startswith('{"'):
        return None
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def serving_sweep(part: Part) -> ServingSweep | None:
    """None if the part is of another benchmark. Raises ValueError for one that is damaged."""
    if not {"settings", "sweeps", "visits"} <= part.data.keys():
        return None
    try:
        return ServingSweep.model_validate(part.data)
    except ValidationError as error:
        raise ValueError(f"{part.path}: {error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from None
