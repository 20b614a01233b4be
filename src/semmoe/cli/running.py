"""The commands watch, swap and adapt: follow a running server, and change its plan."""

import json
import signal
import sys
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from semmoe.cli import options
from semmoe.cli.app import SERVING, command
from semmoe.io import console
from semmoe.settings import AdaptSettings, SwapSettings, WatchSettings

MAX_LOOKS = 10_000
MOST_PAIRS = 12  # pairs of nodes that are shown, the heaviest
BAR = 30  # characters
Row = tuple[str, str, str]  # name, figure, note


@command(SERVING)
def watch(
    *,
    url: options.UrlArgument,
    plan: Annotated[
        Path | None, options.inputs("The plan that the server runs on: figures are compared with its predictions.")
    ] = None,
    also: Annotated[
        list[str] | None, options.inputs("URLs at which its other nodes publish the counters of their ranks.")
    ] = None,
    asking: options.ClientOptions,
    settings: WatchSettings,
    once: Annotated[
        bool,
        options.output("Watch one window, print, and end: exit code 1 if it drifted, is stale or degraded.", "--once"),
    ] = False,
    as_json: options.Json = False,
) -> None:
    """Watch whether a plan fits a running server: local activations, load of ranks, and where requests go.

    The local activation rate of current requests is compared with what the plan expects. If it is lower by more than
    --margin, requests are no longer similar to those that were profiled. With --json, prints one line per reading.

    Examples: `semmoe watch http://127.0.0.1:30000 --plan plan` and
    `semmoe watch http://127.0.0.1:30000 --plan plan --window 30 --once --json`
    """
    from semmoe.live import watch as watching
    from semmoe.plan import load_plan

    expected = None if plan is None else watching.expected_lar(load_plan(plan).expected)
    if plan is not None and expected is None:
        console.warn("this plan says nothing of what to expect: its profile was too small")
    nodes = [url, *(also or [])]
    client = asking.client()
    looks = deque([watching.look(nodes, time.monotonic(), client)], maxlen=MAX_LOOKS)
    live = nullcontext() if once or as_json else Live(console=console.out, auto_refresh=False, screen=False)
    with live as page:
        while True:
            time.sleep(settings.window if once else settings.every)
            seen = watching.view_window(looks, watching.look(nodes, time.monotonic(), client), settings.window)
            warning = watching.drift(seen, expected, settings.margin)
            if as_json:
                print(json.dumps(asdict(seen) | {"expected_lar": expected, "drift": warning}), flush=True)
            elif page is None:
                console.out.print(_watched(url, seen, expected, warning))
            else:
                page.update(_watched(url, seen, expected, warning), refresh=True)
            if once:
                raise typer.Exit(int(warning is not None or bool(seen.stale) or bool(seen.degraded)))


def _watched(url: str, seen: Any, expected: float | None, warning: str | None) -> Group:
    """The page: a table with the figures of a `watch.View`, the load of ranks and the heaviest pairs, and alarms."""
    who = ", ".join(f"{name} {value}" for name, value in seen.active.items())
    title = Text(f"{url}: {seen.ranks} ranks, {who}; the last {seen.seconds:.0f} s", style="bold")
    table = Table(box=None, pad_edge=False, show_header=False)
    for justify in ("left", "right", "left"):
        table.add_column(justify=justify)
    for name, value, note in [*_figures(seen, expected), *_loads(seen.load), *_pairs(seen.node_pairs)]:
        table.add_row(Text(name), Text(value), Text(note, style="dim"))
    return Group(title, table, *(Text(f"\n{alarm}", style="bold red") for alarm in _alarms(seen, warning)))


def _alarms(seen: Any, warning: str | None) -> list[str]:
    alarms = [f"DEGRADED: {reason}" for reason in seen.degraded]
    if seen.stale:
        names = ", ".join(seen.stale)
        alarms.append(f"STALE: the counters of {names} stand still: is the disk of the control folder full?")
    return alarms + ([] if warning is None else [f"DRIFT: {warning}"])


def _figures(seen: Any, expected: float | None) -> list[Row]:
    network = "" if seen.remote_nodes_per_token is None else f", {seen.network_ranks_per_token:.2f} on other nodes"
    planned = "" if expected is None else f"the plan expects {expected:.3f}"
    nodes, sent = seen.remote_nodes_per_token, seen.all_to_all_bytes_per_token
    routed = "tokens a second, times layers" if seen.pairs or seen.stale else "no tokens were routed"
    to_ranks = ", ".join(f"{count:,} to rank {rank}" for rank, count in seen.scheduled.items())
    rows = [
        ("plan", ", ".join(seen.plans), "RANKS DIFFER" if len(seen.plans) > 1 else ""),
        ("local activation rate", console.figure(seen.lar), planned),
        ("remote ranks per token", console.figure(seen.remote_ranks_per_token, 2), f"and layer{network}"),
        ("remote nodes per token", "" if nodes is None else console.figure(nodes, 2), "and layer"),
        ("remote pairs per token", console.figure(seen.remote_pairs_per_token, 2), "and layer"),
        ("all-to-all bytes", "" if sent is None else f"{sent:,.0f}", "per token and layer"),
        ("routed", f"{seen.routed_tokens_per_second:,.0f}", routed),
        ("requests by the plan", f"{sum(seen.scheduled.values()):,}", to_ranks),
        ("requests with a rank", f"{seen.named:,}", "named by themselves"),
        ("requests by the engine", f"{seen.by_engine:,}", ""),
        ("ids outside the tables", f"{seen.unknown_tokens:,}", ""),
        ("failures to schedule", f"{seen.schedule_failures:,}", ""),
    ]
    return [row for row in rows if row[1]]


def _loads(load: dict[str, float]) -> list[Row]:
    """The expert load of ranks over their mean, as bars."""
    most = max(load.values(), default=1.0)
    return [(f"load of rank {rank}", f"{value:.2f}", "█" * round(BAR * value / most)) for rank, value in load.items()]


def _pairs(pairs: list[Any]) -> list[Row]:
    """The rows and bytes that nodes sent to each other, the heaviest pairs first."""
    rows = []
    for pair in pairs[:MOST_PAIRS]:
        size = "" if pair.bytes_per_second is None else f", {pair.bytes_per_second / 1e6:.2f} MB"
        rows.append((f"node {pair.source} → {pair.target}", f"{pair.rows_per_second:,.0f}", f"rows a second{size}"))
    if len(pairs) > MOST_PAIRS:
        rows.append(("", "", f"the {MOST_PAIRS} heaviest of {len(pairs):,} pairs"))
    return rows


@command(SERVING)
def swap(
    *,
    plan: Annotated[Path, options.inputs("The plan to serve on from now on.")],
    server: options.ServerOptions,
    stage_only: Annotated[
        bool, options.output("Only give the plan to the ranks of this node, of several.", "--stage-only")
    ] = False,
    settings: SwapSettings,
    as_json: options.Json = False,
) -> None:
    """Swap the plan of a running server: experts move between its ranks, requests go on, and nothing is lost.

    All ranks agree before anything moves; if one cannot, nothing does. The number of redundant experts stays that of
    the start. With several nodes, first `--stage-only` on each of the others. A server that asks for a key gets the one
    in SERVER_API_KEY. Exit code 1: the old plan serves on, or the server has ended, and the reason is printed.

    Examples: `semmoe swap http://127.0.0.1:30000 --plan new` and
    `semmoe swap http://127.0.0.1:30000 --plan new --layers-per-pass 4 --json`
    """
    from semmoe.live.status import plan_name, plan_number, stage
    from semmoe.plan import load_plan

    served, loaded = server.served(), load_plan(plan)
    if stage_only:
        name = plan_name(stage(loaded, served.folder))
        console.say(f"plan {name} is staged in {served.folder}")
    else:
        with console.err.status("swapping"):
            status = served.swap(loaded, settings)
        _tell(plan_number(loaded), status, served.folder, as_json)


def _tell(number: int, status: Any, folder: Path, as_json: bool) -> None:
    """Print how it ended, by rank 0's SwapStatus and those on disk. Raises RuntimeError unless it is done."""
    from semmoe.live.status import plan_name, read_statuses

    ranks = [one for one in read_statuses(folder) if one.asked == number] or [status]
    if as_json:
        result = {"plan": plan_name(number), "state": status.state, "reason": status.reason}
        console.print_json(result | {"ranks": [one.model_dump() for one in ranks]})
    elif status.state == "done":
        console.say(f"the server runs on plan {plan_name(number)}")
        columns = ["rank", "layers", "slots\nchanged", "MB\nreceived", "ms\nin all", "longest\nms"]
        console.print_table(f"{len(ranks)} ranks on this node", columns, list(map(_swapped, ranks)))
    if status.state != "done":
        raise RuntimeError(f"the swap was {status.state}: {status.reason}")


def _swapped(s: Any) -> list[str]:
    times = [f"{1000 * s.seconds:.0f}", f"{1000 * s.longest:.0f}"]
    return [str(s.rank), f"{s.layers_done}", f"{s.moved:,}", console.megabytes(s.received_bytes), *times]


@command(SERVING)
def adapt(
    *,
    server: options.ServerOptions,
    settings: AdaptSettings,
    dry_run: Annotated[bool, options.output("Record, solve and decide, but swap nothing.")] = False,
    metrics_port: Annotated[int, options.output("Publish decisions at this port; 0: nowhere.", min=0, max=65_535)] = 0,
    as_json: options.Json = False,
) -> None:
    """Watch a server, and when requests drift from its plan: record, solve again, and swap to a better plan.

    The new plan must keep more pairs local for the newest requests, on which it was not solved. After a swap the gain
    is measured; if it is not there, the old plan comes back. Every decision is a line of JSON in the control folder
    (adapt.jsonl). Recordings hold users' text, are readable by you only, and are removed once a plan is solved.

    Examples: `semmoe adapt http://127.0.0.1:30000` and `semmoe adapt http://127.0.0.1:30000 --dry-run --json`
    """
    from semmoe.live.adapt import Adapter, solve_aside
    from semmoe.live.status import serving

    served = server.served()
    report = _reporter(served.folder / "adapt.jsonl", decisions(metrics_port), as_json)
    loop = Adapter(served, serving(served.folder), settings, solve_aside, report, dry_run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else a recording that is on would stay on
    while True:
        loop.turn()


def decisions(port: int) -> Any:
    """The metric of decisions, published on the loopback interface if there is a port."""
    from prometheus_client import CollectorRegistry, Counter, start_http_server

    registry = CollectorRegistry()
    found = Counter("semmoe_adapt_decisions", "Decisions of semmoe adapt, by action", ["action"], registry=registry)
    if port:
        start_http_server(port, "127.0.0.1", registry)
    return found


def _reporter(path: Path, counter: Any, as_json: bool) -> Any:
    """Return a function that reports a decision: to the log, to whoever watches, and as a metric."""

    def report(decision: Any) -> None:
        counter.labels(decision.action).inc()
        line = json.dumps({"time": round(time.time(), 1), **asdict(decision)})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if as_json:
            print(line, flush=True)
        else:
            console.out.print(f"{time.strftime('%H:%M:%S')}  {decision.action:7}{decision.why}")

    return report
