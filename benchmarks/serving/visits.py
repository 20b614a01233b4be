"""Measurements in the form that the lab's paper items read: `lab.results.ServingSweep`."""

from collections import Counter
from statistics import median
from typing import Any

from lab.results import AT_ONCE as ALL_AT_ONCE
from lab.results import LIGHT, ServingSweep
from semmoe.evaluation.results import checked
from serving.claims import claim, hull, tail
from serving.configurations import VANILLA
from serving.pieces import AT_ONCE, LOW, MAIN, Workload
from serving.records import Records, Run
from serving.tables import FIGURES, Table, pieces_of, settings_of

OBJECTIVE, LEAST = 5, 100  # times the lightest median; requests that it is taken from
TTFT, E2E = "median_ttft_ms", "median_e2e_ms"
COLUMNS = {"requests/s": "request_throughput", "first token": TTFT, "end to end": E2E}


def as_sweep(records: Records, found: list[Table]) -> dict[str, Any]:
    """The slowest links alone, where all configurations are; and what may be claimed."""
    objectives = {attention: objective(records, attention) for attention in records.links}
    sweeps = {
        attention: {"objectives": limits, "rates": sorted(records.links[attention].rates.values())}
        for attention, limits in objectives.items() if limits
    }  # fmt: skip
    own = [table for table in found if table.ranks == 2 and table.workload.share == MAIN]
    told = {**records.header, **records.header["settings"], "length_requests": _length_requests(records)}
    visits = [visit for table in _visits(records, objectives).values() for visit in table]
    claims = [entry for table in own for entry in _claims(records, table)]
    return checked(ServingSweep, {"settings": told, "sweeps": sweeps, "visits": visits, "claims": claims})


def objective(records: Records, attention: str) -> dict[str, float]:
    """Five times vanilla's medians at the low rate, from at least a hundred requests; nothing without so many."""
    runs = [run for _, run in _runs(records, attention, LOW) if run.name == VANILLA]
    times = [([t for run in runs for t in run.times(token)], name) for token, name in ((0, TTFT), (1, E2E))]
    return {name: OBJECTIVE * median(of) for of, name in times if len(of) >= LEAST}


def run_name(records: Records, attention: str, workload: Workload) -> str:
    """As readers of sweeps know it."""
    named = {LOW: LIGHT, AT_ONCE: ALL_AT_ONCE}
    if workload.arrivals in named or workload.length:
        return named.get(workload.arrivals, workload.arrivals)
    return f"{records.links[attention].rates[workload.arrivals]:g} requests/s"


def values(run: Run, output_tokens: int) -> dict[str, float]:
    """A run's figures; p99 is the slowest request's where there are too few for a percentile."""
    first, last = run.times(0), run.times(1)
    return {
        "request_throughput": run.throughput, "output_throughput": run.throughput * output_tokens,
        TTFT: median(first), "p99_ttft_ms": tail(first)[1], E2E: median(last), "p99_e2e_ms": tail(last)[1],
    }  # fmt: skip


def _runs(records: Records, attention: str, arrivals: str = "") -> list[tuple[Workload, Run]]:
    """Of two ranks on the slowest links, in rounds that count."""
    out = []
    for piece in pieces_of(records):
        if piece.attention == attention and piece.ranks == 2:
            for w in piece.workloads:
                if w.share == MAIN and arrivals in ("", w.arrivals):
                    rounds = records.rounds(piece.name, str(w), piece.names, records.header["busy"])
                    out += [(w, run) for of in rounds.values() for run in of.values()]
    return out


def _visits(records: Records, objectives: dict[str, dict[str, float]]) -> dict[str, list[dict[str, Any]]]:
    out: dict[str, list[dict[str, Any]]] = {}
    tokens = settings_of(records).output_tokens
    for attention, limits in objectives.items():
        grouped: dict[tuple[str, int, str], list[tuple[Workload, Run]]] = {}
        for w, run in _runs(records, attention):
            grouped.setdefault((run.piece, run.round, run.name), []).append((w, run))
        out[attention] = [_visit(records, attention, limits, of, tokens) for of in grouped.values()]
    return out


def _visit(
    records: Records, attention: str, limits: dict[str, float], of: list[tuple[Workload, Run]], tokens: int
) -> dict[str, Any]:
    """What one server did in one round."""
    runs = {run_name(records, attention, w): values(run, tokens) for w, run in of}
    rates = records.links[attention].rates
    held = [rates[w.arrivals] for w, run in of if w.arrivals in rates and limits
            and all(values(run, tokens)[name] <= most for name, most in limits.items())]  # fmt: skip
    total = sum((Counter(run.counters) for _, run in of), Counter())
    name = f"{attention.upper()}, {of[0][1].name}"
    return {"round": of[0][1].round, "name": name, "attention": attention, "runs": runs,
            "goodput": max(held, default=0.0), "activity": activity(total)}  # fmt: skip


def activity(total: dict[str, float]) -> dict[str, float]:
    """Nothing where there is no all-to-all."""
    tokens = total.get("routed_tokens", 0)  # each once a layer
    if not tokens:
        return {}
    return {
        "lar": total["pairs.local=true"] / total["pairs"], "remote_rows_per_token": total["remote_rows"] / tokens,
        "all_to_all_bytes_per_token": total["all_to_all_bytes"] / tokens, "routed_tokens": tokens,
        "scheduled_by_plan": total.get("scheduled_requests.by=plan", 0.0),
        "scheduled_by_engine": total.get("scheduled_requests.by=engine", 0.0),
    }  # fmt: skip


def _claims(records: Records, table: Table) -> list[dict[str, Any]]:
    """For every configuration and figure: ratio, interval, the placebos' span, and whether it may be claimed."""
    out = []
    run = run_name(records, table.attention, table.workload)
    for row in table.rows:
        for name, figure in FIGURES.items():
            found, others = row.over_vanilla(figure), [p.over_vanilla(figure) for p in table.placebos]
            span = hull(others)
            out.append({
                "name": f"{table.attention.upper()}, {row.name}", "run": run, "column": COLUMNS[name],
                "ratio": found.ratio, "low": found.low, "high": found.high,
                "placebo": [span.low, span.high] if others else [], "rounds": found.rounds,
                "says": claim(found, others, table.least),
            })  # fmt: skip
    return out


def _length_requests(records: Records) -> int:
    s = settings_of(records)
    return round(s.length_rate * s.seconds)
