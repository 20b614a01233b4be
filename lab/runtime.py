"""Items from runs of the runtime itself: measured here over loopback, and over slow networks as benchmarks wrote."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import cycle
from typing import Any

import numpy as np

from lab import timing
from lab.inputs import Inputs
from lab.item import PLAN, VANILLA, Cell, Comparison, Item, Result, colour, legend, panel
from lab.layer import layer_parts
from lab.methods import short
from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import Placement, Plan
from semmoe.io.bounds import array_names
from semmoe.settings import DemoSettings, GenerateSettings
from semmoe.topology import Topology

RANKS = 4
ROUNDS = 2  # of the set-ups of a model, taking turns
PAIR_ROUNDS = 30
PROMPTS = 32
HERE = "loopback"
EVERYWHERE = "TP, every expert everywhere"
PROCESSES = f"{RANKS} processes on one machine, gloo over loopback"
NO_GPU = "a CPU and loopback, whose latency and copies are not those of eight GPUs on a 400 GB/s network"
SHOWN = ("attention", "reduce-scatter", "all-gather", "dispatch", "experts", "combine", "rest")


def _set_ups(inputs: Inputs) -> list[Any]:
    """Attention-DP and -TP, vanilla and planned; in TP each method, and ever more copies up to all experts on every
    rank, which leaves nothing remote: that is what the paper fabricates by skipping communication."""
    from semmoe.engines.transformers.generate import Configuration
    from semmoe.placement.linear import vanilla_plan

    trace = inputs.demo_profile
    L, E = trace.fingerprint.num_layers, trace.fingerprint.num_experts
    out = []
    for attention in ("dp", "tp"):
        name = attention.upper()
        topology = Topology.for_attention(attention, RANKS)
        vanilla = vanilla_plan(trace.fingerprint, topology)
        out += [
            Configuration(name=f"{name}, vanilla", plan=vanilla),
            Configuration(name=f"{name}, semmoe", plan=inputs.solved(trace, topology)),
        ]
    for method in ("lab.methods.moetuner", "paper"):
        out.append(Configuration(name=f"TP, {short(method)}", plan=inputs.solved(trace, topology, method)))
    for copies in (E // 4, E):
        plan = inputs.solved(trace, topology, copies=copies)
        out.append(Configuration(name=f"TP, semmoe, {copies} copies", plan=plan))
    everywhere = Placement(
        physical_to_logical_map=np.tile(np.arange(E, dtype=np.int32), (L, RANKS)), num_experts=E, ep_size=RANKS
    )
    return [*out, Configuration(name=EVERYWHERE, plan=replace(vanilla, placement=everywhere))]


def measured_layers(inputs: Inputs) -> list[dict[str, Any]]:
    """What a layer of each set-up costs, once for all items that ask. Every output is held against plain transformers.

    Raises RuntimeError where one differs.
    """
    return inputs.once("layers", partial(_measure_layers, inputs))


def _measure_layers(inputs: Inputs) -> list[dict[str, Any]]:
    from semmoe.engines.transformers import generate as gen
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.tokenizer import load_tokenizer
    from semmoe.engines.transformers.verify import compare_outputs, plain_generate

    demo = DemoSettings(generate_prompts=PROMPTS)
    settings = GenerateSettings(max_new_tokens=demo.max_new_tokens, batch_size=demo.batch_size)
    _, prompts = demo_prompts(demo, load_tokenizer(str(MODEL)))
    ups = _set_ups(inputs)
    advance = inputs.task(f"generating on {RANKS} processes, {len(ups)} set-ups", ROUNDS * len(ups) * len(prompts))
    rounds = []
    for i in range(ROUNDS):
        turned = [*ups[i:], *ups[:i]]
        found = gen.generate(str(MODEL), prompts, turned, settings, lambda name, done: advance(done))
        rounds.append({result.name: result for result in found})
    model = load_model(str(MODEL))
    reference, layers = plain_generate(model, prompts, settings), ups[0].plan.fingerprint.num_layers
    out = []
    for up in ups:
        of = [found[up.name] for found in rounds]
        agreement = compare_outputs(model, prompts, reference, of[0].outputs)
        if not agreement.holds:
            raise RuntimeError(f"{up.name}: outputs differ from plain transformers', {agreement}")
        out.append(
            {
                "network": HERE,
                "name": up.name,
                "lar": of[0].lar,
                "load": of[0].load_max_over_mean,
                "parts_ms": layer_parts(of, layers),
            }
        )
    return out


def _slow_layers(inputs: Inputs) -> Iterator[dict[str, Any]]:
    """Of benchmarks/bench_end_to_end.py, over networks whose links the kernel holds at a rate."""
    for part in inputs.parts:
        for row in part.data.get("results", []):
            if "parts_ms" in row and row["network"] != HERE:
                yield {**row, "load": row["load_max_over_mean"], "name": row["name"].replace("plan", "semmoe")}


def all_to_all_share(parts: dict[str, float]) -> float:
    """Of the MoE layer's time, attention and its collectives left out, what the two all-to-alls take."""
    exchange = parts["dispatch"] + parts["combine"]
    return exchange / (exchange + parts["experts"])


def figure1(inputs: Inputs) -> Result:
    """Where the time of a layer goes, and the share of the expert all-to-all."""
    wanted = [
        row
        for row in [*measured_layers(inputs), *_slow_layers(inputs)]
        if row["name"] in ("DP, vanilla", "DP, semmoe", "TP, vanilla", "TP, semmoe")
    ]
    rows: list[list[Cell]] = [
        [r["network"], r["name"], *(r["parts_ms"][p] for p in SHOWN), all_to_all_share(r["parts_ms"])] for r in wanted
    ]
    figure, axes = panel(width=9, height=4)
    left = np.zeros(len(rows))
    for i, part in enumerate(SHOWN):
        values = np.array([float(row[2 + i] or 0.0) for row in rows])
        axes[0, 0].barh([f"{row[1]}, {row[0]}" for row in rows], values, left=left, label=part)
        left += values
    axes[0, 0].invert_yaxis()
    axes[0, 0].set(xlabel="milliseconds per layer and 1,000 tokens", title="Time of a layer by its parts")
    axes[0, 0].tick_params(axis="y", labelsize=8)
    legend(figure)
    comparisons = [
        Comparison(
            what=f"share of a MoE layer that is all-to-all, {network}, vanilla and on the plan",
            published="up to 59.2 %, vanilla (DeepSeek-V2-Lite, 8 GPUs)",
            measured="; ".join(_shares(rows, network, mode) for mode in ("DP", "TP")),
            why=f"{NO_GPU}; waiting for slower ranks counts",
        )
        for network in dict.fromkeys(str(row[0]) for row in rows)
    ]
    stated = {
        "topology": PROCESSES,
        "other networks": "as `make bench-end-to-end` measured them, where its file is there",
        "outputs": "identical to plain transformers', checked",
    }
    return Result(
        columns=["network", "set-up", *(f"{p} ms" for p in SHOWN), "all-to-all of the MoE layer"],
        rows=rows,
        picture=figure,
        stated=stated,
        comparisons=comparisons,
    )


def _shares(rows: list[list[Cell]], network: str, mode: str) -> str:
    of = {str(row[1]): float(row[-1] or 0.0) for row in rows if row[0] == network}
    return f"{mode} {of[f'{mode}, vanilla']:.0%} and {of[f'{mode}, semmoe']:.0%}"


def figure5a(inputs: Inputs) -> Result:
    """Local activation rate against the time of the MoE layer, attention-TP."""
    found = [row for row in measured_layers(inputs) if row["name"].startswith("TP")]
    vanilla = _moe_ms(found[0])
    rows: list[list[Cell]] = [
        [r["name"].removeprefix("TP, "), r["lar"], r["load"], _moe_ms(r), _moe_ms(r) / vanilla] for r in found
    ]
    figure, axes = panel(width=6.4)
    for marker, (name, lar, _, milliseconds, _) in zip(cycle("osD^vPX*"), rows, strict=False):
        axes[0, 0].scatter(lar, milliseconds, s=60, marker=marker, color=colour(str(name)), label=str(name))
    legend(figure)
    axes[0, 0].set(
        xlabel="local activation rate",
        ylabel="ms per MoE layer and 1,000 tokens",
        xlim=(0, 1.05),
        ylim=(0, 1.15 * max(_moe_ms(r) for r in found)),
        title="attention-TP, EP4, loopback",
    )
    by_name = {row[0]: row for row in rows}
    slow = {(r["network"], r["name"]): r for r in _slow_layers(inputs)}
    links = [
        f"{1 - _moe_ms(row) / _moe_ms(slow[network, 'TP, vanilla']):.1%} over {network}"
        for (network, name), row in slow.items()
        if name == "TP, semmoe"
    ]
    compared = Comparison(
        what="MoE layer's time saved on the plan, attention-TP, EP4 (LAR "
        f"{rows[0][1]:.3f} to {by_name['semmoe'][1]:.3f})",
        published="41.8 % and 46.6 %, LAR 37 % and 43 % higher (DeepSeek-V2-Lite, Qwen3-30B)",
        measured="; ".join(
            [
                f"{_saved(by_name['semmoe'])} over loopback (paper's method {_saved(by_name['paper'])}, "
                f"every expert everywhere {_saved(rows[-1])})",
                *links,
            ]
        ),
        why=f"{NO_GPU}; higher rates come from real copies here, not from communication skipped",
    )
    stated = {
        "topology": PROCESSES,
        "time": f"dispatch, experts and combine of a mean rank, median of {ROUNDS} rounds",
        "prompts": PROMPTS,
        "outputs": "identical to plain transformers', checked",
    }
    columns = ["set-up", "LAR", "load max/mean", "ms per MoE layer", "of vanilla"]
    return Result(columns=columns, rows=rows, picture=figure, stated=stated, comparisons=[compared])


def _saved(row: list[Cell]) -> str:
    return f"{1 - float(row[4] or 0.0):.1%}"


def _moe_ms(row: dict[str, Any]) -> float:
    return sum(row["parts_ms"][part] for part in ("dispatch", "experts", "combine"))


def _timed(inputs: Inputs) -> dict[str, list[dict]]:
    """The shuffled pair and the all-to-all over loopback, measured now; and over slow networks, as written."""

    def measure() -> dict[str, list[dict]]:
        sizes, shares = (1 << 20, 4 << 20), (0.2, 0.4, 0.6, 0.8, 1.0)
        advance = inputs.task(f"timing collectives on {RANKS} processes", 1)
        found = timing.measure(RANKS, sizes, shares, 4 << 20, PAIR_ROUNDS)
        advance(1)
        for part in inputs.parts:
            if {"argsort", "pair", "share"} <= part.data.keys():
                for kind in ("pair", "share"):
                    found[kind] += [r for r in part.data[kind] if r["network"] != HERE and r["ranks"] == RANKS]
        return found

    return inputs.once("timed", measure)


def figure6d(inputs: Inputs) -> Result:
    """Time of the all-to-all and of an all-reduce by the share of tokens that stay."""
    found = _timed(inputs)["share"]
    rows: list[list[Cell]] = [[r["network"], r["share"], r["us"]["all-to-all"], r["us"]["all-reduce"]] for r in found]
    networks = list(dict.fromkeys(str(row[0]) for row in rows))
    figure, axes = panel(columns=len(networks), width=3.8)
    comparisons = []
    for network, axis in zip(networks, axes[0], strict=True):
        own = [row for row in rows if row[0] == network]
        axis.plot([row[1] for row in own], [row[2] / 1e3 for row in own], "o-", color=PLAN, label="all-to-all")  # type: ignore[operator]
        axis.plot([row[1] for row in own], [row[3] / 1e3 for row in own], "s--", color=VANILLA, label="all-reduce")  # type: ignore[operator]
        axis.set(title=network, xlabel="share of rows that stay", ylabel="milliseconds", ylim=(0, None))
        times = {row[1]: float(row[2] or 0.0) for row in own}
        comparisons.append(
            Comparison(
                what=f"{network}: all-to-all at a local share of .8 over that at .2",
                published="falls gradually from .2 to .9 (a picture without figures)",
                measured=f"{times[0.8] / times[0.2]:.2f} (all rows stay: {times[1.0] / times[0.2]:.2f})",
                why=f"gloo in place of NCCL; {NO_GPU}",
            )
        )
    legend(figure)
    stated = {"topology": PROCESSES, "payload": "4 MiB of rows of 8 KiB a rank", "median of rounds": PAIR_ROUNDS}
    return Result(
        columns=["network", "local share", "all-to-all us", "all-reduce us"],
        rows=rows,
        picture=figure,
        stated=stated,
        comparisons=comparisons,
    )


def argsort(inputs: Inputs) -> Result:
    """The argsort that finds where shuffled rows go, against torch's."""
    advance = inputs.task("timing argsort", 6)
    found = []
    for size in (8, 64):
        for rows in (1_000, 10_000, 100_000):
            found.append(timing.argsort_times(rows, size, min(3_000_000 // rows, 500)))
            advance(1)
    rows_out: list[list[Cell]] = [[r["rows"], r["ranks"], r["us"], r["torch_us"], r["ratio"]] for r in found]
    figure, axes = panel()
    for size in (8, 64):
        own = [r for r in found if r["ranks"] == size]
        axes[0, 0].loglog([r["rows"] for r in own], [r["torch_us"] for r in own], "s--", label=f"torch, {size} ranks")
        axes[0, 0].loglog([r["rows"] for r in own], [r["us"] for r in own], "o-", label=f"semmoe, {size} ranks")
    axes[0, 0].set(xlabel="rows", ylabel="us", title="stable argsort of rank ids")
    axes[0, 0].legend(fontsize=7)
    ratios = [r["ratio"] for r in found]
    compared = Comparison(
        what="argsort of rank ids, times as fast as torch.argsort(stable=True)",
        published="1.25",
        measured=f"{min(ratios):.1f} to {max(ratios):.1f}",
        why="one core of a CPU, and a counting sort over few values; the paper has a kernel on a GPU",
    )
    return Result(
        columns=["rows", "ranks", "us", "torch us", "torch over ours"],
        rows=rows_out,
        picture=figure,
        stated={"where": "one thread of this process, calls take turns"},
        comparisons=[compared],
    )


def srs(inputs: Inputs) -> Result:
    """Shuffled reduce-scatter and all-gather against the plain two, and against gloo's."""
    found = _timed(inputs)["pair"]
    rows: list[list[Cell]] = [
        [
            r["network"],
            r["bytes"] >> 10,
            r["us"]["shuffled"],
            r["us"]["plain"],
            r["us"]["gloo"],
            r["shuffled_over_plain"][0],
            *r["shuffled_over_plain"][1:],
        ]
        for r in found
    ]
    figure, axes = panel(width=6.4)
    names = [f"{row[0]}, {row[1]} KiB" for row in rows]
    ratio, low, high = (np.array([float(row[i] or 0.0) for row in rows]) for i in (5, 6, 7))
    axes[0, 0].errorbar(ratio, names, xerr=[ratio - low, high - ratio], fmt="o", color=PLAN)
    axes[0, 0].axvline(1.0, color=VANILLA)
    axes[0, 0].set(xlabel="shuffled over plain, time, 95 % interval")
    slow = [float(row[5] or 0.0) for row in rows if row[0] != HERE]
    fast = [float(row[5] or 0.0) for row in rows if row[0] == HERE]
    over_links = f"; over slow links {min(slow):.3f} to {max(slow):.3f}" if slow else ""
    compared = Comparison(
        what="shuffled reduce-scatter + all-gather over the plain two, time",
        published="about 1.01",
        measured=f"over loopback {min(fast):.3f} to {max(fast):.3f}{over_links}",
        why="loopback itself is memory copies, and the shuffle adds two passes over the rows on full cores; links that "
        "cost something hide it",
    )
    columns = ["network", "KiB a rank", "shuffled us", "plain us", "gloo us", "shuffled over plain", "low", "high"]
    return Result(columns=columns, rows=rows, picture=figure, stated={"topology": PROCESSES}, comparisons=[compared])


def tables_memory(inputs: Inputs) -> Result:
    """What the tables that the online side looks up take."""
    rows: list[list[Cell]] = [["DeepSeek-V2, 60 layers, 102,400 tokens", "paper, T alone", 102_400 * 60 * 2 / 2**20]]
    for source in inputs.sources:
        for method in ("paper", "semmoe"):
            plan = inputs.solved(source.trace, Topology(ep_size=8), method)
            rows.append([source.name, method, table_bytes(plan) / 2**20])
    figure, axes = panel(width=6.4)
    axes[0, 0].barh([f"{row[0]}: {row[1]}" for row in rows], [row[2] for row in rows], color=PLAN)
    axes[0, 0].set(xlabel="MiB, EP8")
    own = ", ".join(f"{row[0]} {row[1]} {row[2]:.2f} MiB" for row in rows[1:])
    compared = Comparison(
        what="memory of the tables, attention-TP, EP8",
        published="11.72 MB (DeepSeek-V2, T as int16)",
        measured=own,
        why="T alone is counted there; T, its confidences and the path tables here, and for semmoe a score of each "
        "rank for each token that was profiled",
    )
    return Result(
        columns=["model", "tables", "MiB"],
        rows=rows,
        picture=figure,
        stated={"topology": "attention-TP, EP8"},
        comparisons=[compared],
    )


def table_bytes(plan: Plan) -> int:
    """All arrays of the plan's schedule."""
    return sum(getattr(plan.tokens, name).nbytes for name in array_names(type(plan.tokens)))


LIVE = "4 processes"
ITEMS = [
    Item(name="figure1", title="Where a layer's time goes", needs=LIVE, seconds=180, make=figure1),
    Item(name="figure5a", title="Local rate and time of a MoE layer", needs=LIVE, seconds=180, make=figure5a),
    Item(name="figure6d", title="All-to-all by local share", needs=LIVE, seconds=30, make=figure6d),
    Item(name="argsort", title="Argsort of rank ids", needs="nothing", seconds=5, make=argsort),
    Item(name="srs", title="The shuffled pair against the plain one", needs=LIVE, seconds=30, make=srs),
    Item(name="tables-memory", title="Memory of the tables", needs="routing", seconds=30, make=tables_memory),
]
