"""What a file of measurements says: tables for people, and one JSON line for the lab and `semmoe report`."""

import json
from collections.abc import Callable, Iterator
from statistics import median

from serving.claims import CONFIDENCE, TOO_FEW, Estimate, bound, claim, estimate, holds, hull, paired_ratios, tail
from serving.configurations import AS_IT_COMES, COPIES, VANILLA
from serving.pieces import AT_ONCE
from serving.records import Records, Run
from serving.tables import FIGURES, Row, Table, settings_of, tables
from serving.visits import as_sweep

LIMIT, REACHED = 1.05, 0.9  # of the best rival's times; of the bound
TIMES = ("first token", "end to end")
LABELS = {
    "row": ["configuration", "n", *(f"{name}{more}" for name in FIGURES for more in ("", ", of vanilla's", ", claim"))],
    "counted": ["configuration", "share", "bytes", "link bytes", "messages", "bound", "reached",
                "of the bound"],
    "held": ["attention", "arrivals", "figure", "plan over the best rival", "best rival", "placebo", "holds"],
    "reached": ["attention", "share", "bytes", "bound", "reached, over vanilla", "of the bound", "best rival",
                "its requests/s over vanilla's", "placebo", "holds"],
}  # fmt: skip


def report(records: Records) -> str:
    found = tables(records)
    parts = [*_head(records), *(text for table in found for text in _table(table)), *_musts(found)]
    return "\n".join([*parts, "", json.dumps(as_sweep(records, found))])


def markdown(columns: list[str], rows: list[list[str]]) -> Iterator[str]:
    yield ""
    yield "| " + " | ".join(columns) + " |"
    yield "|---" * len(columns) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def _head(records: Records) -> Iterator[str]:
    h, s = records.header, settings_of(records)
    yield (
        f"{h['engine']}, torch {h['torch']}, {h['model']} model, {h['machine']}; {s.rounds} rounds of {s.seconds:g} s "
        f"of arrivals, {s.output_tokens} new tokens; prompts: {s.dataset or 'held-out text'}"
    )
    yield f"\nCommits: {', '.join(sorted(records.revisions)) or 'not known'}."
    if h["busy"]:
        yield "\n**Measured with --busy: other processes may have taken the cores. No figure here counts.**"
    yield (
        "\nOver vanilla's: median of ratios in the same round [interval of "
        f"{CONFIDENCE:.0%}]. A claim stands where the interval lies outside of the placebos'. Share: of the ranks' "
        "time, in the all-to-all, waits for slower ranks included (of runs before 2026-11-30: of forward passes). "
        "Times in ms."
    )
    for links in records.links.values():
        pairs = ", ".join(
            f"{share} %: {rate:g} Mbit/s ({links.shares[share]:.0%})" for share, rate in links.links.items()
        )
        rates = ", ".join(f"{name} {rate:g}" for name, rate in links.rates.items())
        yield (
            f"\n{links.attention.upper()}: links by share wanted (found): {pairs}; requests/s: {rates}, at once "
            f"{links.at_once:g}"
        )


def _table(table: Table) -> Iterator[str]:
    shared = ", cores shared: times say little" if table.ranks > 2 else ""
    yield f"\n## {table.attention.upper()}, {table.workload}, EP{table.ranks}{shared}"
    names = ", ".join(f"{row.name} ({row.kept:.3f} of the bytes)" if row.kept else row.name for row in table.placebos)
    yield f"\nPlacebos: {names or 'none, so that nothing is claimed'}."
    yield from markdown(LABELS["row"], [_vanilla(table), *(_figures(table, row) for row in table.rows)])
    yield from markdown(LABELS["counted"], [_counted(row) for row in table.rows])


def _vanilla(table: Table) -> list[str]:
    """Its figures in all rounds, of every piece."""
    runs = {(run.piece, i): run for row in table.rows for i, run in row.base.items()}
    cells = [[f"{median(map(figure, runs.values())):.1f}", "1", "-"] for figure in FIGURES.values()]
    return [VANILLA, str(len(runs)), *(cell for of in cells for cell in of)]


def _figures(table: Table, row: Row) -> list[str]:
    cells = [row.name, str(len(row.own))]
    for figure in FIGURES.values():
        found = row.over_vanilla(figure)
        cells += [f"{median(map(figure, row.own.values())):.1f}", str(found), _claimed(table, row, figure, found)]
    return cells


def _claimed(table: Table, row: Row, figure: Callable[[Run], float], found: Estimate) -> str:
    others = [placebo.over_vanilla(figure) for placebo in table.placebos]
    return "placebo" if row in table.placebos else claim(found, others, table.least) if others else TOO_FEW


def _counted(row: Row) -> list[str]:
    share, kept, gain = row.share, row.kept, row.over_vanilla(FIGURES["requests/s"]).ratio
    most = bound(share, kept) if share and kept else None
    numbers = [
        share,
        kept,
        row.ratio(lambda r: r.link_bytes),
        row.ratio(lambda r: r.per_token("messages")),
    ]
    numbers += [most, gain, gain / most if most else None]
    return [row.name, *("-" if number is None else f"{number:.3f}" for number in numbers)]


def _musts(found: list[Table]) -> Iterator[str]:
    own = [table for table in found if table.ranks == 2 and table.row(COPIES)]
    yield "\n## What must hold"
    yield from markdown(LABELS["held"], [cells for table in own for cells in _held(table)])
    yield from markdown(LABELS["reached"], [_reached(table) for table in own if table.workload.arrivals == AT_ONCE])
    yield ""
    for table in own:
        for run in ("first token", "end to end"):
            yield _slowest(table, run)


def _held(table: Table) -> Iterator[list[str]]:
    """At a rate of arrivals: times on the plan over those of the best rival of the same rounds."""
    row, rival = table.row(COPIES), table.row(AS_IT_COMES)
    if row is None or table.workload.length or table.workload.arrivals == AT_ONCE:
        return
    for name in TIMES:
        figure = FIGURES[name]
        rivals = {VANILLA: row.base} | ({AS_IT_COMES: rival.own} if rival else {})
        best = min(rivals, key=lambda n: median(map(figure, rivals[n].values())))
        ratios = paired_ratios(_each(row.own, figure), _each(rivals[best], figure))
        others = [placebo.over_vanilla(figure) for placebo in table.placebos]
        if len(ratios):
            good = holds(estimate(ratios), LIMIT, others)
            yield [table.attention.upper(), table.workload.arrivals, name, str(estimate(ratios)), best,
                   _span(others), _verdict(good, len(ratios), table.least)]  # fmt: skip


def _reached(table: Table) -> list[str]:
    """All at once: throughput over vanilla's beside what the bytes saved allow."""
    row, rival = table.row(COPIES), table.row(AS_IT_COMES)
    assert row is not None
    figure = FIGURES["requests/s"]
    gain, others = row.over_vanilla(figure), [placebo.over_vanilla(figure) for placebo in table.placebos]
    most = bound(row.share or 0.0, row.kept or 1.0)
    best = (AS_IT_COMES, str(rival.over_vanilla(figure))) if rival else (VANILLA, "1")
    return [table.attention.upper(), f"{row.share or 0:.3f}", f"{row.kept or 1:.3f}", f"{most:.3f}", str(gain),
            f"{gain.ratio / most:.3f}", *best, _span(others),
            _verdict(gain.ratio >= REACHED * most, gain.rounds, table.least)]  # fmt: skip


def _slowest(table: Table, name: str) -> str:
    row, token = table.row(COPIES), TIMES.index(name)
    assert row is not None
    own, base = ([t for run in of.values() for t in run.times(token)] for of in (row.own, row.base))
    (label, slow), (_, other) = tail(own), tail(base)
    where = f"{table.attention.upper()}, {table.workload}, {name}, {label}"
    return f"{where}: {slow:.0f} ms on the plan, {other:.0f} ms vanilla  "


def _each(runs: dict[int, Run], figure: Callable[[Run], float]) -> dict[int, float]:
    return {i: figure(run) for i, run in runs.items()}


def _span(placebos: list[Estimate]) -> str:
    span = hull(placebos)
    return f"[{span.low:.2f}, {span.high:.2f}]" if placebos else "none"


def _verdict(good: bool, rounds: int, least: int) -> str:
    return TOO_FEW if rounds < least else "yes" if good else "NO"
