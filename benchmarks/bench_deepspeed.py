"""Speculative MoE on DeepSpeed's AutoEP beside DeepSpeed as it is: rows, bytes of all collectives, time of a step.

    PYTHONPATH=. OMP_NUM_THREADS=1 DS_ACCELERATOR=cpu .venv-deepspeed/bin/python benchmarks/bench_deepspeed.py
        [--topologies TP4/EP4 TP2/EP4] [--networks loopback 200mbit] [--redundant 8] [--rounds 7]
        [--prompts 32] [--out FILE]

In DeepSpeed's own environment; 4 processes, attention sharded by AutoTP; slow networks as of serving/network.py (root).
Set-ups: DeepSpeed as it is (folded: the group's ranks take turns at a token's expert choices), and once more, a
placebo; a plan's tables over DeepSpeed's own placement, whose gain is that of our collectives, not of locality; experts
grouped and tokens left so; both schemes, the owner of a token predicted; both, the owner taken from true routing after
the all-reduce; in one attention group the quicker, in each pass, of both with a predicted owner and DeepSpeed's own
layer on the plan's places; both with redundant experts. Prompts that the plans did not see, all of one length, so that
none is padded, then greedy tokens; all held against plain transformers. Every round runs all set-ups, the first in
turn; ratios are medians over rounds of those within a round, with 90 % bootstrap intervals, claimed where they lie
outside of the placebo's.

rows/pair: per token and layer, one for each expert elsewhere, as DeepSpeed sends; rows/rank: one for each rank
elsewhere. Prints configuration, tables, one JSON line.
"""

import argparse
import json
import os
import platform
import tempfile
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from statistics import median

import numpy as np
from bench_end_to_end import joined, run_rounds
from serving.claims import ROUNDS, Estimate, claim, estimate, paired_ratios
from serving.configurations import UNPLANNED, unplanned
from serving.network import NetworkError

from lab.deepspeed import set_up
from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import RoutingTrace
from semmoe.engines.transformers.generate import Configuration, GenerateResult
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.engines.transformers.verify import compare_outputs, plain_generate
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

TOPOLOGIES = {"TP4/EP4": Topology(ep_size=4), "TP2/EP4": Topology(ep_size=4, dp_size=2)}
LENGTH = 96  # tokens of a prompt
PLACEBO = "DeepSpeed once more"


def set_ups(trace: RoutingTrace, topology: Topology, redundant: int) -> list[Configuration]:
    """The first is DeepSpeed as it is."""
    vanilla, plan = vanilla_plan(trace.fingerprint, topology), solve(trace, topology, SolveSettings())
    out = [
        set_up("DeepSpeed AutoEP + AutoTP", vanilla, "off"), set_up(PLACEBO, vanilla, "off"),
        set_up(UNPLANNED, unplanned(trace, topology), "predicted"), set_up("expert grouping", plan, "off"),
        set_up("both", plan, "predicted"),
    ]  # fmt: skip
    if redundant:
        copies = solve(trace, topology, SolveSettings(redundant_experts=redundant))
        out.append(set_up(f"both, predicted, {redundant} redundant", copies, "predicted"))
    return out


def figures(
    where: str, ups: list[Configuration], results: list[list[GenerateResult]], identical: list[str]
) -> list[dict]:
    first, rows = [found[0] for found in results], []
    names = [up.name for up in ups]
    placebo, untold = (
        estimate(over_first([found[names.index(PLACEBO)] for found in results], first)),
        (names[0], PLACEBO),
    )
    for i, up in enumerate(ups):
        of, k = [found[i] for found in results], up.plan.fingerprint.top_k
        time = estimate(over_first(of, first))
        rows.append({
            "where": where, "name": up.name, "lar": of[0].lar, "rows_per_pair": k * (1 - of[0].lar),
            "rows_per_rank": of[0].remote_ranks_per_token, "all_to_all_bytes": of[0].all_to_all_bytes,
            "total_bytes": of[0].total_bytes, "sent_bytes": of[0].sent_bytes, "load": of[0].load_max_over_mean,
            "seconds": median(r.seconds for r in of), "time": asdict(time),
            "passes": of[0].passes, "claim": "" if up.name in untold else claim(time, [placebo]),
            "identical": identical[i],
        })  # fmt: skip
    return rows


def over_first(of: list[GenerateResult], first: list[GenerateResult]) -> np.ndarray:
    seconds = ({i: result.seconds for i, result in enumerate(results)} for results in (of, first))
    return paired_ratios(*seconds)


def show(rows: list[dict]) -> None:
    base = rows[0]
    print(f"\n{base['where']}\n  {'':34}  LAR   rows/pair    rows/rank    all-to-all         all bytes         "
          " load   time                claim                outputs identical")  # fmt: skip
    for r in rows:
        cells = [f"{r[n]:.2f} ({r[n] / base[n]:.2f})" for n in ("rows_per_pair", "rows_per_rank")]
        cells += [f"{r[n] / 1e6:7.1f} MB ({r[n] / base[n]:.2f})" for n in ("all_to_all_bytes", "total_bytes")]
        print(f"  {r['name']:34} {r['lar']:.3f}  {'  '.join(cells)}  {r['load']:.2f}   {Estimate(**r['time'])}   "
              f"{r['claim']:20} {r['identical']}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topologies", nargs="+", choices=TOPOLOGIES, default=list(TOPOLOGIES))
    parser.add_argument("--networks", nargs="+", default=["loopback", "200mbit"])
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    a = parser.parse_args()
    settings = GenerateSettings(max_new_tokens=DemoSettings().max_new_tokens, batch_size=8)
    versions = ", ".join(f"{name} {version(name)}" for name in ("deepspeed", "transformers", "torch"))
    print(f"{versions}, embedded model, 4 processes on {os.cpu_count()} cores, {platform.machine()}; {a.prompts} "
          f"prompts of {LENGTH} tokens, {a.rounds} rounds, {settings}")  # fmt: skip
    model = load_model(str(MODEL))
    seen, held_out = demo_prompts(replace(DemoSettings(), generate_prompts=8 * a.prompts), load_tokenizer(str(MODEL)))
    prompts = [p[:LENGTH] for p in held_out if len(p) >= LENGTH][: a.prompts]
    assert len(prompts) == a.prompts, f"only {len(prompts)} of the held-out prompts have {LENGTH} tokens"
    reference, rows = plain_generate(model, prompts, settings), []
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        trace = record(model, str(MODEL), seen, Path(scratch))
        by_topology = {name: set_ups(trace, TOPOLOGIES[name], a.redundant) for name in a.topologies}
    for wanted in a.networks:
        for name, ups in by_topology.items():
            try:
                with joined(wanted) as network:
                    results = run_rounds(network, ups, prompts, settings, a.rounds)
            except NetworkError as error:
                print(f"\n{wanted}: skipped, {error}")
                break
            identical = [str(compare_outputs(model, prompts, reference, result.outputs)) for result in results[0]]
            found = figures(f"{name}, {wanted}", ups, results, identical)
            show(found)
            rows += found
    line = json.dumps({"prompts": len(prompts), "rounds": a.rounds, "results": rows})
    print("\n" + line)
    if a.out:
        a.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
