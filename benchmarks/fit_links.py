"""Fit the links that are shipped with semmoe to DeepEP's measured tables, and hold them against what was not fitted.

    python benchmarks/fit_links.py TABLES            # a table of predicted over measured
    python benchmarks/fit_links.py TABLES --write    # also writes src/semmoe/links/ and tests/deepep.json

TABLES: the folder of aiconfigurator's `wideep_deepep_{normal,ll}_perf.csv` files (Apache-2.0, commit 095f58a), each
named SYSTEM_sglang_VERSION_... Read are hidden size 7168 and 8 of 256 experts, normal mode with 20 SMs, as FP8
dispatch and BF16 combine; dispatch and combine are the sums of what is transmitted and notified.

One set of parameters for each hardware and kind: latencies of dispatch and combine and one bandwidth, for the inside of
a node and, where two nodes were measured, for the network between them. Fitted are one and two nodes, by least squares
of the logarithms; four and eight nodes are only compared. With fewer tokens a rank than TOKENS, where latency counts
alone, combine on four nodes is predicted to take up to half as long again as was measured.
"""

import csv
import json
import math
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy.optimize import least_squares

from semmoe.costs import timing
from semmoe.costs.links import Experts, Links, Tier
from semmoe.costs.payoff import MODELS, uniform_rows
from semmoe.topology import Topology

MODEL = next(model for model in MODELS if model.name == "DeepSeek-V3")
TOKENS = {"normal": [2**i for i in range(5, 15)], "ll": [2**i for i in range(4, 9)]}  # of a rank
KIND = {"normal": "per-node", "ll": "per-pair"}
FITTED = (1, 2)
ROOT = Path(__file__).parents[1]
SOURCE = (
    "DeepEP in {mode} mode, hidden 7168, 8 of 256 experts, from aiconfigurator's tables (Apache-2.0, commit 095f58a)"
)


class Hardware(NamedTuple):
    """name: of the links; table: of the rows inside a node; between: of those between nodes."""

    name: str
    title: str
    table: str
    between: str | None
    teraflops: float  # of experts; scaled from the H200's measured 1085 by the peak rates of dense FP8
    all_reduce: tuple[float, float]  # GB/s inside a node and between nodes, nominal


HOPPER, BLACKWELL, GRACE = 1085.0, 1085.0 * 4500 / 1979, 1085.0 * 5000 / 1979
HARDWARE = (
    Hardware("h100-nvlink", "H100 NVLink, one node", "h100_sxm_sglang_0.5.12", None, HOPPER, (450, 50)),
    Hardware("h200-nvlink", "H200 NVLink, one node", "h200_sxm_sglang_0.5.12", None, HOPPER, (450, 50)),
    Hardware("b200-nvlink", "B200 NVLink, one node", "b200_sxm_sglang_0.5.12", None, BLACKWELL, (900, 50)),
    Hardware("b300-nvlink", "B300 NVLink, one node", "b300_sxm_sglang_0.5.12", None, BLACKWELL, (900, 50)),
    Hardware("gb200-nvlink", "GB200 NVLink, one node", "gb200_sglang_0.5.12", None, GRACE, (900, 50)),
    Hardware("gb300-nvlink", "GB300 NVLink, one node", "gb300_sglang_0.5.12", None, GRACE, (900, 50)),
    Hardware("h100-400g", "H100 NVLink inside nodes, 400 Gbit/s a GPU between them", "h100_sxm_sglang_0.5.6.post2",
             "whose rows of several nodes are its own", HOPPER, (450, 50)),
    Hardware("h200-400g", "H200 NVLink inside nodes, 400 Gbit/s a GPU between them", "h200_sxm_sglang_0.5.6.post2",
             "whose rows of several nodes are the H100's", HOPPER,
             (450, 50)),
)  # fmt: skip


def points(tables: Path, hardware: Hardware, mode: str) -> dict[int, list[tuple[int, float, float]]]:
    """(tokens a rank, microseconds of dispatch, of combine) by number of nodes."""
    found: dict[int, list[tuple[int, float, float]]] = {}
    path = tables / f"{hardware.table}_wideep_deepep_{mode}_perf.csv"
    for row in csv.DictReader(path.read_text().splitlines()):
        asked = {"hidden_size": "7168", "num_experts": "256", "num_topk": "8"} | (
            {"dispatch_sms": "20", "combine_sms": "20"} if mode == "normal" else {}
        )
        if any(row[name] != value for name, value in asked.items()) or int(row["num_token"]) not in TOKENS[mode]:
            continue
        parts = ("transmit_us", "notify_us") if mode == "normal" else ("avg_t_us",)
        times = [sum(float(row[f"{op}_{part}"]) for part in parts) for op in ("dispatch", "combine")]
        found.setdefault(int(row["node_num"]), []).append(
            (int(row["num_token"]), round(times[0], 1), round(times[1], 1))
        )
    return {nodes: sorted(set(rows)) for nodes, rows in sorted(found.items())}


def predicted(links: Links, nodes: int, tokens: int) -> tuple[float, float]:
    """Microseconds of dispatch and combine, 8 ranks a node, if experts are drawn uniformly.

    The generator of the tables draws from the 4 best nodes of a token, which is no limit up to 4 nodes.
    """
    topology = Topology(ep_size=8 * nodes, num_nodes=nodes)
    time = timing.layer_time(uniform_rows(links.all_to_all, MODEL, topology) * tokens, 0, MODEL.shape, topology, links)
    return time.dispatch * 1e6, time.combine * 1e6


def make_links(hardware: Hardware, mode: str, found: np.ndarray) -> Links:
    """found: latencies of dispatch and combine and bandwidth of the inside, then the same between nodes."""
    tiers = []
    for i, (latency, speed) in enumerate(zip((20.0, 50.0), hardware.all_reduce, strict=True)):
        dispatch, combine, bandwidth = (float(f"{x:.3g}") for x in found[3 * i : 3 * i + 3])
        tiers.append(Tier(
            dispatch_latency_us=dispatch, combine_latency_us=combine, gigabytes_per_second=bandwidth,
            all_reduce_latency_us=latency, all_reduce_gigabytes_per_second=float(speed),
        ))  # fmt: skip
    several = hardware.between is not None
    words = "one and two nodes" if several else "one node"
    source = (
        SOURCE.format(mode="low-latency" if mode == "ll" else "normal") + f": fitted on {words}, read as 8 GPUs each"
    )
    if several:
        source += f", {hardware.between}; four nodes were held out. Eight nodes in normal mode are measured slower"
    source += ". All-reduces (line rates) and, but for Hopper's, experts (scaled by peak rates) are nominal"
    return Links(
        name=hardware.title + (", low latency" if mode == "ll" else ""),
        kind="measured", source=source, inside_node=tiers[0], between_nodes=tiers[1] if several else None,
        all_to_all=KIND[mode], dispatch_bytes_per_value=1, combine_bytes_per_value=2, routing_bytes=8,
        experts=Experts(fixed_us=0.0, teraflops=round(hardware.teraflops)),
    )  # fmt: skip


def fit(hardware: Hardware, mode: str, measured: dict[int, list[tuple[int, float, float]]]) -> Links:
    def errors(logarithms: np.ndarray) -> list[float]:
        links = make_links(hardware, mode, np.exp(logarithms))
        return [
            math.log(guess / time)
            for nodes in FITTED
            for tokens, *times in measured.get(nodes, [])
            for guess, time in zip(predicted(links, nodes, tokens), times, strict=True)
        ]

    start = np.log([30, 40, 300, 20, 30, 45] if hardware.between else [30, 40, 300])

    def padded(few: np.ndarray) -> np.ndarray:
        return np.concatenate([few, np.zeros(6 - len(few))])

    # Parameters are rounded to three digits in what is written: a step must be larger than that.
    best = least_squares(lambda x: errors(padded(x)), start, diff_step=0.01)
    return make_links(hardware, mode, np.exp(padded(best.x)))


def as_h800(links: Links) -> Links:
    """An H100's links with the NVLink of an H800, which has 400 GB/s in place of 900; nothing was measured."""
    nvlink, tier = 400 / 900, links.inside_node
    slower = {
        "gigabytes_per_second": float(f"{tier.gigabytes_per_second * nvlink:.3g}"),
        "all_reduce_gigabytes_per_second": tier.all_reduce_gigabytes_per_second * nvlink,
    }
    return links.model_copy(
        update={
            "name": links.name.replace("H100", "H800"),
            "kind": "nominal",
            "source": f"As an H100's with 4/9 of NVLink's speed, nominal. Those: {links.source}",
            "inside_node": tier.model_copy(update=slower),
        }
    )


def compare(links: Links, measured: dict[int, list[tuple[int, float, float]]]) -> None:
    print(links.name, links.all_to_all, links.inside_node, links.between_nodes or "", sep="\n  ")
    for nodes, rows in measured.items():
        ratios = np.array([np.divide(predicted(links, nodes, tokens), times) for tokens, *times in rows])
        for name, column in zip(("dispatch", "combine"), ratios.T, strict=True):
            said = " ".join(f"{ratio:.2f}" for ratio in column)
            print(f"  {nodes} nodes {name:8} predicted/measured {said}  mean error {abs(column - 1).mean():.3f}")


def save(links: Links, name: str) -> None:
    path = ROOT / "src" / "semmoe" / "links" / f"{name}.json"
    path.write_text(json.dumps(links.model_dump(exclude_none=False), indent=1) + "\n")


def main() -> None:
    tables, write = Path(sys.argv[1]), "--write" in sys.argv
    kept: dict[str, dict[int, list[tuple[int, float, float]]]] = {}
    for hardware in HARDWARE:
        for mode, suffix in (("normal", ""), ("ll", "-ll")):
            measured = points(tables, hardware, mode)
            links = fit(hardware, mode, measured)
            compare(links, measured)
            kept[hardware.name + suffix] = {nodes: rows for nodes, rows in measured.items() if nodes <= 4}
            if write:
                save(links, hardware.name + suffix)
            if write and hardware.name == "h100-400g":
                save(as_h800(links), "h800-400g" + suffix)
    if write:
        about = {"source": SOURCE.format(mode="normal or low-latency (-ll)"), "unit": "tokens a rank, microseconds"}
        (ROOT / "tests" / "deepep.json").write_text(json.dumps(about | {"points": kept}) + "\n")


if __name__ == "__main__":
    main()
