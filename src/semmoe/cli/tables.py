"""Results of `solve`, `replay`, `generate` and `demo` as tables and sentences on the terminal."""

from pathlib import Path
from typing import Any

from semmoe.core import NEVER
from semmoe.evaluation.results import DemoFile
from semmoe.io import console


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
    if "end_to_end" in result:
        found = result["end_to_end"]
        console.say(
            f"of the {found['share']:.1%} of a pass that all-to-alls take, the plan saves {found['saving']:.1%} on "
            f"{found['links']}: a pass is {found['gain']:.3f} times as fast, if nothing else of it changes"
        )


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


def print_payoffs(result: dict[str, Any]) -> None:
    """Print where a plan with the demo's traffic pays: the time that it would save, or that it is not worth it."""
    from semmoe.report import sections, words

    if result["payoffs"]:
        table = sections.payoffs(DemoFile.model_validate(result)).table
        console.print_table(table.caption, table.columns, table.rows)
        console.out.print(words.PAYOFFS)
