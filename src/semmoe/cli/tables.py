"""Results of commands as tables and sentences on the terminal."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from semmoe.core import NEVER
from semmoe.costs.links import Links
from semmoe.io import console
from semmoe.live.recorder.control import is_gone
from semmoe.live.recorder.files import Status

if TYPE_CHECKING:
    from semmoe.live.status import SwapStatus
    from semmoe.traces.streams import Merged

Rows = list[list[str]]
MOST_PAIRS = 12  # pairs of nodes or ranks that `semmoe watch` shows, the heaviest
BAR = 30  # characters
PAYOFFS = """"no": not worth it. Columns are models, and tokens of a batch over all ranks: 1,024 is
about a step of decoding, 16,384 one of prefill. Rows are attention and links; those of
100g and 400g (Gbit/s) join two nodes. A plan competes with vanilla and, with
attention-TP, with expert parallelism without all-to-all. These are predictions for
routing as predictable as the shipped model's. For your own model run semmoe profile, and
semmoe solve with the --links that you have."""


def contents(found: dict[str, Any]) -> Rows:
    """Rows for `semmoe trace info`."""
    return [
        ["model", console.plain(found["model"])],
        ["layers x experts, experts of a token", f"{found['num_layers']} x {found['num_experts']}, {found['top_k']}"],
        ["requests", f"{found['requests']:,}"],
        ["routed tokens", f"{found['tokens']:,}"],
        ["of them decoded", f"{found['decode_tokens']:,}"],
        ["left out: an expert twice", f"{found['left_out_tokens']:,}"],
        ["with another token's experts", f"{found['identical_tokens']:,}"],
        ["prompt tokens", f"{found['prompt_tokens']:,}"],
        ["different token ids", f"{found['distinct_tokens']:,} of {found['vocab_size']:,}"],
        ["busiest expert over the mean", f"{found['busiest_expert']:.2f}"],
        ["files", f"{found['files']:,}, {console.megabytes(found['bytes'])} MB"],
    ]


def merged(found: "Merged") -> dict[str, Any]:
    """A joined trace for `--json`."""
    return asdict(found) | {"out": str(found.out)}


def merged_line(found: "Merged") -> str:
    return f"{found.requests:,} requests, {found.tokens:,} tokens in {found.out}"


def recorders(ranks: list[Status]) -> tuple[list[str], Rows]:
    """Columns and rows for `semmoe record status`."""
    columns = ["rank", "state", "requests", "tokens", "under\nway", "skipped", "dropped"]
    columns += ["unknown\nids", "held\nMB", "CPU us\n/token"]
    rows = []
    for s in ranks:
        state = "gone" if s.state == "recording" and is_gone(s) else s.state
        counts = (s.requests, s.tokens, s.unfinished, s.skipped, s.dropped, s.unknown)
        size, cost = console.megabytes(s.bytes_held), console.figure(s.cpu_us_per_token, 2)
        rows.append([str(s.rank), state, *(f"{n:,}" for n in counts), size, cost])
    return columns, rows


def swapped(ranks: list["SwapStatus"]) -> tuple[list[str], Rows]:
    """Columns and rows for `semmoe swap`."""
    rows = []
    for s in ranks:
        times = [f"{1000 * s.seconds:.0f}", f"{1000 * s.longest:.0f}"]
        rows.append([str(s.rank), f"{s.layers_done}", f"{s.moved:,}", console.megabytes(s.received_bytes), *times])
    return ["rank", "layers", "slots\nchanged", "MB\nreceived", "ms\nin all", "longest\nms"], rows


def speeds(links: Links) -> Rows:
    """Rows for `semmoe calibrate`: latency and speed."""
    rows = []
    for where, tier in (("inside nodes", links.inside_node), ("between nodes", links.between_nodes)):
        if tier is not None:
            speed = f"{tier.gigabytes_per_second:.3g} GB/s"
            rows.append([f"all-to-all {where}", f"{tier.dispatch_latency_us:,.0f} us", speed])
    return [*rows, ["experts of a rank", "", f"{links.experts.teraflops:.3g} Tflop/s"]]


def metrics(methods: dict[str, dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for `replay` and `solve`, of the metrics that all methods have."""
    names = {
        "lar": "LAR",
        "remote_ranks_per_token": "remote\nranks",
        "remote_nodes_per_token": "remote\nnodes",
        "bytes_ratio": "bytes\nvs linear",
        "load_max_over_mean": "load\n/mean",
        "load_max_layer": "highest\nlayer",
        "token_max_over_mean": "tokens\n/mean",
        "unknown_token_share": "unknown\ntokens",
        "all_to_all_us": "all-to-\nall us",
        "experts_us": "experts\nus",
        "layer_us": "layer\nus",
        "solve_seconds": "solve\ns",
    }
    present = [name for name in names if all(name in metrics for metrics in methods.values())]
    if not any(m.get("remote_nodes_per_token") for m in methods.values()):
        present = [name for name in present if name != "remote_nodes_per_token"]  # all ranks are on one node
    digits = {name: 1 if name.endswith("_us") else 3 for name in present}
    rows = [[method, *(console.figure(m[name], digits[name]) for name in present)] for method, m in methods.items()]
    return ["method", *(names[name] for name in present)], rows


def print_expected(out: Path, method: str, expected: dict[str, Any] | None) -> None:
    """Print the figures of a plan on held-out requests beside those of other methods, and the verdict."""
    if expected is None:
        console.out.print(f"{out}: too few requests to hold any out, so nothing can be expected of this plan")
        return
    served = f", {expected['running']} at a time on each rank" if expected["running"] else ""
    title = f"{out}: expected, from {expected['requests']} held-out requests{served}"
    console.print_table(title, *metrics({method: expected, **expected["others"]}))
    print_prediction(method, {**expected, "layers": []})  # single layers are for the report
    if expected["verdict"] is None:
        return
    least = expected.get("shuffle_from")
    if least is not None:
        shuffled = f"passes with at least {least:,} rows are shuffled"
        if least == NEVER:
            shuffled = "no pass is shuffled: on these links that costs more than it saves"
        console.out.print(f"{shuffled}; `semmoe serve --shuffle-from` overrides")
    decode, tokens = expected.get("decode"), expected["tokens_per_batch"]
    _print_judged(expected, "prefill, " if decode else "", tokens)
    if decode:
        _print_judged(decode, "decode, ", tokens)


def _print_judged(judged: dict[str, Any], phase: str, tokens: float) -> None:
    links, without = judged["links"], judged["without_all_to_all"]
    known = f"{links['kind']}, a row {links['all_to_all'].replace('-', ' ')}"
    words = f"{phase}on {links['name']} ({known}), {tokens:,.0f} tokens a batch"
    if without is not None:
        words += f"; without all-to-all a layer takes {without['layer_us']:,.0f} us"
    console.say(f"{words}:")
    console.say(judged["verdict"]["sentence"], style="bold")


def print_gain_of_pass(result: dict[str, Any]) -> None:
    """Print the gain of a whole pass, if it is known."""
    if "end_to_end" not in result:
        return
    found = result["end_to_end"]
    words = (
        f"of the {found['share']:.1%} of a pass that all-to-alls take, the plan saves {found['saving']:.1%} on "
        f"{found['links']}: a pass is {found['gain']:.3f} times as fast, if nothing else of it changes"
    )
    console.say(words)


def print_prediction(method: str, figures: dict[str, Any]) -> None:
    """Print one line on how well a plan's own tables predict its LAR, if it has such tables."""
    if figures["predicted_lar"] is None:
        return
    first = figures["layers"][0] if figures.get("layers") else None
    parts = [f"its tables expect LAR {figures['predicted_lar']:.3f} and it is {figures['lar']:.3f}"]
    if figures["unknown_token_lar"] is not None:
        share = figures["unknown_token_share"]
        parts.append(f"{figures['unknown_token_lar']:.3f} for {share:.1%} of tokens that the profile does not hold")
    if first:
        parts.append(f"{first['lar']:.3f} at the first layer, which has no path")
    console.out.print(f"{method}: {'; '.join(parts)}")


def generated(rows: list[dict[str, Any]], with_speed: bool = True) -> tuple[list[str], list[list[str]]]:
    """Columns and rows for `generate` and `demo`, from `GenerateResult.figures` and the comparison of outputs."""
    columns = ["attention", "LAR", "remote\nranks", "all-to-\nall MB", "total\nMB", "load\n/mean"]
    columns += ["tokens\n/s"] if with_speed else []
    body = [
        [
            row["name"].removeprefix("attention-"),
            console.figure(row["lar"]),
            console.figure(row["remote_ranks_per_token"], 2),
            console.megabytes(row["all_to_all_bytes"]),
            console.megabytes(row["total_bytes"]),
            console.figure(row["load_max_over_mean"], 2),
            *([f"{row['tokens_per_second']:.0f}"] if with_speed else []),
            row["identical_text"],
        ]
        for row in rows
    ]
    return [*columns, "outputs\nidentical"], body


def print_times(row: dict[str, Any]) -> None:
    """Print one line on how one configuration spent its time."""
    waits = ", ".join(f"{kind.replace('_', '-')} {s:.2f}" for kind, s in row["collective_seconds"].items())
    console.out.print(
        f"time to first token {1e3 * row['time_to_first_token']:.0f} ms; {row['communication_share']:.0%} of "
        f"{row['seconds']:.1f} s waiting for collectives ({waits} s)",
    )


def print_gain(rows: list[dict[str, Any]]) -> None:
    """Print, for each attention, what the plan gains over vanilla."""
    for vanilla, planned in zip(rows[0:4:2], rows[1:4:2], strict=True):
        gain = planned["lar"] / vanilla["lar"]
        fewer = 1 - planned["all_to_all_bytes"] / vanilla["all_to_all_bytes"]
        mode = planned["name"].split(",")[0]
        console.out.print(f"{mode}: local activation rate x{gain:.2f}, {fewer:.1%} fewer all-to-all bytes on the plan")


def print_payoffs(found: list[dict[str, Any]], ep_size: int) -> None:
    """Print where a plan with the demo's traffic pays: the time that it would save, or that it is not worth it."""
    if found:
        title = f"Predicted time of a MoE layer that a plan with this traffic saves, {ep_size} ranks"
        console.print_table(title, *payoffs(found))
        console.out.print(PAYOFFS)


def payoffs(found: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows: a row for each attention and kind of links, a column for each model and batch size.

    found: of each row all columns, in one order.
    """
    names: dict[str, None] = {}  # in order, without repetition
    rows: dict[str, list[str]] = {}
    for one in found:
        names["\n".join([*one["model"].rsplit("-", 1), f"{one['batch_tokens']:,}"])] = None
        kind = f"{one['attention'].upper()}, {one['links']}"
        rows.setdefault(kind, [kind]).append(f"{one['gain']:.0%}" if one["worth_it"] else "no")
    return ["attention, links", *names], list(rows.values())


def watched(url: str, seen: Any, expected: float | None, warning: str | None) -> Group:
    """The page of `semmoe watch`: figures of a `watch.View`, the load of ranks, the heaviest pairs, and alarms."""
    who = ", ".join(f"{name} {value}" for name, value in seen.active.items())
    title = Text(f"{url}: {seen.ranks} ranks, {who}; the last {seen.seconds:.0f} s", style="bold")
    parts: list[RenderableType] = [title, _figures(seen, expected)]
    if seen.load:
        most = max(seen.load.values())
        rows = [[rank, f"{value:.2f}", _bar(value, most)] for rank, value in seen.load.items()]
        parts += [Text(), _grid(["rank", "expert load", ""], rows)]
    for kind, pairs in (("node", seen.node_pairs), ("rank", seen.rank_pairs)):
        if pairs:
            parts += [Text(), _pairs(kind, pairs)]
    if seen.pairs == 0 and not seen.stale:
        parts.append(Text("no tokens were routed"))
    for alarm in _alarms(seen, warning):
        parts += [Text(), Text(alarm, style="bold red")]
    return Group(*parts)


def _alarms(seen: Any, warning: str | None) -> list[str]:
    alarms = [f"DEGRADED: {reason}" for reason in seen.degraded]
    if seen.stale:
        names = ", ".join(seen.stale)
        alarms.append(f"STALE: the counters of {names} stand still: is the disk of the control folder full?")
    return alarms + ([] if warning is None else [f"DRIFT: {warning}"])


def _figures(seen: Any, expected: float | None) -> Table:
    network = "" if seen.remote_nodes_per_token is None else f", {seen.network_ranks_per_token:.2f} on other nodes"
    planned = "" if expected is None else f"the plan expects {expected:.3f}"
    nodes, sent = seen.remote_nodes_per_token, seen.all_to_all_bytes_per_token
    rows = [
        ("plan", ", ".join(seen.plans), "RANKS DIFFER" if len(seen.plans) > 1 else ""),
        ("local activation rate", console.figure(seen.lar), planned),
        ("remote ranks per token", console.figure(seen.remote_ranks_per_token, 2), f"and layer{network}"),
        ("remote nodes per token", "" if nodes is None else console.figure(nodes, 2), "and layer"),
        ("remote pairs per token", console.figure(seen.remote_pairs_per_token, 2), "and layer"),
        ("all-to-all bytes", "" if sent is None else f"{sent:,.0f}", "per token and layer"),
        ("routed", f"{seen.routed_tokens_per_second:,.0f}", "tokens a second, times layers"),
        ("requests by the plan", f"{sum(seen.scheduled.values()):,}", _to_ranks(seen.scheduled)),
        ("requests with a rank", f"{seen.named:,}", "named by themselves"),
        ("requests by the engine", f"{seen.by_engine:,}", ""),
        ("ids outside the tables", f"{seen.unknown_tokens:,}", ""),
        ("failures to schedule", f"{seen.schedule_failures:,}", ""),
    ]
    counted = [(name, Text(value), Text(note, style="dim")) for name, value, note in rows if value]
    return _grid(["", "figure", ""], counted, header=False)


def _to_ranks(scheduled: dict[str, int]) -> str:
    return ", ".join(f"{count:,} to rank {rank}" for rank, count in scheduled.items())


def _pairs(kind: str, pairs: list) -> Table:
    """The rows and bytes that nodes or ranks sent to each other, the heaviest pairs first, as bars."""
    shown, most = pairs[:MOST_PAIRS], max(pairs[0].rows_per_second, 1e-9)
    with_bytes = any(pair.bytes_per_second is not None for pair in pairs)
    rows = []
    for pair in shown:
        size = ["-" if pair.bytes_per_second is None else f"{pair.bytes_per_second / 1e6:.2f}"] if with_bytes else []
        ends, rate = f"{pair.source} → {pair.target}", f"{pair.rows_per_second:,.0f}"
        rows.append([ends, rate, *size, _bar(pair.rows_per_second, most)])
    table = _grid([f"{kind} to {kind}", "rows a second", *(["MB a second"] if with_bytes else []), ""], rows)
    if len(pairs) > len(shown):
        table.caption, table.caption_justify = f"the {len(shown)} heaviest of {len(pairs):,} pairs", "left"
    return table


def _grid(columns: list[str], rows: Iterable[Iterable[RenderableType]], header: bool = True) -> Table:
    """A table without lines, whose columns are at the right if they have a name."""
    table = Table(box=None, pad_edge=False, show_header=header)
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        table.add_row(*row)
    return table


def _bar(value: float, most: float) -> str:
    return "█" * round(BAR * value / most)
