"""What a prompt and a decode pass take: a plan beside the engine as it comes, turn by turn.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_passes.py --engine sglang|vllm [--attention tp]
        [--rate 256mbit] [--at-once 1] [--prompt 32] [--turns 16] [--new-tokens 48]
        [--servers NAME ...]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1), as root, on cores that nothing else uses: each
of two ranks is a node behind a link of this rate (network.py). Three servers are kept alive, of which one runs at a
time: the engine as it comes, the same again as placebo, and the plan with eight redundant experts, unless others are
named. A turn asks each for as many answers at once as are told: the time of a prompt is that to its first token, of a
pass the mean between the tokens that follow. Work is what the ranks' main threads have of their cores, per token of an
answer: unlike the time of a pass it holds no waits. Prints medians of turns, paired ratios to the first server with
their 90 % intervals, one JSON line.
"""

import argparse
import json
import os
import platform
import sys
from statistics import median

import numpy as np
import psutil
from network import NetworkError, slow_network
from serving.claims import estimate
from serving.client import run
from serving.configurations import AS_IT_COMES, COMES_AGAIN, COPIES, PLANS, UNPLANNED
from serving.engine import RANKS, ServerError, add_engine, engine
from serving.guard import BusyError, check
from serving.loads import Load
from serving.measure import awake, bench, kept
from serving.pieces import Settings
from serving.server import prompts

NAMES = (AS_IT_COMES, COMES_AGAIN, COPIES)
KNOWN = [AS_IT_COMES, COMES_AGAIN, UNPLANNED, *PLANS]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--attention", choices=["dp", "tp"], default="tp")
    parser.add_argument("--rate", default="256mbit", help="of each node's link, in tc's units")
    parser.add_argument("--at-once", type=int, default=1, help="requests in a pass")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of a prompt at most")
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--servers", nargs="+", choices=KNOWN, default=NAMES, metavar="NAME", help="; ".join(KNOWN))
    return parser.parse_args()


def measure(a: argparse.Namespace) -> dict[str, list[list[float]]]:
    """Milliseconds of a prompt, of a pass and of the ranks' work by configuration, (turns, 3) each."""
    seen, held_out = prompts()
    short = [prompt[: a.prompt] for prompt in held_out]
    loads = [Load(short[i : i + a.at_once], [0.0] * a.at_once) for i in range(0, a.turns * a.at_once, a.at_once)]
    found: dict[str, list[list[float]]] = {name: [] for name in a.servers}
    with (
        bench(engine(a.engine), Settings(), seen, held_out, busy=False) as b,
        slow_network(RANKS, a.rate) as network,
        kept(b, a.servers, a.attention, network) as servers,
    ):
        ranks = {name: server.ranks(b.engine.RANK) for name, server in servers.items()}
        for turn, load in enumerate(loads):
            for name in np.roll(a.servers, turn).tolist():
                before = work(ranks[name])
                with awake(servers[name]):
                    first, last = np.mean(run(servers[name], load, a.new_tokens).requests, axis=0)
                worked = (work(ranks[name]) - before) / a.new_tokens
                found[name].append([float(first), float(last - first) / (a.new_tokens - 1), worked])
    return found


def work(ranks: list[psutil.Process]) -> float:
    """Milliseconds that the main threads of ranks have had of a core so far, their mean."""
    threads = [thread for rank in ranks for thread in rank.threads() if thread.id == rank.pid]
    return 1000 * float(np.mean([thread.user_time + thread.system_time for thread in threads]))


def main() -> int:
    a = parse()
    try:
        check()
        found = measure(a)
    except (NetworkError, BusyError, ServerError) as error:
        print(f"bench_passes.py: {error}", file=sys.stderr)
        return 2
    print(f"{engine(a.engine)}, attention-{a.attention.upper()}, links of {a.rate}, {os.cpu_count()} cores, "
          f"{platform.machine()}; {a.turns} turns of {a.at_once} requests at once, prompts of at most {a.prompt} "
          f"tokens, {a.new_tokens} new ones; ms, and ratios to the first")  # fmt: skip
    for name, times in found.items():
        ratios = np.array(times) / found[a.servers[0]]
        columns = zip(("prompt", "pass", "work"), zip(*times, strict=True), ratios.T, strict=True)
        told = [f"{what} {median(ms):7.2f}  {estimate(ratio)}" for what, ms, ratio in columns]
        print(f"  {name:{max(map(len, found))}}   " + "   ".join(told))
    print(json.dumps({"settings": vars(a), "ms": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
