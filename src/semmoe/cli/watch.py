"""The command watch: a live view of a running server."""

import json
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from semmoe import console
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.options import INPUT, OUTPUT, CaOption, HeaderOption, Json, client_of
from semmoe.client import Client
from semmoe.settings import WatchSettings

MAX_LOOKS = 10_000
MOST_PAIRS = 12  # pairs of nodes or ranks that are shown, the heaviest


Also = Annotated[
    list[str] | None,
    typer.Option(
        help="URLs at which its other nodes publish the counters of their ranks.",
        rich_help_panel=INPUT,
        show_default=False,
    ),
]


@app.command(rich_help_panel=SERVING)
@takes(settings=WatchSettings)
def watch(
    url: Annotated[
        str,
        typer.Argument(
            help="URL of a server started by `semmoe serve`, such as http://127.0.0.1:30000.", show_default=False
        ),
    ],
    plan: Annotated[
        Path | None,
        typer.Option(
            help="The plan that it serves on: figures are compared with what it expects.",
            rich_help_panel=INPUT,
            show_default=False,
        ),
    ] = None,
    also: Also = None,
    header: HeaderOption = None,
    ca: CaOption = None,
    settings: Any = None,
    once: Annotated[
        bool,
        typer.Option(
            "--once",
            rich_help_panel=OUTPUT,
            help="Watch one window, print, and end: exit code 1 if it drifted, is stale or degraded.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Watch whether a plan fits a running server: local activations, load of ranks, and where requests go.

    The local activation rate of current requests is compared with what the plan expects. If it is lower by more than
    --margin, requests are no longer similar to those that were profiled. With --json, prints one line per reading.

    Examples: `semmoe watch http://127.0.0.1:30000 --plan plan` and
    `semmoe watch http://127.0.0.1:30000 --plan plan --window 30 --once --json`
    """
    given: WatchSettings = settings()
    expected = None if plan is None else _expected_lar(plan)
    nodes = [url, *(also or [])]
    client = client_of(header, ca, nodes)
    look = partial(_look, nodes, client)
    looks = deque([look()], maxlen=MAX_LOOKS)
    if once:
        time.sleep(given.window)
        raise typer.Exit(_show_once(looks[0], look(), url, expected, given.margin, as_json))
    _follow(looks, look, url, expected, given, as_json)


def _expected_lar(plan: Path) -> float | None:
    """The local activation rate that a plan expects; a warning is printed if it expects none."""
    from semmoe.plan import load_plan
    from semmoe.watch import expected_lar

    expected = expected_lar(load_plan(plan).expected)
    if expected is None:
        console.warn("this plan says nothing of what to expect: its profile was too small")
    return expected


def _follow(
    looks: deque, look: Callable[[], Any], url: str, expected: float | None, given: WatchSettings, as_json: bool
) -> None:
    from semmoe import watch as watching

    live = nullcontext() if as_json else Live(console=console.out, auto_refresh=False, screen=False)
    with live as page:
        while True:
            time.sleep(given.every)
            seen = _next(looks, look(), given.window)
            warning = watching.drift(seen, expected, given.margin)
            if page is None:
                print(json.dumps(_record(seen, expected, warning)), flush=True)
            else:
                page.update(_page(url, seen, expected, warning), refresh=True)


def _look(nodes: list[str], client: Client) -> Any:
    from semmoe import watch as watching

    return watching.look(nodes, time.monotonic(), client)


def _next(looks: deque, newest: Any, window: float) -> Any:
    from semmoe import watch as watching

    looks.append(newest)
    while len(looks) > 2 and looks[-1].time - looks[1].time >= window:
        looks.popleft()
    return watching.view(looks[0], looks[-1])


def _show_once(first: Any, last: Any, url: str, expected: float | None, margin: float, as_json: bool) -> int:
    from semmoe import watch as watching

    seen = watching.view(first, last)
    warning = watching.drift(seen, expected, margin)
    if as_json:
        console.print_json(_record(seen, expected, warning))
    else:
        console.out.print(_page(url, seen, expected, warning))
    return int(warning is not None or bool(seen.stale) or bool(seen.degraded))


def _record(seen: Any, expected: float | None, warning: str | None) -> dict[str, Any]:
    return asdict(seen) | {"expected_lar": expected, "drift": warning}


def _page(url: str, seen: Any, expected: float | None, warning: str | None) -> Group:
    who = ", ".join(f"{name} {value}" for name, value in seen.active.items())
    parts: list[RenderableType] = [
        Text(f"{url}: {seen.ranks} ranks, {who}; the last {seen.seconds:.0f} s", style="bold"),
        _figures(seen, expected),
    ]
    if seen.load:
        parts += [Text(), _ranks(seen)]
    for kind, pairs in (("node", seen.node_pairs), ("rank", seen.rank_pairs)):
        if pairs:
            parts += [Text(), _pairs(kind, pairs)]
    for reason in seen.degraded:
        parts += [Text(), Text(f"DEGRADED: {reason}", style="bold red")]
    if seen.stale:
        text = f"STALE: the counters of {', '.join(seen.stale)} stand still: is the disk of the control folder full?"
        parts += [Text(), Text(text, style="bold red")]
    elif seen.pairs == 0:
        parts.append(Text("no tokens were routed"))
    if warning is not None:
        parts += [Text(), Text(f"DRIFT: {warning}", style="bold red")]
    return Group(*parts)


def _figures(seen: Any, expected: float | None) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    network = "" if seen.remote_nodes_per_token is None else f", {seen.network_ranks_per_token:.2f} on other nodes"
    to_ranks = ", ".join(f"{count:,} to rank {rank}" for rank, count in seen.scheduled.items())
    nodes, sent = seen.remote_nodes_per_token, seen.all_to_all_bytes_per_token
    rows = [
        *([("plan", ", ".join(seen.plans), "RANKS DIFFER" if len(seen.plans) > 1 else "")] if seen.plans else []),
        ("local activation rate", console.figure(seen.lar), expected and f"the plan expects {expected:.3f}"),
        ("remote ranks per token", console.figure(seen.remote_ranks_per_token, 2), f"and layer{network}"),
        *([("remote nodes per token", console.figure(nodes, 2), "and layer")] if nodes is not None else []),
        ("remote pairs per token", console.figure(seen.remote_pairs_per_token, 2), "and layer"),
        *([("all-to-all bytes", f"{sent:,.0f}", "per token and layer")] if sent is not None else []),
        ("routed", f"{seen.routed_tokens_per_second:,.0f}", "tokens a second, times layers"),
        ("requests by the plan", f"{sum(seen.scheduled.values()):,}", to_ranks),
        ("requests with a rank", f"{seen.named:,}", "named by themselves"),
        ("requests by the engine", f"{seen.by_engine:,}", ""),
        ("ids outside the tables", f"{seen.unknown_tokens:,}", ""),
        ("failures to schedule", f"{seen.schedule_failures:,}", ""),
    ]
    for name, value, note in rows:
        table.add_row(name, Text(value, justify="right"), Text(note or "", style="dim"))
    return table


def _ranks(seen: Any) -> Table:
    """The load of each rank, as a bar."""
    table = Table(box=None, pad_edge=False)
    for column in ("rank", "expert load", ""):
        table.add_column(column, justify="right" if column else "left")
    most = max(seen.load.values())
    for rank, load in seen.load.items():
        table.add_row(rank, f"{load:.2f}", "█" * round(30 * load / most))
    return table


def _pairs(kind: str, pairs: list) -> Table:
    """What nodes or ranks sent to each other, the heaviest pairs first, as bars."""
    table, shown = Table(box=None, pad_edge=False), pairs[:MOST_PAIRS]
    counts_bytes = any(pair.bytes_per_second is not None for pair in pairs)
    for column in (f"{kind} to {kind}", "rows a second", *(["MB a second"] if counts_bytes else []), ""):
        table.add_column(column, justify="right" if column else "left")
    most = max(shown[0].rows_per_second, 1e-9)
    for pair in shown:
        sent = [console.figure(None if (s := pair.bytes_per_second) is None else s / 1e6, 2)] if counts_bytes else []
        bar = "█" * round(30 * pair.rows_per_second / most)
        table.add_row(f"{pair.source} → {pair.target}", f"{pair.rows_per_second:,.0f}", *sent, bar)
    if len(pairs) > len(shown):
        table.caption, table.caption_justify = f"the {len(shown)} heaviest of {len(pairs):,} pairs", "left"
    return table
