"""Options that several commands share; defaults of one meaning stand in one place."""

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from semmoe.demo import MODEL


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


def model_path(name: str) -> str:
    """`tiny` is the embedded model, unless a directory has that name."""
    return str(MODEL) if name == "tiny" and not Path(name).exists() else name


ModelArgument = Annotated[
    str,
    typer.Argument(
        help="A model directory (Hugging Face format), or `tiny`, the embedded one.",
        show_default=False,
        callback=model_path,
    ),
]
EpSize = Annotated[int, typer.Option(help="Expert-parallel ranks.", rich_help_panel=TOPOLOGY)]
AttentionOption = Annotated[
    Attention, typer.Option(help="How attention is split over ranks.", rich_help_panel=TOPOLOGY)
]
DpSize = Annotated[int, typer.Option(help="Attention groups, for hybrid.", rich_help_panel=TOPOLOGY)]
NumNodes = Annotated[int, typer.Option(help="Nodes that the ranks are spread over.", rich_help_panel=TOPOLOGY)]
Redundant = Annotated[
    int, typer.Option(help="Redundant experts in all (linear, eplb, grace, semmoe).", rich_help_panel=METHOD)
]
LoadLimit = Annotated[
    float, typer.Option(help="semmoe: most expert load, max/mean in a batch; 0: no limit.", rich_help_panel=METHOD)
]
TimeLimit = Annotated[float, typer.Option(help="moetuner: seconds for its integer programs.", rich_help_panel=METHOD)]
RankCost = Annotated[
    float,
    typer.Option(
        help="semmoe: cost of a row to another rank, in experts that a token finds at home.", rich_help_panel=METHOD
    ),
]
NodeCost = Annotated[
    float, typer.Option(help="semmoe: what a row to another node costs beyond that.", rich_help_panel=METHOD)
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
    int, typer.Option(help="Width of the model, if the trace does not say.", rich_help_panel=LINKS, show_default=False)
]
ExpertSize = Annotated[
    int, typer.Option(help="Width of one expert, if the trace does not say.", rich_help_panel=LINKS, show_default=False)
]
Seed = Annotated[int, typer.Option(help="Seed of every random choice.", rich_help_panel=METHOD)]
BatchTokens = Annotated[int, typer.Option(help="Tokens of a batch, all ranks together.", rich_help_panel=METHOD)]
BatchKind = Annotated[Batches, typer.Option(help="mixed: decode-like; prefill: consecutive.", rich_help_panel=METHOD)]
Window = Annotated[
    int, typer.Option(help="semmoe, attention-DP: requests that wait to be assigned together.", rich_help_panel=METHOD)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.", rich_help_panel=OUTPUT)]
Dataset = Annotated[
    Path | None,
    typer.Option(help="jsonl (ShareGPT, OpenAI chat, prompt) or text, gzip too.", rich_help_panel=INPUT),
]
Limit = Annotated[int, typer.Option(help="Use the first N prompts; 0: all.", rich_help_panel=INPUT)]
MaxPrompt = Annotated[int, typer.Option(help="Cut longer prompts to this many tokens.", rich_help_panel=INPUT)]
