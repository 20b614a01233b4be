"""Options that several commands share, with their defaults in one place."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from semmoe import console
from semmoe.bounds import MOST_RANKS, choice, number
from semmoe.client import Client, make_client, split_address
from semmoe.core import Plan, RoutingTrace
from semmoe.demo import MODEL
from semmoe.files import atomic_file, check_output
from semmoe.results import checked
from semmoe.topology import Topology

TOPOLOGY, METHOD, LINKS, INPUT, OUTPUT = "Topology", "Method", "Links", "Input", "Output"
OFFLINE_RANKS, PROCESSES = 8, 4
KEY = "SERVER_API_KEY"  # a variable, so that the key is in no list of processes


def option(panel: str, help: str, *flags: str, **more: Any) -> Any:
    """Declare an option in a panel of `--help`. flags: its names, if the parameter's name is not its only one."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


method = partial(option, METHOD)
links = partial(option, LINKS)
inputs = partial(option, INPUT)
output = partial(option, OUTPUT)


def argument(help: str, **more: Any) -> Any:
    return typer.Argument(help=help, show_default=False, **more)


def model_path(name: str | None) -> str | None:
    """The model's directory; `tiny` is the embedded model, unless a directory has that name. Raises BadParameter."""
    if name is None or Path(name).is_dir():
        return name
    if name == "tiny":
        return str(MODEL)
    if Path(name).exists():
        raise typer.BadParameter(f"{name} is a file: give the model's directory")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        raise typer.BadParameter(f"there is no directory {name}; nothing is downloaded: give a directory")
    raise typer.BadParameter(f"there is no directory {name}")


TraceArgument = Annotated[Path, argument("A trace directory, or an .npz file.")]
ModelArgument = Annotated[
    str, argument("A model directory (Hugging Face format), or `tiny`, the embedded one.", callback=model_path)
]
UrlArgument = Annotated[str, argument("URL of a server started by `semmoe serve`, such as http://127.0.0.1:30000.")]
Force = Annotated[bool, output("Replace what --out names.", "--force")]
Json = Annotated[bool, output("Print JSON instead of a table.", "--json")]
ResultOut = Annotated[Path | None, output("Write the result as JSON.", "--out")]
TraceOut = Annotated[Path, output("The trace directory.", "--out")]
Dataset = Annotated[
    Path | None,
    inputs(
        "jsonl (ShareGPT, OpenAI chat or batch, prompt); else running text, cut about every 2,000 characters; "
        "gzip too.",
    ),
]
LinksOption = Annotated[
    str | None,
    links(
        "What links and experts cost: a file of `semmoe calibrate`, or a shipped one, such as h200-nvlink or "
        "h200-400g, the defaults on one node and on several.",
    ),
]
HeaderOption = Annotated[
    list[str] | None,
    inputs("NAME:VALUE sent with every request, such as a gateway's key; may be given several times."),
]
CaOption = Annotated[
    Path | None, inputs("A PEM file of the certificate authorities that an https:// address is checked by.")
]
ControlOption = Annotated[
    Path | None, inputs("The server's control folder, if it is not the one that belongs to its port.")
]


ranks = partial(number, None, 1, MOST_RANKS, panel=TOPOLOGY)
width = partial(number, None, 0, 1 << 24, panel=LINKS)


@dataclass(frozen=True, kw_only=True)
class GivenTopology:
    """The topology options that the user gave; None: not given."""

    ep_size: int | None = ranks(help="Expert-parallel ranks; by default the plan's, 8 offline, all GPUs or 4 online.")
    attention: str | None = choice(
        None, ("tp", "dp", "hybrid"), panel=TOPOLOGY, help="How ranks split attention; by default the plan's, else tp."
    )
    dp_size: int | None = ranks(help="Attention groups, for hybrid.")
    num_nodes: int | None = ranks(help="Nodes that the ranks are spread over; by default the plan's, else 1.")


@dataclass(frozen=True, kw_only=True)
class Widths:
    """The model's widths that the user gave; None: not given."""

    hidden_size: int | None = width(help="Width of the model, if the trace does not say.")
    expert_size: int | None = width(help="Width of one expert, if the trace does not say.")


def plan_for(model: str, path: Path) -> Plan:
    """Load a plan. Raises ValueError if it was made for another model."""
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.plan import load_plan

    plan = load_plan(path)
    plan.check(fingerprint_of(model))
    return plan


def resolve_topology(plan: Plan | None, given: GivenTopology, ep_size: int) -> Topology:
    """The plan's topology, checked against the options; without a plan, the given one (default `ep_size` ranks)."""
    if plan is None:
        return Topology.for_attention(given.attention or "tp", given.ep_size or ep_size, given.dp_size, given.num_nodes)
    for name in ("attention", "ep_size", "dp_size", "num_nodes"):
        planned, wanted = getattr(plan.topology, name), getattr(given, name)
        if wanted not in (None, planned):
            raise ValueError(f"the plan is for {name} {planned}, not {wanted}")
    return plan.topology


def ranks_at_hand() -> int:
    """The number of GPUs of this machine, or the default number of processes if there is none."""
    import torch

    return torch.accelerator.device_count() or PROCESSES


def read_trace(path: Path, seed: int = 0) -> RoutingTrace:
    """Load a trace; sample it if it is too large, and print the size of the sample."""
    from semmoe.streams import open_bounded

    trace, tokens = open_bounded(path, seed)
    if trace.num_tokens == 0:
        raise ValueError(f"{path} holds no routed token")
    if tokens:
        words = (
            f"{path} has {tokens:,} tokens, more than are read at once: {trace.num_tokens:,} of them count, of "
            f"{trace.num_requests:,} requests drawn by seed {seed}"
        )
        console.err.print(f"[yellow]note:[/] {console.plain(words)}", soft_wrap=True, highlight=False)
    return trace


def check_installed(engine: str) -> None:
    """Raise ValueError unless this environment has the engine."""
    try:
        version(engine)
    except PackageNotFoundError:
        raise ValueError(
            f"{engine} is not installed in this environment: install semmoe into {engine}'s and run it there"
        ) from None


def check_result(out: Path | None, force: bool, inputs: Iterable[Path | str | None] = ()) -> None:
    """Raise an error, before the work begins, unless the result can be written to `out` without changing an input."""
    if out is not None:
        check_output(out, force=force, inputs=inputs)


def tell_result(kind: type[BaseModel], result: dict[str, Any], out: Path | None, as_json: bool) -> bool:
    """Write a command's result to `out` if given, print it as JSON if requested, and return whether it was printed."""
    checked(kind, result)
    if out is not None:
        with atomic_file(out) as staged:
            staged.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if as_json:
        console.print_json(result)
    return as_json


def default_folder(port: int) -> Path:
    """The control folder of a server that is given no other."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "semmoe" / f"serve-{port}"


def server_at(url: str, control: Path | None) -> tuple[str, Path]:
    """The address of a running server without a path, and its control folder. Raises ValueError."""
    parts = split_address(url)
    return f"{parts.scheme}://{parts.netloc}", control or default_folder(parts.port or 80)


def client_of(header: list[str] | None, ca: Path | None, urls: list[str]) -> Client:
    """The client of the servers at `urls` by the options --header and --ca and the key in the environment."""
    return make_client(header or [], ca, urls, os.environ.get(KEY, ""))
