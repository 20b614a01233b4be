"""Items that hold plans against routing they were not made from."""

from typing import Any

import numpy as np

from lab.inputs import Inputs, Source
from lab.item import MODEL_DIFFERS, VANILLA, Cell, Comparison, Item, LackingError, Result, colour, panel
from lab.methods import ALL, short
from semmoe.costs.metrics import layer_traffic
from semmoe.evaluation.replay import ReplayResult, replay
from semmoe.placement.linear import vanilla_plan
from semmoe.placement.methods import obstacle
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.split import split

RANKS = 8
NAMES = {"linear": "vanilla"}
SHARE = 0.5  # of the requests, profiled
NOTHING = "nothing (vanilla)"
LEAST = 8  # requests of a kind of text, for it to be looked at
KINDS = 4  # of text, at most


def figure5b(inputs: Inputs) -> Result:
    """Local activation rate and load of every method on requests that it did not see."""
    rows: list[list[Cell]] = []
    for source in inputs.sources:
        profile, rest = split(source.trace, SHARE, inputs.seed)
        for attention in ("tp", "dp"):
            topology = Topology.for_attention(attention, RANKS)
            for method in [m for m in ALL if obstacle(m, topology, 0) is None]:
                found = replay(rest, inputs.solved(profile, topology, method), ReplaySettings(seed=inputs.seed))
                rows.append([source.name, attention.upper(), NAMES.get(method, short(method)), *_scores(found)])
    stated = {
        "topology": f"EP{RANKS}, no redundant experts",
        "batches": "1,024 tokens of all ranks, mixed",
        "split": f"{SHARE:.0%} of the requests profile, the rest are scored, near-duplicates on one side",
    }
    columns = ["source", "attention", "method", "LAR", "remote ranks", "load max/median", "load max/mean"]
    return Result(
        columns=columns,
        rows=rows,
        picture=_methods_picture(rows, inputs.sources),
        stated=stated,
        comparisons=_methods_beside(rows),
    )


def _scores(found: ReplayResult) -> list[float]:
    total = found.total
    load = [float(l.mean()) for l in (found.load_max_over_median, found.load_max_over_mean)]
    return [total.lar, total.remote_ranks_per_token, *load]


def _methods_picture(rows: list[list[Cell]], sources: list[Source]) -> Any:
    figure, axes = panel(columns=2, rows=2 * len(sources), height=2.6)
    blocks = [(source.name, attention) for source in sources for attention in ("TP", "DP")]
    for (name, attention), pair in zip(blocks, axes, strict=True):
        own = [row for row in rows if row[:2] == [name, attention]]
        for axis, column, label in ((pair[0], 3, "local activation rate"), (pair[1], 5, "load, max/median")):
            axis.bar([row[2] for row in own], [row[column] for row in own], color=[colour(str(row[2])) for row in own])
            axis.set_title(f"{name}, attention-{attention}", fontsize=9)
            axis.set_ylabel(label, fontsize=8)
            axis.tick_params(axis="x", labelrotation=30, labelsize=7)
        pair[1].set_ylim(bottom=1.0)  # where load is even
    return figure


def _methods_beside(rows: list[list[Cell]]) -> list[Comparison]:
    out = []
    for source in dict.fromkeys(str(row[0]) for row in rows):
        own: dict[str, Any] = {str(row[2]): row for row in rows if row[:2] == [source, "TP"]}
        vanilla, best = own["vanilla"][3], max(row[3] for name, row in own.items() if name not in ("paper", "semmoe"))
        gains = [f"{own[m][3]:.3f} ({100 * (own[m][3] - vanilla):+.1f} points)" for m in ("paper", "semmoe")]
        out.append(
            Comparison(
                what=f"{source}: local activation rate, attention-TP, EP{RANKS} (vanilla {vanilla:.3f})",
                published="37 % and 43 % more than vanilla's, DeepSeek-V2-Lite and Qwen3-30B (figure 5a)",
                measured=f"paper's method {gains[0]}, semmoe {gains[1]}",
                why=f"{MODEL_DIFFERS}; it is not said whether points or per cent are meant, nor whether the requests "
                "that are scored were profiled too",
            )
        )
        out.append(
            Comparison(
                what=f"{source}: over the best baseline's ({best:.3f}); load max/median",
                published="15.4 % (EP8, DeepSeek-V2-Lite), balanced",
                measured=f"{100 * (own['semmoe'][3] - best):+.1f} points; {own['semmoe'][5]:.3f} "
                f"(vanilla {own['vanilla'][5]:.3f}, paper's method {own['paper'][5]:.3f})",
                why=f"{MODEL_DIFFERS}; placements alone leave attention-TP's rate at 1/G, as tokens stay by position",
            )
        )
    return out


def table3(inputs: Inputs) -> Result:
    """Transfer: the shipped model, profiled on one kind of text, run on each."""
    published = "46.5 and 47.2 % where profiled, 40.7 to 41.6 % elsewhere"
    return _transfers([inputs.kinds], inputs.seed, published)


def table4(inputs: Inputs) -> Result:
    """The same of other models, across fields of their subjects."""
    sources = [source for source in inputs.others if source.domains]
    if not sources:
        raise LackingError(
            "a trace whose requests have subjects: --trace NAME.npz beside NAME.meta.json.gz, as "
            "examples/convert_fingerprinting.py writes them"
        )
    return _transfers(sources, inputs.seed, "46.9 and 43.6 % where profiled, 33.4 to 39.3 % elsewhere")


def _transfers(sources: list[Source], seed: int, published: str) -> Result:
    rows = [row for source in sources for row in _transfer(source, seed)]
    figure, axes = panel(columns=len(sources), height=3.8)
    for source, axis in zip(sources, axes[0], strict=True):
        own = [row for row in rows if row[0] == source.name]
        _transfer_picture(figure, axis, own, source.name)
    stated = {
        "topology": "attention-TP, EP4, no redundant experts",
        "median": "over layers, as `p50`",
        "split": f"{SHARE:.0%} of a kind's requests profile, the others of each kind are scored",
    }
    columns = ["source", "profiled on", "run on", "LAR p50 of layers", "LAR"]
    comparisons = [c for source in sources for c in _transfer_beside(rows, source.name, published)]
    return Result(columns=columns, rows=rows, picture=figure, stated=stated, comparisons=comparisons)


def _transfer_picture(figure: Any, axis: Any, rows: list[list[Any]], name: str) -> None:
    profiled, kinds = (list(dict.fromkeys(row[i] for row in rows)) for i in (1, 2))
    grid = np.array([[next(r[4] for r in rows if r[1:3] == [p, k]) for k in kinds] for p in profiled])
    shown = axis.imshow(grid, cmap="viridis", vmin=0, vmax=max(0.6, grid.max()))
    axis.set(
        title=name,
        xticks=range(len(kinds)),
        xticklabels=kinds,
        yticks=range(len(profiled)),
        yticklabels=profiled,
        xlabel="run on",
        ylabel="profiled on",
    )
    axis.tick_params(axis="x", labelrotation=30)
    for (i, j), value in np.ndenumerate(grid):
        ink = "black" if value > 0.3 else "white"
        axis.text(j, i, f"{value:.3f}", ha="center", va="center", color=ink, fontsize=8)
    figure.colorbar(shown, ax=axis, label="LAR")


def _transfer(source: Source, seed: int) -> list[list[Cell]]:
    domains = np.array(source.domains or ["all"] * source.trace.num_requests)
    sizes = {kind: int((domains == kind).sum()) for kind in dict.fromkeys(source.domains or ["all"])}
    kinds = sorted((k for k in sizes if sizes[k] >= LEAST), key=lambda k: -sizes[k])[:KINDS]
    halves = {k: split(source.trace.select(np.flatnonzero(domains == k)), SHARE, seed) for k in kinds}
    topology, quick = Topology(ep_size=4), CoclusterSettings(starts=2, steps=20)
    plans = {kind: solve(halves[kind][0], topology, SolveSettings(seed=seed, cocluster=quick)) for kind in kinds}
    plans[NOTHING] = vanilla_plan(source.trace.fingerprint, topology)
    out: list[list[Cell]] = []
    for name, plan in plans.items():
        for kind in kinds:
            found = replay(halves[kind][1], plan, ReplaySettings(seed=seed))
            layers = float(np.median([traffic.lar for traffic in found.layers]))
            out.append([source.name, name, kind, layers, found.total.lar])
    return out


def _transfer_beside(rows: list[list[Any]], name: str, published: str) -> list[Comparison]:
    own = [row for row in rows if row[0] == name and row[1] != NOTHING]
    vanilla = np.mean([row[3] for row in rows if row[0] == name and row[1] == NOTHING])
    home, away = ([row[3] for row in own if (row[1] == row[2]) is same] for same in (True, False))
    if not away:
        return []
    return [
        Comparison(
            what=f"{name}: LAR (p50 of layers) where profiled, and on other text, means (vanilla {vanilla:.3f})",
            published=published,
            measured=f"{np.mean(home):.3f} and {np.mean(away):.3f}",
            why=f"{MODEL_DIFFERS}; kinds of text that differ more or less; half of a kind's few requests profile",
        )
    ]


# The worked example: 8 tokens of two kinds on two ranks, 4 experts, 2 chosen by each. Tokens of kind 0 choose experts
# 0 and 2, those of kind 1 choose 1 and 3.
KIND_OF_TOKEN = np.array([0, 1, 0, 1, 0, 1, 0, 1])
CHOICES = np.array([[0, 2], [1, 3]])


def figure3(inputs: Inputs) -> Result:
    """Our own small case: what moving tokens, experts, and both does to the tokens that cross a link."""
    in_turn, by_kind = np.arange(8) // 4, KIND_OF_TOKEN
    ways = [
        ("as they come", in_turn, [0, 1, 2, 3]),
        ("tokens moved", by_kind, [0, 1, 2, 3]),
        ("experts moved", in_turn, [0, 2, 1, 3]),
        ("both moved", by_kind, [0, 2, 1, 3]),
    ]
    rows: list[list[Any]] = []
    for name, home, held in ways:
        rank_of = np.argsort(held) // 2
        traffic = layer_traffic(rank_of[CHOICES[KIND_OF_TOKEN]], home, 2)
        rows.append([name, 2 * int(traffic.rows.sum()), traffic.lar])
    figure, axes = panel()
    axes[0, 0].bar([row[0] for row in rows], [row[1] for row in rows], color=VANILLA)
    axes[0, 0].set(ylabel="remote activated tokens", title="8 tokens of two kinds, 4 experts, two ranks")
    compared = Comparison(
        what="remote activated tokens (dispatched and combined), as they come and with both moved",
        published="16 and 4 (attention-DP), 12 and 2 (attention-TP)",
        measured=f"{rows[0][1]} and {rows[3][1]}",
        why="a case of our own, in which the two kinds separate wholly",
    )
    stated = {"workload": "eight tokens, written down in lab/plans.py"}
    return Result(
        columns=["way", "remote activated tokens", "LAR"],
        rows=rows,
        picture=figure,
        stated=stated,
        comparisons=[compared],
    )


BY_METHOD, TRANSFER = "Local activation rate and load by method", "Profiled on one kind of text, run on another"
SUBJECTS = "a trace with subjects"
ITEMS = [
    Item(name="figure3", title="A worked example", needs="nothing", seconds=1, make=figure3),
    Item(name="figure5b", title=BY_METHOD, needs="routing", seconds=120, make=figure5b),
    Item(name="table3", title=TRANSFER, needs="routing", seconds=30, make=table3),
    Item(name="table4", title=f"{TRANSFER}, by subject", needs=SUBJECTS, seconds=60, make=table4),
]
