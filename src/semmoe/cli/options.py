"""Options that several commands share; defaults of one meaning stand in one place."""

import math
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe.bounds import bounds
from semmoe.core import Fingerprint, Plan, Topology
from semmoe.demo import MODEL
from semmoe.settings import CoclusterSettings, MoETunerSettings, ProfileSettings, ReplaySettings, SolveSettings


class Attention(str, Enum):
    tp = "tp"
    dp = "dp"
    hybrid = "hybrid"


class Batches(str, Enum):
    mixed = "mixed"
    prefill = "prefill"


class Exchange(str, Enum):
    all_to_all = "all-to-all"
    two_level = "two-level"
    all_reduce = "all-reduce"


class Engine(str, Enum):
    transformers = "transformers"
    sglang = "sglang"
    vllm = "vllm"


class Server(str, Enum):
    sglang = "sglang"
    vllm = "vllm"


class Schedule(str, Enum):
    plan = "plan"
    engine = "engine"


class Shuffle(str, Enum):
    layer = "layer"
    batch = "batch"
    off = "off"


TOPOLOGY, METHOD, LINKS, INPUT, OUTPUT = "Topology", "Method", "Links", "Input", "Output"
TraceArgument = Annotated[Path, typer.Argument(help="A trace directory, or an .npz file.", show_default=False)]


def check_installed(engine: str) -> None:
    """Raise ValueError unless this environment has the engine."""
    try:
        version(engine)
    except PackageNotFoundError:
        raise ValueError(
            f"{engine} is not installed in this environment: install semmoe into {engine}'s and run it there"
        ) from None


@dataclass(frozen=True)
class GivenTopology:
    """What the user said of a topology; None: nothing."""

    attention: str | None
    ep_size: int | None
    dp_size: int | None
    num_nodes: int | None


def chosen_topology(plan: Plan | None, given: GivenTopology, ep_size: int) -> Topology:
    """The plan's topology, which must be what was given; without a plan what was given, by default `ep_size` ranks."""
    if plan is None:
        return Topology.for_attention(given.attention or "tp", given.ep_size or ep_size, given.dp_size, given.num_nodes)
    for name in ("attention", "ep_size", "dp_size", "num_nodes"):
        planned, wanted = getattr(plan.topology, name), getattr(given, name)
        if wanted not in (None, planned):
            raise ValueError(f"the plan is for {name} {planned}, not {wanted}")
    return plan.topology


def numeric(kind: Any, name: str, text: str, panel: str, unit: int = 1, **more: Any) -> Any:
    """An option for the field `name` of a settings dataclass, with the field's bounds; `text` is its help.

    unit: what one of the option is of the field.
    """
    low, high = bounds(kind, name)
    low, high = (low, high) if unit == 1 else (-(-low // unit), high // unit)
    return typer.Option(help=text, rich_help_panel=panel, min=low, max=high, callback=_finite, **more)


def _finite(value: float | None) -> float | None:
    """NaN passes every comparison of bounds."""
    if isinstance(value, float) and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is not a finite number")
    return value


def model_path(name: str | None) -> str | None:
    """`tiny` is the embedded model, unless a directory has that name. Raises BadParameter for what is no directory."""
    if name is None or Path(name).is_dir():
        return name
    if name == "tiny":
        return str(MODEL)
    if Path(name).exists():
        raise typer.BadParameter(f"{name} is a file: give the model's directory")
    if name.count("/") == 1 and not name.startswith((".", "/", "~")) and not name.endswith("/"):
        raise typer.BadParameter(f"there is no directory {name}; nothing is downloaded: give a directory")
    raise typer.BadParameter(f"there is no directory {name}")


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A model directory (Hugging Face format), or `tiny`, the embedded one.",
        show_default=False,
        callback=model_path,
    ),
]
EpSize = Annotated[int, numeric(Topology, "ep_size", "Expert-parallel ranks.", TOPOLOGY)]
PlannedEpSize = Annotated[
    int | None, numeric(Topology, "ep_size", "Expert-parallel ranks; by default the plan's.", TOPOLOGY)
]
AttentionOption = Annotated[
    Attention, typer.Option(help="How attention is split over ranks.", rich_help_panel=TOPOLOGY)
]
DpSize = Annotated[
    int | None, numeric(Topology, "dp_size", "Attention groups, for hybrid.", TOPOLOGY, show_default=False)
]
NumNodes = Annotated[int, numeric(Topology, "num_nodes", "Nodes that the ranks are spread over.", TOPOLOGY)]
PlannedNumNodes = Annotated[
    int | None, numeric(Topology, "num_nodes", "Nodes that the ranks are spread over; by default the plan's.", TOPOLOGY)
]
Redundant = Annotated[
    int, numeric(SolveSettings, "redundant_experts", "Redundant experts in all (linear, eplb, grace, semmoe).", METHOD)
]
LoadLimit = Annotated[
    float,
    typer.Option(
        help="semmoe: most expert load, max/mean in a batch, from 1; 0: no limit.",
        rich_help_panel=METHOD,
        min=0,
        max=4096,
        callback=_finite,
    ),
]
TimeLimit = Annotated[
    float, numeric(MoETunerSettings, "time_limit", "moetuner: seconds for its integer programs.", METHOD)
]
RankCost = Annotated[
    float,
    numeric(
        CoclusterSettings,
        "remote_rank",
        "semmoe: cost of a row to another rank, in experts that a token finds at home.",
        METHOD,
    ),
]
NodeCost = Annotated[
    float, numeric(CoclusterSettings, "remote_node", "semmoe: what a row to another node costs beyond that.", METHOD)
]
LinksOption = Annotated[
    str,
    typer.Option(
        help="What links and experts cost: a file of `semmoe calibrate`, or h200-nvlink, h200-400g, h200-100g, pcie5; "
        "by default one of the first two.",
        rich_help_panel=LINKS,
        show_default=False,
    ),
]
HiddenSize = Annotated[
    int | None,
    numeric(Fingerprint, "hidden_size", "Width of the model, if the trace does not say.", LINKS, show_default=False),
]
ExpertSize = Annotated[
    int | None,
    numeric(Fingerprint, "expert_size", "Width of one expert, if the trace does not say.", LINKS, show_default=False),
]
Seed = Annotated[int, numeric(SolveSettings, "seed", "Seed of every random choice.", METHOD)]
BatchTokens = Annotated[int, numeric(ReplaySettings, "batch_tokens", "Tokens of a batch, all ranks together.", METHOD)]
BatchKind = Annotated[Batches, typer.Option(help="mixed: decode-like; prefill: consecutive.", rich_help_panel=METHOD)]
Window = Annotated[
    int, numeric(ReplaySettings, "window", "semmoe, attention-DP: requests that wait to be assigned together.", METHOD)
]
Force = Annotated[bool, typer.Option("--force", help="Replace what --out names.", rich_help_panel=OUTPUT)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT)]
Dataset = Annotated[
    Path | None,
    typer.Option(
        help="jsonl (ShareGPT, OpenAI chat or batch, prompt); else running text, cut about every 2,000 characters; "
        "gzip too.",
        rich_help_panel=INPUT,
    ),
]
Limit = Annotated[int, numeric(ProfileSettings, "limit", "Use the first N prompts; 0: all.", INPUT)]
MaxPrompt = Annotated[
    int, numeric(ProfileSettings, "max_prompt_tokens", "Cut longer prompts to this many tokens.", INPUT)
]
