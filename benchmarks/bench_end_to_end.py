"""Generation over networks that cost something: vanilla, EPLB's placement, and plans, 4 processes, outputs checked.

    OMP_NUM_THREADS=1 python benchmarks/bench_end_to_end.py [--networks loopback 200mbit 200mbit/2 1gbit 1gbit/2]
        [--rounds 3] [--redundant 8 32] [--prompts 48] [--out FILE]

A network is `loopback`, or a rate at which each rank's link is held, or RATE/NODES: two tiers, where RATE is that of a
node's uplink (serving/network.py; needs root, else they are skipped). Set-ups: vanilla; plans without and with
redundant experts; EPLB's placement with as many copies as the last of these; in attention-TP expert parallelism without
all-to-all. Every round runs all set-ups, the first in turn; speed-ups are medians over rounds of ratios within a round,
beside the least and the greatest. Times of a layer's parts are of a mean rank, waiting for slower ranks included, per
layer and 1,000 tokens: Figure 1. Prints configuration, tables, one JSON line.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median

import torch
from serving.network import Network, NetworkError, enter, slow_network

from lab.layer import layer_parts
from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import RoutingTrace
from semmoe.engines.transformers.generate import Configuration, GenerateResult, generate
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.engines.transformers.verify import compare_outputs, plain_generate
from semmoe.io.console import figure
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

RANKS = 4


def set_ups(trace: RoutingTrace, nodes: int, redundant: list[int]) -> list[Configuration]:
    """Each attention's first is vanilla, to which its others are compared."""
    out = []
    for attention in ("dp", "tp"):
        topology, name = Topology.for_attention(attention, RANKS, num_nodes=nodes), attention.upper()
        out.append(Configuration(name=f"{name}, vanilla", plan=vanilla_plan(trace.fingerprint, topology)))
        for copies in (0, *redundant):
            suffix = f", {copies} redundant" if copies else ""
            plan = solve(trace, topology, SolveSettings(redundant_experts=copies))
            out.append(Configuration(name=f"{name}, plan{suffix}", plan=plan))
        if copies:
            eplb = solve(trace, topology, SolveSettings(method="eplb", redundant_experts=copies))
            out.append(Configuration(name=f"{name}, eplb{suffix}", plan=eplb))
    out.append(
        Configuration(name="TP, all-reduce", plan=vanilla_plan(trace.fingerprint, topology), exchange="all-reduce")
    )
    return out


@contextmanager
def joined(network: str) -> Iterator[Network | None]:
    if network == "loopback":
        yield None
        return
    rate, _, nodes = network.partition("/")
    with slow_network(RANKS, rate, int(nodes or 1)) as made:
        yield made


def run_rounds(
    network: Network | None, ups: list[Configuration], prompts, settings, rounds: int
) -> list[list[GenerateResult]]:
    """(rounds, set-ups) results."""
    prepare = None if network is None else partial(enter, network)
    out = []
    for i in range(rounds):
        turned = [*ups[i % len(ups) :], *ups[: i % len(ups)]]
        found = generate(str(MODEL), prompts, turned, settings, prepare=prepare)
        out.append(sorted(found, key=lambda result: [up.name for up in ups].index(result.name)))
        print(f"  round {i + 1} of {rounds}: {sum(result.seconds for result in found):.0f} s", file=sys.stderr)
    return out


def figures(
    network: str, ups: list[Configuration], results: list[list[GenerateResult]], identical: list[str]
) -> list[dict]:
    names, layers, rows = [up.name for up in ups], ups[0].plan.fingerprint.num_layers, []
    for i, name in enumerate(names):
        of = [found[i] for found in results]
        vanilla = [found[names.index(f"{name[:2]}, vanilla")] for found in results]
        speed_ups = [v.seconds / r.seconds for v, r in zip(vanilla, of, strict=True)]
        rows.append({
            "network": network, "name": name, "tokens_per_second": median(r.tokens_per_second for r in of),
            "over_vanilla": [median(speed_ups), min(speed_ups), max(speed_ups)],
            "time_to_first_token": median(r.time_to_first_token for r in of),
            "communication_share": median(r.communication_share for r in of),
            "all_to_all_bytes": of[0].all_to_all_bytes, "total_bytes": of[0].total_bytes, "lar": of[0].lar,
            "remote_ranks_per_token": of[0].remote_ranks_per_token,
            "load_max_over_mean": of[0].load_max_over_mean, "identical": identical[i],
            "parts_ms": layer_parts(of, layers),
        })  # fmt: skip
    return rows


def show(rows: list[dict]) -> None:
    print(f"\n{rows[0]['network']}\n  {'':36}tokens/s   over vanilla           first token   waiting   all-to-all"
          f"        all    LAR   remote ranks   load   outputs identical")  # fmt: skip
    for r in rows:
        (ratio, least, most), sent = r["over_vanilla"], [r[f"{kind}_bytes"] / 1e6 for kind in ("all_to_all", "total")]
        print(f"  {r['name']:36}{r['tokens_per_second']:8.0f}   {ratio:.2f} [{least:.2f}, {most:.2f}]  "
              f"{1e3 * r['time_to_first_token']:12.0f} ms {r['communication_share']:8.0%} {sent[0]:9.1f} MB "
              f"{sent[1]:7.1f} MB  {figure(r['lar'])}   {figure(r['remote_ranks_per_token']):>12}   "
              f"{r['load_max_over_mean']:.2f}   {r['identical']}")  # fmt: skip
    print("  ms per layer and 1,000 tokens\n  " + " " * 36 + "".join(f"{p:>15}" for p in rows[0]["parts_ms"]))
    for r in rows:
        print(f"  {r['name']:36}" + "".join(f"{ms:15.1f}" for ms in r["parts_ms"].values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="+", default=["loopback", "200mbit", "200mbit/2", "1gbit", "1gbit/2"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--redundant", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--prompts", type=int, default=DemoSettings().generate_prompts)
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    a = parser.parse_args()
    demo = DemoSettings(generate_prompts=a.prompts)
    settings = GenerateSettings(max_new_tokens=demo.max_new_tokens, batch_size=demo.batch_size)
    print(f"embedded model, {RANKS} processes on {os.cpu_count()} cores, torch {torch.__version__}, "
          f"{platform.machine()}; {a.rounds} rounds, {settings}")  # fmt: skip
    model = load_model(str(MODEL))
    seen, prompts = demo_prompts(demo, load_tokenizer(str(MODEL)))
    reference, rows = plain_generate(model, prompts, settings), []
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        trace = record(model, str(MODEL), seen, Path(scratch))
        by_nodes = {n: set_ups(trace, n, a.redundant) for n in {int((w.split("/") + ["1"])[1]) for w in a.networks}}
    for wanted in a.networks:
        try:
            with joined(wanted) as network:
                ups = by_nodes[network.nodes if network else 1]
                results = run_rounds(network, ups, prompts, settings, a.rounds)
        except NetworkError as error:
            print(f"\n{wanted}: skipped, {error}")
            continue
        identical = [str(compare_outputs(model, prompts, reference, result.outputs)) for result in results[0]]
        found = figures(wanted, ups, results, identical)
        show(found)
        rows += found
    line = json.dumps({"ranks": RANKS, "prompts": len(prompts), "rounds": a.rounds, "results": rows})
    print("\n" + line)
    if a.out:
        a.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
