"""One slow node: the plan that knows it, from measured links, against the plan that does not. Needs root.

    PYTHONPATH=. OMP_NUM_THREADS=1 python benchmarks/bench_slow_node.py [--rate 100mbit] [--slow 25mbit]
        [--redundant 0] [--rounds 7] [--out FILE]

Four processes of the embedded engine, each in a network namespace of its own; the link of the last carries a quarter of
the others' rate (network.py). `lab.calibration` measures them; one plan is solved with these costs, the other
without. Each round runs vanilla, vanilla again (the placebo) and both plans, the first in turn. Prints bytes over the
slow link, and medians of the rounds' ratios of seconds, to vanilla's and of the plan that knows to the one that does
not, with 90 % bootstrap intervals; one JSON line.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import torch
from network import NetworkError, enter, slow_network

from lab.calibration import calibrate
from semmoe.calibration import Links, row_costs
from semmoe.core import RoutingTrace
from semmoe.demo import MODEL, demo_prompts
from semmoe.engines.transformers.generate import Configuration, GenerateResult, generate
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.engines.transformers.verify import plain_generate
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

RANKS, SLOW = 4, 3  # the slow one is the last
VANILLA, PLACEBO, UNAWARE, AWARE = "vanilla", "vanilla again", "plan", "plan that knows the links"


def plans(trace: RoutingTrace, links: Links, redundant: int) -> list[Configuration]:
    topology, settings = Topology.for_attention("dp", RANKS), SolveSettings(redundant_experts=redundant)
    vanilla, costs = vanilla_plan(trace.fingerprint, topology), row_costs(links, topology)
    return [
        Configuration(name=VANILLA, plan=vanilla),
        Configuration(name=PLACEBO, plan=vanilla),
        Configuration(name=UNAWARE, plan=solve(trace, topology, settings)),
        Configuration(name=AWARE, plan=solve(trace, topology, settings, costs=(costs, costs))),
    ]


def over_slow_link(result: GenerateResult) -> float:
    """All-to-all bytes that the slow rank sends and receives."""
    sent = np.array(result.all_to_all_bytes_per_rank_pair, float)
    np.fill_diagonal(sent, 0)
    return float(sent[SLOW].sum() + sent[:, SLOW].sum())


def ratio_interval(ratios: list[float]) -> tuple[float, float, float]:
    """(median, 5 %, 95 %) of the median of resampled rounds."""
    rng = np.random.default_rng(0)
    drawn = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return float(np.median(ratios)), *map(float, np.quantile(drawn, [0.05, 0.95]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", default="100mbit")
    parser.add_argument("--slow", default="25mbit")
    parser.add_argument("--redundant", type=int, default=0, help="redundant experts of both plans")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    a = parser.parse_args()
    demo = DemoSettings()
    settings = GenerateSettings(max_new_tokens=demo.max_new_tokens, batch_size=demo.batch_size)
    print(f"embedded model, {RANKS} processes on {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{platform.machine()}; links {a.rate}, that of rank {SLOW} {a.slow}; "
          f"{a.redundant} redundant experts; {a.rounds} rounds")  # fmt: skip
    model = load_model(str(MODEL))
    seen, prompts = demo_prompts(demo, load_tokenizer(str(MODEL)))
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        trace = record(model, str(MODEL), seen, Path(scratch))
    reference, rounds = plain_generate(model, prompts, settings), []
    try:
        with slow_network(RANKS, a.rate, slow=((SLOW, a.slow),)) as network:
            prepare = partial(enter, network)
            links = calibrate(str(MODEL), RANKS, pairs=True, prepare=prepare).links
            ups = plans(trace, links, a.redundant)
            for i in range(a.rounds):
                turned = [*ups[i % len(ups) :], *ups[: i % len(ups)]]
                rounds.append({r.name: r for r in generate(str(MODEL), prompts, turned, settings, prepare=prepare)})
                print(f"  round {i + 1} of {a.rounds}", file=sys.stderr)
    except NetworkError as error:
        sys.exit(f"bench_slow_node.py: {error}")
    report(a, links, rounds, reference)


def report(a: argparse.Namespace, links: Links, rounds: list[dict[str, GenerateResult]], reference: list) -> None:
    assert links.pairs is not None
    speeds, rows = np.array(links.pairs.gigabytes_per_second), []
    print("measured Mbit/s, from row to column\n", np.round(speeds * 8000 * (1 - np.eye(RANKS))))
    print(f"{'':28}{'slow link MB':>14}{'all MB':>9}{'LAR':>7}   seconds / vanilla's   outputs")
    for name, first in sorted(rounds[0].items(), key=lambda one: [VANILLA, PLACEBO, UNAWARE, AWARE].index(one[0])):
        ratios = [found[name].seconds / found[VANILLA].seconds for found in rounds]
        middle, low, high = ratio_interval(ratios)
        identical = first.outputs == reference
        rows.append({"name": name, "slow_link_bytes": over_slow_link(first), "all_to_all_bytes": first.all_to_all_bytes,
                     "lar": first.lar, "seconds_over_vanilla": [middle, low, high], "rounds": ratios,
                     "identical": identical})  # fmt: skip
        print(f"{name:28}{over_slow_link(first) / 1e6:14.1f}{first.all_to_all_bytes / 1e6:9.1f}{first.lar:7.3f}   "
              f"{middle:.3f} [{low:.3f}, {high:.3f}]   {'identical' if identical else 'DIFFER'}")  # fmt: skip
    aware = [found[AWARE].seconds / found[UNAWARE].seconds for found in rounds]
    middle, low, high = ratio_interval(aware)
    print(f"seconds of the plan that knows over those of the plan that does not: {middle:.3f} [{low:.3f}, {high:.3f}]")
    line = json.dumps({"settings": {k: str(v) for k, v in vars(a).items()}, "links": links.model_dump(), "rows": rows,
                       "aware_over_unaware": aware})  # fmt: skip
    print(line)
    if a.out:
        a.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
