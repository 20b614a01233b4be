"""The command adapt: let the plan of a running server follow its traffic."""

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from semmoe.cli import options
from semmoe.cli.app import SERVING, command
from semmoe.engines.private import check_folder
from semmoe.io import console
from semmoe.settings import AdaptSettings

LOG = "adapt.jsonl"


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
    from semmoe.live.adapt import Adapter
    from semmoe.live.client import Served
    from semmoe.live.solving import solve_aside
    from semmoe.live.status import serving

    url, folder, client = server.find()
    check_folder(folder)
    plan = serving(folder)
    report = _reporter(folder / LOG, decisions(metrics_port), as_json)
    loop = Adapter(Served(url, folder, client), plan, settings, folder, solve_aside, report, dry_run)
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
