"""The command swap: change the plan of a running server."""

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
from semmoe.client import Client
from semmoe.core import Plan
from semmoe.settings import SwapSettings


@app.command(rich_help_panel=SERVING)
@takes(settings=SwapSettings)
def swap(
    url: Annotated[
        str,
        typer.Argument(help="URL of a server started by `semmoe serve`, such as http://127.0.0.1:30000."),
    ],
    plan: Annotated[Path, typer.Option(help="The plan to serve on from now on.", rich_help_panel=INPUT)],
    control: ControlOption = None,
    header: HeaderOption = None,
    ca: CaOption = None,
    stage_only: Annotated[
        bool,
        typer.Option(
            "--stage-only", help="Only give the plan to the ranks of this node, of several.", rich_help_panel=OUTPUT
        ),
    ] = False,
    dry_run: Annotated[bool, typer.Option(help="Print what would move, and stop.", rich_help_panel=OUTPUT)] = False,
    links: LinksOption = None,
    settings: Any = None,
    as_json: Json = False,
) -> None:
    """Swap the plan of a running server: experts move between its ranks, requests go on, and nothing is lost.

    All ranks agree before anything moves; if one cannot, nothing does. The number of redundant experts stays that of
    the start. With several nodes, first `--stage-only` on each of the others. A server that asks for a key gets the one
    in SERVER_API_KEY. Exit code 1: the old plan serves on, or the server has ended, and the reason is printed.

    Examples: `semmoe swap http://127.0.0.1:30000 --plan new` and
    `semmoe swap http://127.0.0.1:30000 --plan new --layers-per-pass 4 --json`
    """
    from semmoe.engines.private import check_folder
    from semmoe.plan import load_plan

    client = client_of(header, ca, [url])
    url, loaded = address(url), load_plan(plan)
    folder = control or default_folder(urlsplit(url).port or 80)
    check_folder(folder)
    if dry_run:
        _price(loaded, folder, links, as_json)
    elif stage_only:
        _stage(loaded, folder)
    else:
        _swap(url, folder, loaded, settings(), client, as_json)


def _swap(url: str, folder: Path, plan: Plan, given: SwapSettings, client: Client, as_json: bool) -> None:
    from semmoe import live
    from semmoe.engines.live.files import plan_number

    with console.err.status("swapping"):
        status = live.swap(url, folder, plan, given, client)
    _tell(plan_number(plan), status, folder, as_json)


def _stage(plan: Plan, folder: Path) -> None:
    from semmoe.engines.live.files import plan_name, stage

    console.out.print(f"plan {plan_name(stage(plan, folder))} is staged in {folder}", markup=False, highlight=False)


def _price(plan: Plan, folder: Path, links: str | None, as_json: bool) -> None:
    """Print what a swap would move, and how long passes would wait for it."""
    from semmoe.engines.live.files import read_status, staged
    from semmoe.engines.live.swap import check_fits
    from semmoe.moving import move_between

    status = read_status(folder)
    old = staged(folder, status.plan)
    check_fits(plan, old)
    move, size = move_between(old, plan), status.expert_bytes
    row = {"slots": move.slots, "experts_inside_nodes": move.inside, "experts_between_nodes": move.between,
           "megabytes": (move.inside + move.between) * size / 1e6}  # fmt: skip
    if links:
        seconds = move.seconds(size, load_links(links, plan.topology))
        row |= {"seconds": float(seconds.sum()), "seconds_of_the_longest_layer": float(seconds.max(initial=0.0))}
    if as_json:
        console.print_json(row)
    else:
        shown = [[name.replace("_", " "), f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"]
                 for name, value in row.items()]  # fmt: skip
        console.print_table("what would move", ["", ""], shown)


def address(url: str) -> str:
    from semmoe.client import split_address

    parts = split_address(url)
    return f"{parts.scheme}://{parts.netloc}"


def _tell(number: int, status: Any, folder: Path, as_json: bool) -> None:
    """Print how it ended, by rank 0's SwapStatus and those on disk. Raises RuntimeError unless it is done."""
    from semmoe.engines.live.files import plan_name, read_statuses

    ranks = [one for one in read_statuses(folder) if one.asked == number] or [status]
    if as_json:
        told = {"plan": plan_name(number), "state": status.state, "reason": status.reason}
        console.print_json(told | {"ranks": [one.model_dump() for one in ranks]})
    elif status.state == "done":
        _print_done(plan_name(number), ranks)
    if status.state != "done":
        raise RuntimeError(f"the swap was {status.state}: {status.reason}")


def _print_done(name: str, ranks: list[Any]) -> None:
    console.out.print(f"the server runs on plan {name}", highlight=False)
    rows = [
        [str(s.rank), f"{s.layers_done}", f"{s.moved:,}", console.megabytes(s.received_bytes),
         f"{1000 * s.seconds:.0f}", f"{1000 * s.longest:.0f}"]
        for s in ranks
    ]  # fmt: skip
    columns = ["rank", "layers", "slots\nchanged", "MB\nreceived", "ms\nin all", "longest\nms"]
    console.print_table(f"{len(ranks)} ranks on this node", columns, rows)
