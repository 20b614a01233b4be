"""Rows of a measurement: a configuration's rounds beside vanilla's of the same rounds."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

from serving.claims import ROUNDS, Estimate, estimate, paired_ratios
from serving.configurations import AGAIN, MOETUNER
from serving.pieces import Piece, Settings, Workload, published
from serving.records import Records, Run

ALIKE = 0.02  # a plan whose bytes differ by no more from vanilla's is a placebo
FIGURES: dict[str, Callable[[Run], float]] = {
    "requests/s": lambda run: run.throughput,
    "first token": lambda run: median(run.times(0)),
    "end to end": lambda run: median(run.times(1)),
}


@dataclass(frozen=True)
class Row:
    name: str
    own: dict[int, Run]  # by round
    base: dict[int, Run]  # vanilla's

    def over_vanilla(self, figure: Callable[[Run], float]) -> Estimate:
        own, base = ({i: figure(run) for i, run in of.items()} for of in (self.own, self.base))
        return estimate(paired_ratios(own, base))

    def ratio(self, figure: Callable[[Run], float | None]) -> float | None:
        """Median over rounds of a count over vanilla's; None where one of them does not count it."""
        pairs = [(figure(self.own[i]), figure(self.base[i])) for i in self.own]
        ratios = [own / base for own, base in pairs if own is not None and base]
        return median(ratios) if ratios else None

    @property
    def kept(self) -> float | None:
        """Bytes of the all-to-all per token and layer, over vanilla's."""
        return self.ratio(lambda run: run.per_token("all_to_all_bytes"))

    @property
    def share(self) -> float | None:
        """Vanilla's, in the same rounds."""
        return _median([run.share for run in self.base.values()])


@dataclass(frozen=True)
class Table:
    """All configurations under one load."""

    attention: str
    workload: Workload
    ranks: int
    rows: list[Row]
    least: int = ROUNDS  # rounds that a claim needs

    def row(self, name: str) -> Row | None:
        return next((row for row in self.rows if row.name == name), None)

    @property
    def placebos(self) -> list[Row]:
        """Vanilla against itself, and MoETuner's plan where it sends vanilla's bytes."""
        return [row for row in self.rows if row.name == AGAIN or (row.name == MOETUNER and _alike(row.kept))]


def _median(found: list[float | None]) -> float | None:
    known = [value for value in found if value is not None]
    return median(known) if known else None


def _alike(kept: float | None) -> bool:
    return kept is not None and abs(kept - 1) <= ALIKE


def settings_of(records: Records) -> Settings:
    given: dict[str, Any] = dict(records.header["settings"])
    return Settings(**{**given, "fractions": tuple((name, part) for name, part in given["fractions"])})


def pieces_of(records: Records) -> list[Piece]:
    return published(records.header["engine"].split()[0].lower(), settings_of(records))


def tables(records: Records) -> list[Table]:
    """One for each attention, load and number of ranks that was measured."""
    found: dict[tuple[str, Workload, int], list[Row]] = {}
    for piece in pieces_of(records):
        for workload in piece.workloads:
            rounds = records.rounds(piece.name, str(workload), piece.names, records.header["busy"])
            rows = found.setdefault((piece.attention, workload, piece.ranks), [])
            for name in piece.beside if rounds else ():
                own, base = ({i: of[n] for i, of in rounds.items()} for n in (name, piece.names[0]))
                rows.append(Row(name, own, base))
    return [Table(attention, w, ranks, rows) for (attention, w, ranks), rows in found.items() if rows]
