"""`semmoe estimate` beside aiconfigurator's figures, and beside what was measured: DeepSeek-V3 on H200 and H800.

    python benchmarks/bench_estimate.py [--ask]

The figures are those of tests/estimate.json, with their sources; `--ask` runs aiconfigurator 0.12, if it is installed,
in place of the stored ones. What was fitted are shares of the data sheet for single operations (`estimate/hardware.py`)
and links of one and two nodes; whole passes, lengths, batches, 32 and 64 ranks and the real points were held out.

aiconfigurator's routed experts are measured with experts whose loads follow a power law with exponent 1.01, on the rank
that has most: `power_law_load` says what that is over the mean. The real points have balanced routing.
Prints configuration, tables and one JSON line.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from semmoe import cost
from semmoe.calibration import load_links
from semmoe.estimate.forecast import Case, Pass, run
from semmoe.estimate.hardware import GPUS
from semmoe.estimate.model import ModelSizes, read_model
from semmoe.estimate.roofline import ROUTED
from semmoe.estimate.routing import VANILLA, Routing, assumed, uniform_tiers
from semmoe.estimate.settings import EstimateSettings
from semmoe.topology import Topology

KNOWN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "tests" / "estimate.json").read_text(encoding="utf-8"))
DRAWS = 200


def model(name: str = "DeepSeek-V3") -> ModelSizes:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(KNOWN["configs"][name]))
        return read_model(folder)


def power_law_load(tokens: int, experts: int, ranks: int, seed: int = 0) -> float:
    """Load of the busiest rank over the mean, mean of draws: an expert has from 1 to .8 of the `tokens` of all ranks.

    With an exponent near 1 the logarithm of an expert's load is uniform; ranks hold contiguous experts.
    """
    drawn = np.exp(np.random.default_rng(seed).random((DRAWS, experts)) * np.log(0.8 * tokens))
    by_rank = drawn.reshape(DRAWS, ranks, -1).sum(axis=2)
    return float((by_rank.max(axis=1) / by_rank.mean(axis=1)).mean())


def passed(point: dict[str, Any], gpu: str, links: str, load: float, **settings: Any) -> Pass:
    """Our estimate of a point: vanilla, attention-DP, 8 GPUs a node."""
    ranks, decode, sizes = point["ep_size"], point["decode"], model()
    topology = Topology.for_attention("dp", ranks, num_nodes=ranks // 8)
    asked = EstimateSettings(
        **{"batch" if decode else "prompts": point["requests"]},
        input_length=point["input_length"],
        output_length=point["output_length"],
        load=load,
        **settings,
    )
    case = Case(
        model=sizes,
        gpu=GPUS[gpu],
        topology=topology,
        links=load_links(links, topology),
        decode_links=load_links(f"{links}-ll", topology),
        settings=asked,
    )
    return run(case, assumed(sizes, topology, {"per-node", "per-pair"}, asked)[VANILLA], decode)


def beside_aiconfigurator(point: dict[str, Any]) -> dict[str, Any]:
    """Milliseconds of the pass, of links and of routed experts, ours beside the point's."""
    tokens = point["requests"] * point["ep_size"] * (1 if point["decode"] else point["input_length"])
    load = power_law_load(tokens, 256, point["ep_size"])
    ours = passed(point, "h200", "h200-400g", load, kv_cache="fp8")
    found = {"ms": ours.total, "links_ms": ours.communication, "experts_ms": ours.parts[ROUTED]}
    found = {name: seconds * 1e3 for name, seconds in found.items()}
    return {"point": point, "load": load, "ours": found, "ratio": found["ms"] / point["ms"]}


def beside_grouped(point: dict[str, Any]) -> float:
    """Ours over aiconfigurator's decoding step of a model with grouped-query attention, without experts and links."""
    sizes, links = model(point["model"]), f"{point['gpu']}-nvlink"
    topology, asked = Topology.for_attention("dp", 8), EstimateSettings(batch=64)
    both = load_links(links), load_links(f"{links}-ll")
    case = Case(
        model=sizes, gpu=GPUS[point["gpu"]], topology=topology, links=both[0], decode_links=both[1], settings=asked
    )
    ours = run(case, assumed(sizes, topology, {"per-node", "per-pair"}, asked)[VANILLA], decode=True)
    return (ours.total - ours.communication - ours.parts[ROUTED]) * 1e3 / point["ms"]


def beside_real(point: dict[str, Any]) -> dict[str, Any]:
    """Tokens per second and GPU, ours beside what was measured."""
    ours = passed(point, "h800", "h800-400g", 1.0, overlap=True)
    tokens = point["requests"] * (1 if point["decode"] else point["input_length"])
    speed = tokens / ours.total
    return {"point": point, "ms": ours.total * 1e3, "ours": speed, "ratio": speed / point["tokens_per_second_per_gpu"]}


def beside_deepep(ranks: int, tokens: int, dispatch_us: float, combine_us: float) -> tuple[float, float]:
    """Predicted over measured times of DeepEP's low-latency mode on H800, which we have no other figures of."""
    topology, sizes = Topology(ep_size=ranks, num_nodes=ranks // 8), model()
    links = load_links("h800-400g-ll", topology)
    kind = links.all_to_all
    drawn = Routing(rows={kind: uniform_tiers(kind, sizes, topology)}, load=1.0, redundant_experts=0, label="assumed")
    rows = drawn.matrix(kind, topology) * tokens
    time = cost.layer_time(rows, 0.0, sizes.layer_shape, topology, links)
    return time.dispatch * 1e6 / dispatch_us, time.combine * 1e6 / combine_us


def ask(point: dict[str, Any]) -> dict[str, Any]:
    """The point as the installed aiconfigurator says it."""
    mode, ranks = "static_gen" if point["decode"] else "static_ctx", str(point["ep_size"])
    words = ["aiconfigurator", "cli", "estimate", "--model-path", "deepseek-ai/DeepSeek-V3", "--system", "h200_sxm"]
    words += ["--backend", "sglang", "--estimate-mode", mode, "--tp", "1", "--dp", ranks, "--ep", ranks, "--etp", "1"]
    words += ["--batch-size", str(point["requests"]), "--isl", str(point["input_length"])]
    words += ["--osl", str(point["output_length"]), "--detail", "all", "--no-color"]
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    steps = point["output_length"] - 1 if point["decode"] else 1
    parts = {
        n: float(ms) / steps for n, ms in re.findall(r"^\s+(?:generation|context)_(\w+)\s+([\d.]+) ms", said, re.M)
    }
    whole = re.search(r"(?:TPOT|TTFT):\s+([\d.]+) ms", said)
    assert whole is not None
    sent = parts["moe_dispatch"] + parts["moe_combine"]
    return point | {"ms": float(whole[1]), "links_ms": round(sent, 2), "experts_ms": round(parts["moe"], 2)}


def print_points(rows: list[dict[str, Any]]) -> None:
    print(f"  {'pass':8}{'EP':>4}{'per GPU':>9}{'input':>7}{'load':>6}"
          f"{'links':>17}{'routed experts':>17}{'all, ms':>17}{'ratio':>7}")  # fmt: skip
    for row in rows:
        point, ours = row["point"], row["ours"]
        cells = "".join(f"{ours[name]:8,.1f} /{point[name]:7,.1f}" for name in ("links_ms", "experts_ms", "ms"))
        name = "decode" if point["decode"] else "prefill"
        print(f"  {name:8}{point['ep_size']:>4}{point['requests']:>9}{point['input_length']:>7}{row['load']:>6.2f}"
              f"{cells}{row['ratio']:>7.2f}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ask", action="store_true", help="run aiconfigurator in place of the stored figures")
    asked = parser.parse_args().ask
    points = [ask(point) if asked else point for point in KNOWN["aiconfigurator"]["points"]]
    rows = [beside_aiconfigurator(point) for point in points]
    print(f"ours / theirs: {KNOWN['aiconfigurator']['source']}")
    print_points(rows)
    print(f"ours / theirs: {KNOWN['grouped']['source']}")
    for point in KNOWN["grouped"]["points"]:
        print(f"  {point['model']} on {point['gpu']}: {beside_grouped(point):.2f} of {point['ms']} ms")
    real = [beside_real(point) for point in KNOWN["real"]["points"]]
    print(f"ours / measured: {KNOWN['real']['source']}")
    for row in real:
        point = row["point"]
        name, speed = "decode" if point["decode"] else "prefill", point["tokens_per_second_per_gpu"]
        print(f"  {name:8}{point['ep_size']:>4}{row['ours']:8,.0f} /{speed:7,} tokens/s per GPU{row['ratio']:>7.2f}")
    print(f"links, ours / measured: {KNOWN['deepep_h800']['source']}")
    for point in KNOWN["deepep_h800"]["points"]:
        dispatch, combine = beside_deepep(*point)
        print(f"  EP{point[0]:<4} dispatch {dispatch:.2f}, combine {combine:.2f}")
    print("\n" + json.dumps({"aiconfigurator": rows, "real": real}))


if __name__ == "__main__":
    main()
