"""The command watch: a live view of a running server."""

import json
import time
from collections import deque
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live

from semmoe.cli import options, tables
from semmoe.cli.app import SERVING, command
from semmoe.io import console
from semmoe.settings import WatchSettings

MAX_LOOKS = 10_000


@command(SERVING)
def watch(
    *,
    url: options.UrlArgument,
    plan: Annotated[
        Path | None, options.inputs("The plan that it serves on: figures are compared with what it expects.")
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

    expected = None if plan is None else _expected_lar(plan)
    nodes = [url, *(also or [])]
    client = asking.client(nodes)
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
                console.out.print(tables.watched(url, seen, expected, warning))
            else:
                page.update(tables.watched(url, seen, expected, warning), refresh=True)
            if once:
                raise typer.Exit(int(warning is not None or bool(seen.stale) or bool(seen.degraded)))


def _expected_lar(plan: Path) -> float | None:
    """The local activation rate that a plan expects; a warning is printed if it expects none."""
    from semmoe.live.watch import expected_lar
    from semmoe.plan import load_plan

    expected = expected_lar(load_plan(plan).expected)
    if expected is None:
        console.warn("this plan says nothing of what to expect: its profile was too small")
    return expected
