"""The section of servers under load: latency over throughput."""

from semmoe.report import figures, words
from semmoe.report.gather import Inputs, Sweep
from semmoe.report.measurements import listed
from semmoe.report.view import Figure, Key, Missing, Panel, Section, Table
from semmoe.results import LIGHT

DASHES = {"solid": "line", "dash": "dash", "dot": "dot", "dashdot": "dash"}  # line style -> mark in the legend
MOST_CONFIGURATIONS, MOST_RUNS = 12, 400
TIMES = (("Median time to first token, ms", "median_ttft_ms"), ("Median end-to-end time, ms", "median_e2e_ms"))


def section(inputs: Inputs) -> Section:
    """One figure per sweep and attention."""
    parts: list[Figure | Missing] = [_figure(s, attention) for s in inputs.sweeps for attention in s.sweep.sweeps]
    if not parts:
        command = "python benchmarks/bench_served.py report FILE > serving.txt"
        parts = [Missing("Latency over throughput", "There is no measurement of a server under load.", command)]
    return Section(id="serving", title="Under load", short="Serving", parts=parts)


def _figure(found: Sweep, attention: str) -> Figure:
    names = found.sweep.names(attention)[:MOST_CONFIGURATIONS]
    styles = {name: style(name, names) for name in names}
    panels = []
    for title, column in TIMES:
        lines = [(name, *styles[name], *points(found, name, column)) for name in names]
        objective = found.sweep.sweeps[attention].objectives.get(column)
        spans = [f"{min(y):,.0f} to {max(y):,.0f}" if y else "not measured" for *_, y in lines]
        within = "" if objective is None else f"; the objective is {objective:,.0f}"
        label = f"{title}, over requests per second: {listed([words.name(n) for n in names], spans)}{within}"
        panels.append(Panel(title, figures.curves(lines, objective), label))
    keys = [Key(words.name(name), styles[name][0], DASHES[styles[name][1]]) for name in names]
    described = words.name(found.part.described.split("; ")[0], longest=200) or words.name(found.path)
    rounds = words.count(len({visit.round for visit in found.sweep.visits}), "round")
    return Figure(
        title=f"Latency over throughput, attention {words.name(attention).upper()}",
        says=f"{described}. Each point is one arrival rate, at the throughput that was reached; medians of {rounds}. "
        "Lower and further right is better. The dotted horizontal line is the objective.",
        panels=panels,
        tables=[_table(found, attention, names)],
        keys=[*keys, Key("objective", "muted", "dot")],
        columns=2,
    )


def style(name: str, names: list[str]) -> tuple[str, str]:
    """Colour and line style of a configuration: grey without a plan; those of one colour differ in style."""
    same = [n for n in names if ("vanilla" in n) == ("vanilla" in name)]
    return "vanilla" if "vanilla" in name else "plan", list(DASHES)[same.index(name) % len(DASHES)]


def points(found: Sweep, name: str, column: str) -> tuple[list[float], list[float]]:
    """Requests/s and ms of the runs at an arrival rate; runs of other kinds are other workloads."""
    runs = [run for run in found.sweep.runs(name) if run == LIGHT or run.endswith(" requests/s")]
    pairs = [tuple(found.sweep.figure(name, run, key) for key in ("request_throughput", column)) for run in runs]
    known = [(x, y) for x, y in pairs if x is not None and y is not None and 0 <= x < 1e9 and 0 <= y < 1e12]
    return [x for x, _ in known], [y for _, y in known]


def _table(found: Sweep, attention: str, names: list[str]) -> Table:
    columns = ["configuration, run", "requests/s", "tokens/s"]
    columns += ["TTFT p50", "TTFT p99", "end to end p50", "end to end p99"]
    speeds = ("request_throughput", "output_throughput")
    times = ("median_ttft_ms", "p99_ttft_ms", "median_e2e_ms", "p99_e2e_ms")
    rows = [
        [
            f"{words.name(name)}: {words.name(run)}",
            *(words.ratio(found.sweep.figure(name, run, key)) for key in speeds),
            *(words.whole(found.sweep.figure(name, run, key)) for key in times),
        ]
        for name in names
        for run in found.sweep.runs(name)
    ]
    rounds = "medians over rounds; paired ones: vanilla's, times that of ratios"
    caption = f"Every run, attention {words.name(attention).upper()}; times in ms, {rounds}"
    return Table(caption, columns, rows[:MOST_RUNS])
