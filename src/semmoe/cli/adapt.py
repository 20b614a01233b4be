"""The command adapt: let the plan of a running server follow its traffic."""

import contextlib
import json
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import typer

from semmoe import console
from semmoe.calibration import load_links
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.links import LinksOption
from semmoe.cli.options import INPUT, OUTPUT, CaOption, ControlOption, HeaderOption, Json, client_of, default_folder
from semmoe.cli.swap import address
from semmoe.client import Client
from semmoe.settings import AdaptSettings

LOG = "adapt.jsonl"


@app.command(rich_help_panel=SERVING)
@takes(settings=AdaptSettings)
def adapt(
    url: Annotated[
        str, typer.Argument(help="URL of a server started by `semmoe serve`, such as http://127.0.0.1:30000.")
    ],
    plan: Annotated[Path, typer.Option(help="The plan that it serves on.", rich_help_panel=INPUT)],
    control: ControlOption = None,
    header: HeaderOption = None,
    ca: CaOption = None,
    links: LinksOption = None,
    settings: Any = None,
    dry_run: Annotated[
        bool, typer.Option(help="Record, solve and decide, but swap nothing.", rich_help_panel=OUTPUT)
    ] = False,
    metrics_port: Annotated[
        int, typer.Option(min=0, max=65_535, help="Publish decisions at this port; 0: nowhere.", rich_help_panel=OUTPUT)
    ] = 0,
    as_json: Json = False,
) -> None:
    """Watch a server, and when requests drift from its plan: record, solve again, and swap where that pays.

    The new plan must keep more pairs local for the newest requests, on which it was not solved, and pay for the move on
    these links within the horizon. After a swap the gain is measured; if it is not there, the old plan comes back.
    Every decision is a line of JSON in the control folder (adapt.jsonl). A file adapt.off there stops all decisions.
    Recordings hold users' text, are readable by you only, and are removed once a plan is solved. Plans that served
    before stay in the control folder and are tried first, since traffic comes back.

    Examples: `semmoe adapt http://127.0.0.1:30000 --plan plan --links links.json` and
    `semmoe adapt http://127.0.0.1:30000 --plan plan --dry-run --json`
    """
    given: AdaptSettings = settings()
    client = client_of(header, ca, [url])
    folder = control or default_folder(urlsplit(address(url)).port or 80)
    tell = _teller(folder / LOG, decisions(metrics_port), as_json)
    loop = _adapter(address(url), client, plan, folder, links, given, tell, dry_run)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # else the recording that is on would stay on
    with contextlib.closing(loop.solve), contextlib.closing(loop):
        while True:
            loop.turn()


def _adapter(
    url: str, client: Client, plan: Path, folder: Path, links: str | None, given: AdaptSettings, tell: Any,
    dry_run: bool,
) -> Any:  # fmt: skip
    """The loop. Raises ValueError if the server runs on another plan, or on none."""
    from semmoe.adapt.loop import Adapter
    from semmoe.adapt.served import Served
    from semmoe.adapt.solving import Solver, default_links
    from semmoe.engines.live.files import plan_name, plan_number, read_status
    from semmoe.engines.private import check_folder
    from semmoe.plan import load_plan

    loaded = load_plan(plan)
    check_folder(folder)
    serves = read_status(folder).plan
    if serves != plan_number(loaded):
        raise ValueError(f"{plan} is plan {plan_name(plan_number(loaded))}, and the server runs on {plan_name(serves)}")
    name = links or default_links(loaded)
    server = Served(url, folder, given, client)
    timed = load_links(name, loaded.topology)
    return Adapter(server, loaded, plan.resolve(), timed, name, given, folder, Solver(given.nice), tell, dry_run)


def decisions(port: int) -> Any:
    """The metric of decisions, published on the loopback interface if there is a port."""
    from prometheus_client import CollectorRegistry, Counter, start_http_server

    registry = CollectorRegistry()
    found = Counter("semmoe_adapt_decisions", "Decisions of semmoe adapt, by action", ["action"], registry=registry)
    if port:
        start_http_server(port, "127.0.0.1", registry)
    return found


def _teller(path: Path, counter: Any, as_json: bool) -> Any:
    """What tells a decision: to the log, to whoever watches, and as a metric."""

    def tell(decision: Any) -> None:
        counter.labels(decision.action).inc()
        line = json.dumps({"time": round(time.time(), 1), **asdict(decision)})
        with path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if as_json:
            print(line, flush=True)
        else:
            console.out.print(f"{time.strftime('%H:%M:%S')}  {decision.action:7}{decision.why}", highlight=False)

    return tell
