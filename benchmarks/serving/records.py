"""The file of a measurement: JSON lines that are only ever added to.

`header` comes first and says what all figures have in common; `links` has an attention's links and rates; `run` is what
one configuration did in one round. A round's runs are added together, so that what a crash cuts off is one round, which
is then measured again: a round counts if all of its configurations are there and none was disturbed.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


class RecordsError(ValueError):
    """Why nothing can be added to a file, or read from it."""


@dataclass(frozen=True, kw_only=True)
class Links:
    """Which links and rates an attention is measured with, the same for all configurations."""

    attention: str
    links: dict[str, float]  # Mbit/s by share in %
    shares: dict[str, float]  # what vanilla's was there
    probes: list[tuple[float, float]]  # link and share, all that were tried
    at_once: float  # vanilla's requests/s on the slowest link, all at once
    rates: dict[str, float]  # requests/s by name


@dataclass(frozen=True, kw_only=True)
class Run:
    piece: str
    workload: str
    round: int
    name: str
    place: int  # in the round
    seconds: float
    requests: list[list[float]]  # ms to the first token and to the last
    counters: dict[str, float]  # what the ranks counted in this run
    link_bytes: int  # all that the nodes sent each other
    revision: str = ""  # of the code
    disturbed: list[str] = field(default_factory=list)  # by whom

    @property
    def throughput(self) -> float:
        return len(self.requests) / self.seconds

    def times(self, token: int) -> list[float]:
        """ms to the first token (0) or the last (1)."""
        return [times[token] for times in self.requests]

    @property
    def share(self) -> float | None:
        """Return the share of the ranks' time in the all-to-all, see `share_of`."""
        return share_of(self.counters, self.seconds)

    def per_token(self, counter: str) -> float | None:
        """Of a counter, per token and layer."""
        tokens = self.counters.get("routed_tokens", 0)
        return self.counters.get(counter, 0) / tokens if tokens else None


def share_of(counters: dict[str, float], seconds: float) -> float | None:
    """Return the share of a run's `seconds` that its ranks spent in the all-to-all, or None if that is not counted.

    Waits for slower ranks are included. Records made before 2026-11-30 count the time of forward passes in place of the
    run's.
    """
    if before := counters.get("pass_seconds", 0):
        return counters.get("pass_seconds.part=all_to_all", 0) / before
    ranks = sum(name.startswith("served_pairs.by=") for name in counters)
    spent = counters.get("all_to_all_seconds", 0)
    return spent / (seconds * ranks) if spent and ranks else None


class Records:
    """What a file holds, and how more is added."""

    def __init__(self, path: Path) -> None:
        self.path, self.header, self.links, self._runs = path, {}, {}, []
        for found in read(path):
            kind = found.pop("record", "")
            if kind == "header":
                self.header = found
            elif kind == "links":
                self.links[found["attention"]] = Links(**found)
            elif kind == "run":
                self._runs.append(Run(**found))

    def begin(self, header: dict[str, Any]) -> None:
        """Write the header, or compare it with the file's. Raises RecordsError."""
        header = json.loads(json.dumps(header))
        if not self.header:
            self.header = header
            self._add([{"record": "header", **header}])
        different = sorted(k for k in header.keys() | self.header.keys() if header.get(k) != self.header.get(k))
        if different:
            said = "; ".join(f"{k}: {self.header.get(k)} there, {header.get(k)} here" for k in different)
            raise RecordsError(f"{self.path} was measured otherwise, so nothing is added to it ({said})")

    def add_links(self, links: Links) -> None:
        self.links[links.attention] = links
        self._add([{"record": "links", **asdict(links)}])

    def add(self, runs: list[Run]) -> None:
        """Add a round's runs, in one write."""
        self._runs += runs
        self._add([{"record": "run", **asdict(run)} for run in runs])

    @property
    def revisions(self) -> set[str]:
        """Commits that were measured."""
        return {run.revision for run in self._runs if run.revision}

    def rounds(
        self, piece: str, workload: str, names: tuple[str, ...], busy: bool = False
    ) -> dict[int, dict[str, Run]]:
        """The rounds that count, each with a run of every configuration; busy: disturbed ones too."""
        out: dict[int, dict[str, Run]] = {}
        for run in self._runs:
            if (run.piece, run.workload) == (piece, workload) and (busy or not run.disturbed):
                out.setdefault(run.round, {})[run.name] = run
        return {i: of for i, of in sorted(out.items()) if set(names) <= of.keys()}

    def _add(self, lines: list[dict[str, Any]]) -> None:
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        with self.path.open("a+", encoding="utf-8") as file:
            file.write(text if _ended(self.path) else "\n" + text)


def _ended(path: Path) -> bool:
    """Whether the last line is whole."""
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(size - 1, 0))
        return size == 0 or file.read(1) == b"\n"


def read(path: Path) -> Iterator[dict[str, Any]]:
    """The records; what a crash cut off is left out."""
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            found = json.loads(line)
        except ValueError:
            continue
        if isinstance(found, dict):
            yield found
