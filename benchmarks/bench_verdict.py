"""Predicted against measured: MoE layers of the embedded model over loopback, after a calibration of this machine.

    PYTHONPATH=. python benchmarks/bench_verdict.py [--ep-size 4] [--batch-tokens 1024] [--batches 4] [--work FOLDER]

Calibrates by `lab.calibration`, profiles the embedded model, solves a plan, and predicts the mean layer of held-out
requests as `semmoe solve` does, for the vanilla and the planned placement in attention-DP and attention-TP. Then runs
dispatch, experts and combine of every layer on these batches' routing with real processes, and the all-reduce that
takes their place without all-to-all. Run it on an idle machine.
Prints configuration, the calibration, a table and one JSON line.
"""

import argparse
import copy
import json
import platform
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from lab.calibration import PARTS, MeasuredLayer, Sample, calibrate
from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import Plan, RoutingTrace
from semmoe.costs import timing
from semmoe.engines.transformers.model import load_model, moe_layers
from semmoe.engines.transformers.parallel import LocalExperts
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.evaluation.replay import cut_batches, replay, token_groups, token_homes
from semmoe.placement.linear import vanilla_plan
from semmoe.runtime.collectives import world
from semmoe.runtime.copies import rank_copies
from semmoe.runtime.launch import run_ranks
from semmoe.settings import DemoSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

SETTINGS = DemoSettings()
ROUNDS = 15


@dataclass(frozen=True)
class Job:
    plans: dict[str, Plan]
    trace: RoutingTrace
    measure: ReplaySettings
    batches: int
    scratch: str


def measured_layers(rank: int, size: int, job: Job, report) -> dict[str, list[Sample]]:
    """Every layer of every plan on the first batches: samples by plan, the same on each rank."""
    with world(rank, size, Path(job.scratch)) as (comm, device):
        model, found = load_model(str(MODEL)).to(device), {}
        for name, plan in job.plans.items():
            samples = []
            copies = rank_copies(plan, rank)
            held = plan.placement.physical_to_logical_map.reshape(len(copies), size, -1)[:, rank]
            for l, chosen in own_choices(rank, plan, job):
                experts = LocalExperts(copy.deepcopy(moe_layers(model)[l].experts), held[l])
                layer = MeasuredLayer(comm, experts, model.config.hidden_size, model.dtype, device)
                placed = [copies[l].to_physical(torch.from_numpy(ids.astype(np.int64))).numpy() for ids in chosen]
                samples += [layer.measure(ids, ROUNDS) for ids in placed]
                if rank == 0:
                    report(name, 1)
            found[name] = samples
    return found


def own_choices(rank: int, plan: Plan, job: Job) -> Iterator[tuple[int, list[np.ndarray]]]:
    """Per layer the (n, K) choices of the tokens that this rank has in each of the first batches."""
    group = token_groups(job.trace, plan, job.measure)
    batches = cut_batches(job.trace.num_tokens, job.measure)[: job.batches]
    for l, (_, homes) in enumerate(token_homes(job.trace, plan, job.measure, group)):
        yield l, [job.trace.expert_ids[rows[home == rank], l] for rows, home in zip(batches, homes, strict=False)]


def measure(job: Job, ep_size: int) -> dict[str, list[Sample]]:
    return run_ranks(ep_size, measured_layers, job, lambda name, done: None, preload=["lab.calibration"])[0]


def compare(name: str, predicted: timing.LayerTime, all_reduce: float, samples: list[Sample]) -> dict:
    """Microseconds of the mean layer; `all_reduce`: predicted seconds, in place of dispatch and combine."""
    measured = {part: 1e6 * float(np.mean([sample.seconds[part] for sample in samples])) for part in PARTS}
    measured["layer"] = 1e6 * float(np.mean([sample.layer_seconds for sample in samples]))
    expected = {part: 1e6 * getattr(predicted, part) for part in PARTS}
    expected |= {"layer": 1e6 * predicted.total, "all_reduce": 1e6 * all_reduce}
    cells = "".join(f"{expected[part]:8,.0f} /{measured[part]:7,.0f}" for part in measured)
    ratio = expected["layer"] / measured["layer"]
    print(f"  {name:12}{cells}   {ratio:.2f}", flush=True)
    return {"name": name, "predicted_us": expected, "measured_us": measured, "ratio": ratio}


def gain(rows: list[dict], attention: str, which: str) -> float:
    vanilla, planned = [next(r[which]["layer"] for r in rows if r["name"] == f"{attention} {kind}")
                        for kind in ("vanilla", "planned")]  # fmt: skip
    return 1 - planned / vanilla


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep-size", type=int, default=SETTINGS.ep_size)
    parser.add_argument("--batch-tokens", type=int, default=1024)
    parser.add_argument("--batches", type=int, default=4)
    parser.add_argument("--work", type=Path, help="keeps the traces from run to run")
    arguments = parser.parse_args()
    G, measuring = arguments.ep_size, ReplaySettings(batch_tokens=arguments.batch_tokens)
    print(f"embedded model, {G} processes, torch {torch.__version__}, {platform.machine()}, {torch.get_num_threads()} "
          f"threads; batches of {arguments.batch_tokens} tokens, {arguments.batches} of them measured")  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        found = calibrate(str(MODEL), G)
        links, shape = found.links, found.shape
        print(f"calibration: {links.inside_node.model_dump()}, {links.experts.model_dump()}; unseen layer predicted "
              f"{1e6 * found.predicted:,.0f} us, measured {1e6 * found.measured:,.0f} us")  # fmt: skip
        seen, unseen = demo_prompts(SETTINGS, load_tokenizer(str(MODEL)))
        work = arguments.work or Path(scratch)
        model = load_model(str(MODEL))
        trace = record(model, str(MODEL), seen, work / "seen")
        held_out = record(model, str(MODEL), unseen, work / "unseen")
        plans = {}
        for attention in ("dp", "tp"):
            topology = Topology.for_attention(attention, G)
            plans[f"{attention} vanilla"] = vanilla_plan(trace.fingerprint, topology)
            plans[f"{attention} planned"] = solve(trace, topology, SolveSettings())
        samples = measure(Job(plans, held_out, measuring, arguments.batches, scratch), G)
    print("microseconds of the mean layer, predicted / measured")
    print(f"  {'':12}" + "".join(f"{part:>17}" for part in (*PARTS, "layer")) + "   ratio")
    rows = []
    for name, plan in plans.items():
        result = replay(held_out, plan, measuring)
        predicted = timing.predict(name, result.rows_per_batch(), result.busiest_pairs, shape, plan.topology, links)
        reduced = timing.all_reduce_time(result.tokens_per_batch, 0, shape, plan.topology, links).all_reduce
        rows.append(compare(name, predicted.time, reduced, samples[name]))
    gains = {a: {k: gain(rows, a, f"{k}_us") for k in ("predicted", "measured")} for a in ("dp", "tp")}
    for attention, both in gains.items():
        print(f"attention-{attention.upper()}, planned over vanilla: predicted {both['predicted']:+.1%} time saved, "
              f"measured {both['measured']:+.1%}")  # fmt: skip
    unseen_layer = {"predicted_us": 1e6 * found.predicted, "measured_us": 1e6 * found.measured}
    print("\n" + json.dumps({"ep_size": G, "batch_tokens": arguments.batch_tokens, "links": links.model_dump(),
                             "unseen_layer": unseen_layer, "rows": rows, "gains": gains}))  # fmt: skip


if __name__ == "__main__":
    main()
