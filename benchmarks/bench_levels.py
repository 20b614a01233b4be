"""What the slowest rank computes where every rank has all rows and no all-to-all runs, by tokens of a pass.

    python benchmarks/bench_levels.py [--ranks 2] [--passes 100]

The shipped model in attention-TP; passes of tokens drawn from held-out text. For vanilla's placement and plans, copies
by each rank's preference, rows in turn (what semmoe did until 2026-11-25), and levelled (what it does). Prints rows of
the fullest rank over the mean, and the most distinct experts on a rank, whose weights it reads; means over layers and
passes.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from serving.configurations import COPIES, MORE_COPIES, PLAN, Planner
from serving.server import prompts

from semmoe.core import Plan
from semmoe.demo import MODEL
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import load_plan
from semmoe.runtime.copies import alike, preferred_of_each, rank_copies
from semmoe.topology import Topology

TOKENS = (1, 2, 4, 8, 32, 256)


def preferred_tables(plan: Plan) -> list[torch.Tensor]:
    """(G, E) of every layer."""
    sources = [rank_copies(plan, rank) for rank in range(plan.topology.ep_size)]
    return [preferred_of_each(own) for own in zip(*sources, strict=True)]


def fullest(physical: np.ndarray, per_rank: int, ranks: int) -> tuple[float, int]:
    """(rows of the fullest rank over the mean, most distinct experts on a rank) of a pass (N, K)."""
    rows = np.bincount(physical.ravel() // per_rank, minlength=ranks)
    distinct = np.bincount(np.unique(physical) // per_rank, minlength=ranks)
    return rows.max() / rows.mean(), distinct.max()


def measure(plan: Plan, passes: list[np.ndarray], levelled: bool) -> np.ndarray:
    """Means of `fullest` over layers and passes of (N, L, K)."""
    per_rank, found = plan.placement.experts_per_rank, []
    for layer, table in enumerate(preferred_tables(plan)):
        for ids in passes:
            turn = np.arange(len(ids))[:, None] % len(table)
            mine = torch.from_numpy(ids[:, layer].astype(np.int64))
            physical = alike(table, mine, per_rank) if levelled else table[turn, mine]
            found.append(fullest(physical.numpy(), per_rank, plan.topology.ep_size))
    return np.mean(found, axis=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--passes", type=int, default=100)
    a = parser.parse_args()
    (seen, held_out), rng = prompts(), np.random.default_rng(0)
    with tempfile.TemporaryDirectory(prefix="semmoe-") as folder:
        planner = Planner(seen, Path(folder))
        trace = record(load_model(str(MODEL)), str(MODEL), held_out, Path(folder) / "held-out")
        plans = {"vanilla": vanilla_plan(trace.fingerprint, Topology.for_attention("tp", a.ranks))}
        plans |= {name: load_plan(planner.set_up(name, "tp", a.ranks).plan) for name in (PLAN, COPIES, MORE_COPIES)}
    ids = np.asarray(trace.expert_ids)
    print(f"{'tokens of a pass':24}" + "".join(f"{n:>14}" for n in TOKENS) + "   rows max/mean, most experts on a rank")
    for name, plan in plans.items():
        for levelled in (False, True) if plan.placement.redundant_experts else (False,):
            line = f"{name + (', levelled' if levelled else ''):30}"
            for n in TOKENS:
                passes = [ids[rng.integers(0, len(ids), n)] for _ in range(a.passes)]
                line += "{:>7.2f}{:>7.2f}".format(*measure(plan, passes, levelled))
            print(line)


if __name__ == "__main__":
    main()
