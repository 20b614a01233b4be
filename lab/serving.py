"""Items that need a serving engine and a slow network: from what `make bench-sglang` and `make bench-vllm` wrote."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lab.inputs import Inputs
from lab.item import BASELINE, OTHER, PLAN, VANILLA, Cell, Comparison, Item, LackingError, Result, legend, panel
from lab.results import AT_ONCE, LIGHT, ServingSweep, serving_sweep

TTFT, E2E = "median_ttft_ms", "median_e2e_ms"
IN_WORDS = {TTFT: "median time to first token, ms", E2E: "median end-to-end time, ms"}
FIGURE4 = "1.31 (TTFT) and 3.21 (E2E), DeepSeek-V2-Lite; up to 1.98 and 1.11, Qwen3-30B"
TABLE2 = ".89 / .90 / .91 and .98 / .98 / .99 (DeepSeek-V2-Lite), .87 / .80 / .96 and .99 each (Qwen3-30B)"
STATED = {"where": "measured before, as root, by `make bench-sglang` and `make bench-vllm`; each file says how"}
INKS = {
    "vanilla": VANILLA,
    "again": "#c4c8ce",
    "all-reduce": OTHER,
    "comes": OTHER,
    "MoETuner": BASELINE,
}  # by a name's last word
Swept = tuple[str, ServingSweep]  # the engine, and what was measured


def _sweeps(inputs: Inputs, holds: Callable[[ServingSweep], object]) -> list[Swept]:
    """Those in which there is something for an item; where rounds were paired, no older ones beside them, and of an
    engine the newest.
    """
    found = [(part.described.split(",")[0], serving_sweep(part)) for part in inputs.parts]
    out = [(_named(engine, sweep), sweep) for engine, sweep in found if sweep and holds(sweep)]
    if not out:
        raise LackingError(
            "what `make bench-sglang` or `make bench-vllm` wrote (root, a slow network): --results FOLDER"
        )
    newest = {engine: sweep for engine, sweep in out if sweep.claims}  # files come in the order of their dates
    return list(newest.items()) or out


def _by_rate(sweep: ServingSweep) -> bool:
    return "dp" in sweep.sweeps


def _named(engine: str, sweep: ServingSweep) -> str:
    """The engine, and the data set if prompts were not held-out text."""
    dataset = str(sweep.settings.get("dataset") or "")
    return f"{engine}, {Path(dataset).name.split('.')[0]}" if dataset else engine


def _smaller(sweep: ServingSweep) -> str:
    """Than what was published."""
    links = "on which vanilla is in the all-to-all for 59 % of a pass" if sweep.claims else "of 200 Mbit/s"
    return f"two CPU cores and links {links}, the shipped model"


def _text(sweep: ServingSweep) -> str:
    """What the shipped model knows of the text (training/corpus.py)."""
    dataset = str(sweep.settings.get("dataset") or "")
    seen = ", which was trained on 51 of MMLU's 57 subjects" if "mmlu" in dataset else ""
    return seen if dataset else " and text of its own kind"


def _runs(sweep: ServingSweep, name: str) -> list[str]:
    """Those of growing request rates."""
    seen = sweep.runs(name)
    rates = sorted((run for run in seen if run.endswith("requests/s")), key=lambda run: float(run.split()[0]))
    return [run for run in (LIGHT, *rates, AT_ONCE) if run in seen]


def _at_rates(sweep: ServingSweep) -> list[str]:
    """Set-ups with attention-DP, vanilla first, without those whose requests were sent all at once alone."""
    return [name for name in sweep.names("dp") if set(_runs(sweep, name)) - {AT_ONCE}]


def best_throughput(sweep: ServingSweep, attention: str, name: str, columns: tuple[str, ...]) -> float:
    """Most tokens/s of the runs in which all of `columns` stay within their objectives; 0 where none does."""
    return _best(sweep, attention, name, columns)[0]


def _best(sweep: ServingSweep, attention: str, name: str, columns: tuple[str, ...]) -> tuple[float, str]:
    """That, and the run."""
    limits = sweep.sweeps[attention].objectives
    best = (0.0, "")
    for run in _runs(sweep, name):
        figures = [sweep.figure(name, run, column) for column in columns]
        if all(f is not None and f <= limits[c] for f, c in zip(figures, columns, strict=True)):
            best = max(best, (sweep.figure(name, run, "output_throughput") or 0.0, run))
    return best


def _gain(sweep: ServingSweep, name: str, run: str, column: str, ratio: float) -> str:
    """Over vanilla's: what paired rounds allow to claim, or the ratio of a file without them."""
    claim = sweep.claim(name, run, column)
    return claim.says if claim else f"{ratio:.2f}"


def figure4(inputs: Inputs) -> Result:
    """Latency against throughput as requests come faster, attention-DP."""
    swept = _sweeps(inputs, _by_rate)
    rows: list[list[Cell]] = []
    figure, axes = panel(columns=2, rows=len(swept))
    comparisons = []
    for (engine, sweep), pair in zip(swept, axes, strict=True):
        own: list[list[Cell]] = []
        for name in _at_rates(sweep):
            own += [
                [
                    engine,
                    name,
                    run,
                    *(sweep.figure(name, run, c) for c in ("request_throughput", "output_throughput", TTFT, E2E)),
                ]
                for run in _runs(sweep, name)
            ]
        rows += own
        _curves(pair, own, sweep, engine)
        comparisons.append(_beside(engine, sweep, (TTFT, E2E), "both objectives", FIGURE4))
    legend(figure)
    columns = ["engine", "set-up", "run", "requests/s", "tokens/s", TTFT, E2E]
    return Result(columns=columns, rows=rows, picture=figure, stated=STATED, comparisons=comparisons)


def _curves(pair: Any, rows: list[list[Any]], sweep: ServingSweep, engine: str) -> None:
    for axis, column, label in ((pair[0], 5, TTFT), (pair[1], 6, E2E)):
        _lines(axis, rows, lambda row: row[4], column)
        axis.axhline(sweep.sweeps["dp"].objectives[label], color=OTHER, linestyle=":", label="objective")
        axis.set(title=engine, xlabel="tokens per second", ylabel=IN_WORDS[label], ylim=(0, None))


def _lines(axis: Any, rows: list[list[Any]], across: Callable[[list[Any]], float], column: int) -> None:
    """A line for each set-up: this column of its rows, in their order, over what `across` reads from them."""
    for name in dict.fromkeys(row[1] for row in rows):
        own = [row for row in rows if row[1] == name]
        values, label = [row[column] for row in own], name[len("DP, ") :]
        axis.plot([across(row) for row in own], values, "o-", color=_ink(name), label=label)


def _ink(name: str) -> str:
    """The same for a set-up in every picture."""
    return INKS.get(name.split()[-1], PLAN)


def _beside(engine: str, sweep: ServingSweep, columns: tuple[str, ...], objectives: str, published: str) -> Comparison:
    names = _at_rates(sweep)
    best = {name: _best(sweep, "dp", name, columns) for name in names}
    vanilla, _ = best[names[0]]
    gains = [
        f"{name.removeprefix('DP, ')}: {most / vanilla:.2f} ({most:.0f} tokens/s{_at_that_rate(sweep, name, run)})"
        for name, (most, run) in best.items()
        if name != names[0]
    ]
    return Comparison(
        what=f"{engine}: throughput within {objectives}, over vanilla's ({vanilla:.0f} tokens/s), attention-DP",
        published=published,
        measured="; ".join(gains),
        why=f"{_smaller(sweep)}{_text(sweep)}; {sweep.settings['rounds']} round(s), few rates",
    )


def _at_that_rate(sweep: ServingSweep, name: str, run: str) -> str:
    """What paired rounds at the same rate allow to claim: a set-up keeps an objective at a rate or does not."""
    claim = sweep.claim(name, run, "request_throughput")
    return f"; requests served at that rate, of vanilla's: {claim.says}" if claim else ""


def _four_in_a_row(count: int) -> tuple[Any, list[Any]]:
    """A figure and so many axes."""
    columns = min(count, 4)
    figure, axes = panel(columns=columns, rows=-(-count // columns))
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    return figure, list(axes.flat[:count])


def _within(inputs: Inputs, column: str, objective: str, published: str) -> Result:
    """Table 5 and Table 6: throughput within one objective."""
    swept = _sweeps(inputs, _by_rate)
    rows: list[list[Cell]] = []
    figure, axes = _four_in_a_row(len(swept))
    for (engine, sweep), axis in zip(swept, axes, strict=True):
        names = _at_rates(sweep)
        best = [best_throughput(sweep, "dp", name, (column,)) for name in names]
        rows += [[engine, name, value, value / best[0]] for name, value in zip(names, best, strict=True)]
        axis.bar([name.removeprefix("DP, ") for name in names], best, color=list(map(_ink, names)))
        axis.set(title=engine, ylabel=f"tokens/s within the {objective} objective")
    comparisons = [
        _beside(engine, sweep, (column,), f"the {objective} objective", published) for engine, sweep in swept
    ]
    return Result(
        columns=["engine", "set-up", "tokens/s", "over vanilla"],
        rows=rows,
        picture=figure,
        stated=STATED,
        comparisons=comparisons,
    )


def table5(inputs: Inputs) -> Result:
    """Throughput within five times the lightest load's time to first token."""
    return _within(inputs, TTFT, "TTFT", "1.00 to 1.20, mean 1.12 (Moonlight-16B)")


def table6(inputs: Inputs) -> Result:
    """Throughput within five times the lightest load's end-to-end time."""
    return _within(inputs, E2E, "E2E", "1.02 to 1.23, mean 1.10 (Moonlight-16B)")


def table2(inputs: Inputs) -> Result:
    """Time to first token and end to end by input length, one request a second, attention-TP."""
    swept = _sweeps(inputs, _lengths)
    rows: list[list[Cell]] = []
    figure, axes = panel(columns=2, rows=len(swept))
    comparisons = []
    for (engine, sweep), pair in zip(swept, axes, strict=True):
        own: list[list[Cell]] = [
            [engine, name, length, *_beside_vanilla(sweep, name, length)]
            for length in _lengths(sweep)
            for name in sweep.names("tp")
            if length in sweep.runs(name)
        ]
        rows += own
        _length_picture(pair, own, engine)
        comparisons += _lengths_beside(engine, sweep, own)
    legend(figure)
    columns = ["engine", "set-up", "input", "p99_ttft_ms", "over vanilla", E2E, "over vanilla"]
    return Result(columns=columns, rows=rows, picture=figure, stated=STATED, comparisons=comparisons)


def _lengths(sweep: ServingSweep) -> list[str]:
    return [run for run in sweep.runs("TP, vanilla") if run.endswith(" tokens")]


def _beside_vanilla(sweep: ServingSweep, name: str, length: str) -> Iterator[float | None]:
    for column in ("p99_ttft_ms", E2E):
        own, vanilla = sweep.figure(name, length, column), sweep.figure("TP, vanilla", length, column)
        yield own
        yield own / vanilla if own and vanilla else None


def _length_picture(pair: Any, rows: list[list[Any]], engine: str) -> None:
    for axis, column, label in ((pair[0], 3, "slowest times to first token, ms"), (pair[1], 5, IN_WORDS[E2E])):
        _lines(axis, rows, lambda row: int(row[2].split()[0]), column)
        axis.set(title=engine, xlabel="tokens of the prompt", ylabel=label, ylim=(0, None))


def _lengths_beside(engine: str, sweep: ServingSweep, rows: list[list[Any]]) -> list[Comparison]:
    out, settings = [], sweep.settings
    for name in [name for name in dict.fromkeys(row[1] for row in rows) if name != "TP, vanilla"]:
        own = [row for row in rows if row[1] == name]
        ttft = " / ".join(f"{row[4]:.2f}" for row in own if row[4])
        e2e = " / ".join(_gain(sweep, name, row[2], E2E, row[6]) for row in own if row[6])
        out.append(
            Comparison(
                what=f"{engine}: the slowest requests' TTFT ({settings['length_requests']} a round) and median E2E "
                f"over vanilla's, {' / '.join(row[2] for row in own)}; {name.removeprefix('TP, ')}",
                published=TABLE2,
                measured=f"{ttft} and {e2e}",
                why=f"{_smaller(sweep)}{_text(sweep)}; {settings['length_requests']} requests of each length, "
                f"{settings['rounds']} round(s)",
            )
        )
    return out


FILES, RATES = "an engine, root; or its files", "Latency and throughput as requests come faster"
ITEMS = [
    Item(name="figure4", title=RATES, needs=FILES, seconds=1, make=figure4),
    Item(name="table5", title="Throughput within the TTFT objective", needs=FILES, seconds=1, make=table5),
    Item(name="table6", title="Throughput within the E2E objective", needs=FILES, seconds=1, make=table6),
    Item(name="table2", title="Latency by input length, attention-TP", needs=FILES, seconds=1, make=table2),
]
