"""Options that several commands share, with their defaults in one place."""

import os
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe.cli.demo import MODEL
from semmoe.core import Plan
from semmoe.costs.links import PhaseLinks, load_links
from semmoe.engines.private import check_folder
from semmoe.io.bounds import MOST_RANKS, choice, number
from semmoe.io.files import read_limited
from semmoe.live.http import Client, make_client, split_address
from semmoe.topology import Topology

TOPOLOGY = "Topology"
OFFLINE_RANKS = 8
PROCESSES = 4
KEY = "SERVER_API_KEY"  # a variable, so that the key is in no list of processes
MOST_HEADER_BYTES = 1 << 16  # of a file of headers


def option(panel: str, help: str, *flags: str, **more: Any) -> Any:
    """Declare an option in a panel of `--help`. flags: its names, if the parameter's name is not its only one."""
    return typer.Option(*flags, help=help, rich_help_panel=panel, **more)


method = partial(option, "Method")
inputs = partial(option, "Input")
output = partial(option, "Output")


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
    raise typer.BadParameter(f"{name} does not exist, and nothing is downloaded: give a directory")


model = partial(inputs, callback=model_path)
TraceArgument = Annotated[Path, argument("A trace directory, or an .npz file.")]
ModelArgument = Annotated[
    str, argument("A model directory (Hugging Face format), or `tiny`, the embedded one.", callback=model_path)
]
UrlArgument = Annotated[str, argument("URL of a server started by `semmoe serve`, such as http://127.0.0.1:30000.")]
Force = Annotated[bool, output("Replace what --out names.", "--force")]
Json = Annotated[bool, output("Print JSON instead of a table.", "--json")]
TraceOut = Annotated[Path, output("The trace directory.", "--out")]
Dataset = Annotated[
    Path | None,
    inputs(
        "jsonl (ShareGPT, OpenAI chat or batch, prompt); else running text, cut about every 2,000 characters; "
        "gzip too.",
    ),
]
ranks = partial(number, None, 1, MOST_RANKS, panel=TOPOLOGY)


@dataclass(frozen=True, kw_only=True)
class GivenTopology:
    """The topology options that the user gave; None: not given."""

    ep_size: int | None = ranks(help="Expert-parallel ranks; by default the plan's, 8 offline, all GPUs or 4 online.")
    attention: str | None = choice(
        None, ("tp", "dp", "hybrid"), panel=TOPOLOGY, help="How ranks split attention; by default the plan's, else tp."
    )
    dp_size: int | None = ranks(help="Attention groups, for hybrid.")
    num_nodes: int | None = ranks(help="Nodes that the ranks are spread over; by default the plan's, else 1.")

    def resolve(self, plan: Plan | None, ep_size: int) -> Topology:
        """The plan's topology, checked against the options; without a plan, that of the options or `ep_size` ranks."""
        if plan is None:
            return Topology.for_attention(self.attention or "tp", self.ep_size or ep_size, self.dp_size, self.num_nodes)
        for name in ("attention", "ep_size", "dp_size", "num_nodes"):
            planned, wanted = getattr(plan.topology, name), getattr(self, name)
            if wanted not in (None, planned):
                raise ValueError(f"the plan is for {name} {planned}, not {wanted}")
        return plan.topology


@dataclass(frozen=True, kw_only=True)
class LinksOptions:
    """The links of both phases."""

    links: Annotated[
        str | None,
        option(
            "Links",
            "What links and experts cost: a file of `python -m lab calibrate`, or a shipped one, such as h200-nvlink "
            "or h200-400g, the defaults on one node and on several.",
        ),
    ] = None
    decode_links: Annotated[
        str | None, option("Links", "The same of decoding, where its all-to-all is another, such as h200-400g-ll.")
    ] = None

    def load(self, topology: Topology) -> PhaseLinks:
        """The links given, or the default ones; decoding has those of prefill unless it has its own."""
        prefill = load_links(self.links or ("h200-nvlink" if topology.num_nodes == 1 else "h200-400g"), topology)
        decode = prefill if self.decode_links is None else load_links(self.decode_links, topology)
        return PhaseLinks(prefill, decode)


@dataclass(frozen=True, kw_only=True)
class ClientOptions:
    """How running servers are asked."""

    header: Annotated[
        list[str] | None,
        inputs("NAME:VALUE sent with every request, or @FILE with one per line; may be given several times."),
    ] = None

    def client(self) -> Client:
        """The client of the servers, with the key in the environment."""
        headers: list[str] = []
        for one in self.header or []:
            if one.startswith("@"):
                headers += read_limited(Path(one[1:]), MOST_HEADER_BYTES).decode().splitlines()
            else:
                headers.append(one)
        return make_client(headers, os.environ.get(KEY, ""))


@dataclass(frozen=True, kw_only=True)
class ServerOptions(ClientOptions):
    """How one running server is asked, and its control folder."""

    url: UrlArgument
    control: Annotated[
        Path | None, inputs("The server's control folder, if it is not the one that belongs to its port.")
    ] = None

    def served(self) -> Any:
        """The server as a `Served`, by its address without a path. Raises ValueError."""
        from semmoe.live.client import Served

        client, parts = self.client(), split_address(self.url)
        folder = self.control or default_folder(parts.port or 80)
        check_folder(folder)
        return Served(f"{parts.scheme}://{parts.netloc}", folder, client)


def plan_for(model: str, path: Path) -> Plan:
    """Load a plan. Raises ValueError if it was made for another model."""
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.plan import load_plan

    plan = load_plan(path)
    plan.check(fingerprint_of(model))
    return plan


def ranks_at_hand() -> int:
    """The number of GPUs of this machine, or the default number of processes if there is none."""
    import torch

    return torch.accelerator.device_count() or PROCESSES


def check_installed(engine: str) -> None:
    """Raise ValueError unless this environment has the engine."""
    try:
        version(engine)
    except PackageNotFoundError:
        raise ValueError(
            f"{engine} is not installed in this environment: install semmoe into {engine}'s and run it there"
        ) from None


def check_shuffle_from(least: int, plan: Plan | None, shuffles: bool = True) -> None:
    """Raise ValueError for the option --shuffle-from where no token is shuffled."""
    if least and (plan is None or not plan.tokens.by_tables or not shuffles):
        raise ValueError("--shuffle-from has no effect: only a plan for attention tp or hybrid shuffles tokens")


def default_folder(port: int) -> Path:
    """The control folder of a server that is given no other."""
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "semmoe" / f"serve-{port}"
