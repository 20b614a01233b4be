"""Sections of what was measured: set-ups that generated, methods replayed, routing."""

from collections.abc import Callable, Sequence

from semmoe.report import figures, words
from semmoe.report.gather import Inputs, Measured
from semmoe.report.records import AffinityFile, ReplayFile, SetUp
from semmoe.report.view import Figure, Key, Missing, Panel, Section, Table


def generated(inputs: Inputs) -> Section:
    """Every set-up that ran, as a table and as bars."""
    parts: list[Figure | Missing] = [_set_ups(run) for run in inputs.measured if len(run.set_ups) > 1]
    if not inputs.measured:
        parts = [
            Missing(
                "Bytes, speed and outputs as they are on a machine",
                "No set-up was run.",
                "semmoe generate MODEL --plan PLAN --verify --json > on-the-plan.json",
            )
        ]
    rows = [_row(row) for run in inputs.measured for row in run.set_ups]
    columns = [
        "set-up",
        "LAR",
        "remote ranks",
        "all-to-all",
        "all collectives",
        "load max/mean",
        "tokens/s",
        "first token",
        "outputs identical",
    ]
    intro = (
        "Counted while real processes generated text; bytes are of all ranks and layers. Tokens/s and times over "
        "loopback on a shared machine say nothing about a cluster's links; the bytes do."
    )
    table = Table("Set-ups as they ran", columns, rows) if rows else None
    return Section(id="measured", title="What was measured", short="Measured", intro=intro, shown=table, parts=parts)


def _row(row: SetUp) -> list[str]:
    return [
        _short(row.name),
        words.share(row.lar),
        words.ratio(row.remote_ranks_per_token),
        words.bytes_of(row.all_to_all_bytes),
        words.bytes_of(row.total_bytes),
        words.ratio(row.load_max_over_mean),
        f"{row.tokens_per_second:,.0f}",
        f"{1e3 * row.time_to_first_token:,.0f} ms",
        words.name(row.identical_text),
    ]


def _short(name: str) -> str:
    return words.name(name.removeprefix("attention-"))


def _set_ups(run: Measured) -> Figure:
    """LAR, remote ranks and bytes of each set-up of a run."""
    rows = run.set_ups
    names = [_short(row.name) for row in rows]
    colours = ["plan" if "on the plan" in row.name else "vanilla" for row in rows]
    panels = [
        bars("Local activation rate", names, [row.lar for row in rows], colours, words.share),
        bars("Remote ranks per token", names, [row.remote_ranks_per_token for row in rows], colours, words.ratio),
        bars("All-to-all bytes", names, [row.all_to_all_bytes for row in rows], colours, words.bytes_of),
        bars("Bytes of all collectives", names, [row.total_bytes for row in rows], colours, words.bytes_of),
    ]
    kinds = sorted({kind for row in rows for kind in row.sent_bytes})
    cells = [[_short(row.name), *(words.bytes_of(row.sent_bytes.get(kind, 0)) for kind in kinds)] for row in rows]
    return Figure(
        title="Set-ups beside each other",
        says=f"From {words.name(run.path)}. More local activations are better, and fewer remote ranks and bytes. A "
        "set-up without all-to-all has no local activation rate and sends its bytes in other collectives.",
        panels=panels,
        tables=[Table("Bytes by kind of collective", ["set-up", *kinds], cells)],
        keys=[Key("vanilla and all-reduce", "vanilla"), Key("on the plan", "plan")],
        columns=2,
    )


def bars(
    title: str,
    names: Sequence[str],
    values: Sequence[float | None],
    colours: Sequence[str],
    written: Callable[[float], str],
) -> Panel:
    """A bar for each name; one without a value has a dash."""
    texts = ["–" if v is None else written(v) for v in values]
    spec = figures.named_bars(names, [v or 0.0 for v in values], colours, texts)
    return Panel(title, spec, f"{title}: {listed(names, texts)}")


def listed(names: Sequence[str], texts: Sequence[str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def methods(inputs: Inputs) -> Section:
    """What each method would gain, from `semmoe replay`."""
    none = Missing(
        "This method beside the field's",
        "No replay of several methods is here.",
        "semmoe replay TRACE --method all --json > replay.json",
    )
    parts = [_methods(path, replay) for path, replay in inputs.replays]
    return Section(id="methods", title="Methods beside each other", short="Methods", parts=[*parts] or [none])


def _methods(path: str, replay: ReplayFile) -> Figure:
    found = list(replay.methods.values())
    names = [words.name(name) for name in replay.methods]
    colours = ["plan" if name == "semmoe" else "vanilla" for name in replay.methods]
    panels = [
        bars("Local activation rate", names, [m.lar for m in found], colours, words.share),
        bars("Remote ranks per token", names, [m.remote_ranks_per_token for m in found], colours, words.ratio),
        bars("Expert load, max / mean", names, [m.load_max_over_mean for m in found], colours, words.ratio),
    ]
    columns = ["method", "LAR", "remote ranks", "bytes vs linear", "load max/mean", "unknown tokens", "solved in"]
    rows = [
        [
            name,
            words.share(m.lar),
            words.ratio(m.remote_ranks_per_token),
            words.share(m.bytes_ratio),
            words.ratio(m.load_max_over_mean),
            words.share(m.unknown_token_share),
            "–" if m.solve_seconds is None else f"{m.solve_seconds:,.1f} s",
        ]
        for name, m in zip(names, found, strict=True)
    ]
    told = ("trace", "ep_size", "dp_size", "num_nodes", "redundant_experts", "batch_tokens", "profile_share", "seed")
    given = ", ".join(f"{key} {words.name(replay.settings[key])}" for key in told if key in replay.settings)
    known = ""
    if replay.settings.get("profiled"):
        known += " The plan was made from some of these requests, which flatters it."
    if replay.settings.get("scheduled_by_answers"):
        known += " Requests went to groups by their answers, which no server knows and which flatters schedulers."
    return Figure(
        title=f"Replay, {words.name(path)}",
        says=f"Plans of several methods, scored on a trace without a model ({given}).{known} Vanilla's placement is "
        "called linear. More local activations at even load are better.",
        panels=panels,
        tables=[Table("Methods", columns, rows)],
        keys=[Key("semmoe", "plan"), Key("others", "vanilla")],
        columns=3,
    )


def routing(inputs: Inputs) -> Section:
    """How concentrated routing is, from `semmoe affinity`."""
    none = Missing(
        "How predictable routing is",
        "No statistics of a trace are here.",
        "semmoe affinity TRACE --json > affinity.json",
    )
    parts = [_routing(path, found) for path, found in inputs.affinities]
    return Section(id="routing", title="How predictable routing is", short="Routing", parts=[*parts] or [none])


def _routing(path: str, found: AffinityFile) -> Figure:
    layers = [str(layer.layer) for layer in found.concentration]
    f1 = [layer.by_occurrence["f1"] for layer in found.concentration]
    low, middle, high = ([getattr(q, name) for q in f1] for name in ("p25", "p50", "p75"))
    spec = figures.band([layer.layer for layer in found.concentration], low, middle, high)
    label = f"F1 of a token's own most frequent experts by layer: medians {min(middle):.3f} to {max(middle):.3f}"
    panels = [Panel("F1 of the token's own most frequent experts", spec, label)]
    rows = [[l, *map(words.share, three)] for l, *three in zip(layers, low, middle, high, strict=True)]
    tables = [Table("F1 by layer, weighted by occurrence", ["layer", "p25", "p50", "p75"], rows)]
    if found.next_layer:
        names = [f"{words.count(entry.lookback, 'layer')} back" for entry in found.next_layer]
        rates = [entry.hit_rate for entry in found.next_layer]
        panels.append(
            bars("Hit rate on a layer, from those before it", names, rates, ["plan"] * len(rates), words.share)
        )
        rows = [[name, words.share(rate)] for name, rate in zip(names, rates, strict=True)]
        tables.append(Table("Hit rate by look-back", ["layers", "hit rate"], rows))
    return Figure(
        title=f"Concentration, {words.name(path)}",
        says="The nearer to 1, the better a token's own history, or the layers before, tell which experts it uses; the "
        "band is from the 25th to the 75th percentile of tokens.",
        panels=panels,
        tables=tables,
        columns=2,
    )
