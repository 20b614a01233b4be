"""The commands swap and adapt: change the plan of a running server."""

import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

from semmoe.cli import options
from semmoe.cli.app import SERVING, command
from semmoe.io import console
from semmoe.settings import AdaptSettings, SwapSettings

LOG = "adapt.jsonl"


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
        console.print_table(f"{len(ranks)} ranks on this node", columns, list(map(_row, ranks)))
    if status.state != "done":
        raise RuntimeError(f"the swap was {status.state}: {status.reason}")


def _row(s: Any) -> list[str]:
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
    from semmoe.live.adapt import Adapter
    from semmoe.live.solving import solve_aside
    from semmoe.live.status import serving

    served = server.served()
    report = _reporter(served.folder / LOG, decisions(metrics_port), as_json)
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
