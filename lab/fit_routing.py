"""Fit the synthetic routing of `lab.synthetic_routing` to real traces, and compare drawn traces with them.

    python -m lab.fit_routing TRACE [TRACE ...] [--out benchmarks/results] [--rounds 12]
                              [--ep-size 8] [--splits 3] [--no-plans]

For each trace: its statistics (`lab.routing_statistics`), the strengths that give them (`lab.calibrate_routing`), both
written to OUT/routing_MODEL.json, and a table of the real trace beside a drawn one of the same shape. Plans have no
part in that. Then, as a check of what the statistics leave out, linear, eplb and semmoe are solved on 20 % of the
requests of either trace and replayed on the rest. Gains that are higher on the drawn trace than on the real one
flatter.
"""

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from lab.calibrate_routing import calibrate, shape_of
from lab.routing_statistics import CLUSTERS, Statistics, fit
from lab.synthetic_routing import Strengths, draw
from semmoe.core import RoutingTrace
from semmoe.evaluation.replay import replay
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.split import split
from semmoe.traces.trace import open_trace

DIGITS = 4  # of what is written
METHODS = ("linear", "eplb", "semmoe")
FIGURES = ("lar", "remote_ranks_per_token", "load_max_over_mean")


def as_json(figures: Statistics | Strengths) -> dict[str, Any]:
    """Figures by name, as lists of rounded numbers."""
    return {name: np.round(value, DIGITS).tolist() if isinstance(value, (float, tuple, np.ndarray)) else value
            for name, value in asdict(figures).items()}  # fmt: skip


def load_strengths(path: Path) -> Strengths:
    """The strengths that this module wrote."""
    given: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))["strengths"]
    values: dict[str, Any] = {n: np.array(v) if isinstance(v, list) else v for n, v in given.items()}
    return Strengths(**values)


def table(real: Statistics, drawn: Statistics) -> list[tuple[str, float, float]]:
    """(name, real, drawn) of the figures of both, means of layers."""
    rows = [(name, getattr(real, name).mean(), getattr(drawn, name).mean())
            for name in ("token", "request", "path", "together")]  # fmt: skip
    for name, at in (("hottest", 0), ("median", real.num_experts // 2), ("coldest", -1)):
        shares = [s.shares[:, at].mean() for s in (real, drawn)]
        rows.append((f"share of the {name} expert, times E", *shares))
    for i, lag in enumerate((2, 4)):
        rows.append((f"path over {lag} layers / over 1", real.path_decay[i], drawn.path_decay[i]))
    for i, k in enumerate(CLUSTERS):
        rows.append((f"explained by {k} clusters", real.clusters[i], drawn.clusters[i]))
    names = ("token_directions", "request_directions", "from_prompt", "recurrence", "distinct", "vocabulary")
    rows += [(name, getattr(real, name), getattr(drawn, name)) for name in names]
    return [(name, float(a), float(b)) for name, a, b in rows]


def plans(trace: RoutingTrace, topology: Topology, splits: int, redundant: int) -> dict[str, list[list[float]]]:
    """FIGURES of each method and split."""
    out: dict[str, list[list[float]]] = {}
    for seed in range(splits):
        profile, evaluation = split(trace, 0.2, seed)
        for method in METHODS:
            copies = 0 if method == "linear" else redundant
            plan = solve(profile, topology, SolveSettings(method=method, seed=seed, redundant_experts=copies))
            seen = replay(evaluation, plan, ReplaySettings(seed=seed)).as_dict()
            out.setdefault(method, []).append([seen[name] for name in FIGURES])
    return out


def compare(real: RoutingTrace, drawn: RoutingTrace, ep_size: int, splits: int) -> list[dict[str, Any]]:
    """Print and return the figures of methods on both traces, attention-TP and attention-DP."""
    out = []
    for attention, size, redundant in (("tp", ep_size, 0), ("tp", ep_size, ep_size), ("dp", ep_size // 2, 0)):
        topology = Topology.for_attention(attention, size)
        found = [plans(trace, topology, splits, redundant) for trace in (real, drawn)]
        for method in METHODS:
            means = [np.mean(one[method], axis=0) for one in found]
            print(f"  {attention} EP{size} R={redundant} {method:8}" + "   ".join(
                f"{name} {a:.3f} {b:.3f}" for name, a, b in zip(FIGURES, *means, strict=True)), flush=True)  # fmt: skip
            out.append({"attention": attention, "ep_size": size, "redundant": redundant, "method": method,
                        "real": found[0][method], "drawn": found[1][method]})  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ep-size", type=int, default=8)
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--reuse", action="store_true", help="take the strengths that are written already")
    parser.add_argument("--no-plans", action="store_true", help="statistics alone")
    given = parser.parse_args()
    for path in given.traces:
        trace = open_trace(path)
        real = fit(trace)
        file = given.out / f"routing_{real.model.split('_')[0]}.json"
        if given.reuse:
            drawn = fit(draw(load_strengths(file), shape_of(real), given.rounds))
        else:
            strengths, drawn = calibrate(real, given.rounds)
            held = {"statistics": as_json(real), "drawn": as_json(drawn), "strengths": as_json(strengths)}
            file.write_text(json.dumps(held) + "\n", encoding="utf-8")
        print(f"{real.model}: real, drawn")
        for name, *pair in table(real, drawn):
            print(f"  {name:40} {pair[0]:10.3f} {pair[1]:10.3f}", flush=True)
        if not given.no_plans:
            synthetic = draw(load_strengths(file), shape_of(real), seed=1000)
            print(json.dumps({"trace": real.model, "plans": compare(trace, synthetic, given.ep_size, given.splits)}))


if __name__ == "__main__":
    main()
