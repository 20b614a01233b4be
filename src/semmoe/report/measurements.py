"""Sections of what was measured: configurations that generated, methods that were replayed, routing."""

from collections.abc import Sequence

from semmoe.report import figures, words
from semmoe.report.gather import Inputs, Measured
from semmoe.report.view import Figure, Key, Missing, Panel, Section, Table
from semmoe.report.words import LAR, LOAD, REMOTE, Column, cells
from semmoe.results import AffinityFile, Record, ReplayFile

BYTES: Column = ("All-to-all bytes", "all_to_all_bytes", words.bytes_of)
ALL_BYTES: Column = ("Bytes of all collectives", "total_bytes", words.bytes_of)
SPEEDS: list[Column] = [
    ("tokens/s", "tokens_per_second", words.whole),
    ("first token", "time_to_first_token", lambda seconds: f"{1e3 * seconds:,.0f} ms"),
    ("outputs identical", "identical_text", words.name),
]
REPLAYED: list[Column] = [
    ("LAR", "lar", words.share),
    ("remote ranks", "remote_ranks_per_token", words.ratio),
    ("bytes vs linear", "bytes_ratio", words.share),
    ("load max/mean", "load_max_over_mean", words.ratio),
    ("unknown tokens", "unknown_token_share", words.share),
    ("solved in", "solve_seconds", lambda seconds: "–" if seconds is None else f"{seconds:,.1f} s"),
]


def generated(inputs: Inputs) -> Section:
    """Every configuration that ran, as a table and as bars."""
    parts: list[Figure | Missing] = [_beside(run) for run in inputs.measured if len(run.rows) > 1]
    if not inputs.measured:
        command = "semmoe generate MODEL --plan PLAN --verify --json > on-the-plan.json"
        title = "Bytes, speed and outputs as they are on a machine"
        parts = [Missing(title, "There is no measurement of a configuration.", command)]
    columns = [LAR, REMOTE, BYTES, ALL_BYTES, LOAD, *SPEEDS]
    rows = [[_short(row.name), *cells(row, columns)] for run in inputs.measured for row in run.rows]
    titles = ["LAR", "remote ranks", "all-to-all", "all collectives", "load max/mean", *(title for title, *_ in SPEEDS)]
    intro = (
        "Counted while real processes generated text; bytes are the sum of all ranks and layers. Tokens/s and times "
        "over loopback on a shared machine say nothing about a cluster's links; the bytes do."
    )
    table = Table("Configurations as they ran", ["configuration", *titles], rows) if rows else None
    return Section(id="measured", title="What was measured", short="Measured", intro=intro, shown=table, parts=parts)


def _short(name: str) -> str:
    return words.name(name.removeprefix("attention-"))


def _beside(run: Measured) -> Figure:
    """LAR, remote ranks and bytes of each configuration of a run."""
    names = [_short(row.name) for row in run.rows]
    colours = ["plan" if "on the plan" in row.name else "vanilla" for row in run.rows]
    kinds = sorted({kind for row in run.rows for kind in row.sent_bytes})
    sent = [[words.bytes_of(row.sent_bytes.get(kind, 0)) for kind in kinds] for row in run.rows]
    rows = [[name, *values] for name, values in zip(names, sent, strict=True)]
    return Figure(
        title="Configurations beside each other",
        says=f"From {words.name(run.path)}. More local activations are better, and fewer remote ranks and bytes. A "
        "configuration without all-to-all has no local activation rate and sends its bytes in other collectives.",
        panels=[bars(column, names, run.rows, colours) for column in (LAR, REMOTE, BYTES, ALL_BYTES)],
        tables=[Table("Bytes by kind of collective", ["configuration", *kinds], rows)],
        keys=[Key("vanilla and all-reduce", "vanilla"), Key("on the plan", "plan")],
        columns=2,
    )


def bars(column: Column, names: Sequence[str], items: Sequence[Record], colours: Sequence[str]) -> Panel:
    """One bar per item; an item without a value has a dash."""
    title, field, write = column
    values = [getattr(item, field) for item in items]
    texts = [write(value) for value in values]
    spec = figures.named_bars(names, [value or 0.0 for value in values], colours, texts)
    return Panel(title, spec, f"{title}: {listed(names, texts)}")


def listed(names: Sequence[str], texts: Sequence[str]) -> str:
    return "; ".join(f"{name} {text}" for name, text in zip(names, texts, strict=True))


def methods(inputs: Inputs) -> Section:
    """What each method would gain, from `semmoe replay`."""
    command = "semmoe replay TRACE --method all --json > replay.json"
    none = Missing("This method beside the field's", "There is no replay of several methods.", command)
    parts = [_methods(path, replay) for path, replay in inputs.replays]
    return Section(id="methods", title="Methods beside each other", short="Methods", parts=[*parts] or [none])


def _methods(path: str, replay: ReplayFile) -> Figure:
    found, settings = list(replay.methods.values()), replay.settings
    names = [words.name(name) for name in replay.methods]
    colours = ["plan" if name == "semmoe" else "vanilla" for name in replay.methods]
    rows = [[name, *cells(method, REPLAYED)] for name, method in zip(names, found, strict=True)]
    told = ("trace", "ep_size", "dp_size", "num_nodes", "redundant_experts", "batch_tokens", "profile_share", "seed")
    given = ", ".join(f"{key} {words.name(settings[key])}" for key in told if key in settings)
    known = ""
    if settings.get("profiled"):
        known += " The plan was made from some of these requests, which flatters it."
    if settings.get("scheduled_by_answers"):
        known += " Requests went to groups by their answers, which no server knows and which flatters schedulers."
    return Figure(
        title=f"Replay, {words.name(path)}",
        says=f"Plans of several methods, scored on a trace without a model ({given}).{known} Vanilla's placement is "
        "called linear. More local activations at even load are better.",
        panels=[bars(column, names, found, colours) for column in (LAR, REMOTE, LOAD)],
        tables=[Table("Methods", ["method", *(title for title, *_ in REPLAYED)], rows)],
        keys=[Key("semmoe", "plan"), Key("others", "vanilla")],
        columns=3,
    )


def routing(inputs: Inputs) -> Section:
    """How concentrated routing is, from `semmoe affinity`."""
    title = "How predictable routing is"
    none = Missing(title, "There are no statistics of a trace.", "semmoe affinity TRACE --json > affinity.json")
    parts = [_routing(path, found) for path, found in inputs.affinities]
    return Section(id="routing", title=title, short="Routing", parts=[*parts] or [none])


def _routing(path: str, found: AffinityFile) -> Figure:
    layers = [layer.layer for layer in found.concentration]
    f1 = [layer.by_occurrence.f1 for layer in found.concentration]
    low, middle, high = ([getattr(q, name) for q in f1] for name in ("p25", "p50", "p75"))
    spec = figures.band(layers, low, middle, high)
    label = f"F1 of a token's own most frequent experts by layer: medians {min(middle):.3f} to {max(middle):.3f}"
    panels = [Panel("F1 of the token's own most frequent experts", spec, label)]
    rows = [[str(l), *map(words.share, three)] for l, *three in zip(layers, low, middle, high, strict=True)]
    tables = [Table("F1 by layer, weighted by occurrence", ["layer", "p25", "p50", "p75"], rows)]
    return Figure(
        title=f"Concentration, {words.name(path)}",
        says="How well a token's own history tells which experts it uses; 1 is best. The band is from the 25th to the "
        "75th percentile of tokens.",
        panels=panels,
        tables=tables,
        columns=2,
    )
