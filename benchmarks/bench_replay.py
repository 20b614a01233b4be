"""Solve and replay of every method on a trace: quality and time, with the bounds beside them.

    PYTHONPATH=. python benchmarks/bench_replay.py [TRACE] [--rounds 3]

Without a trace, a profile of the embedded model on held-out text serves. Prints configuration, bounds, a table and one
JSON line; methods take turns round by round, and times are medians.
"""

import argparse
import json
import platform
import statistics
import tempfile
from pathlib import Path

import numpy as np

from lab.methods import ALL
from semmoe import console
from semmoe.core import RoutingTrace
from semmoe.methods import obstacle
from semmoe.metrics import uniform_remote_ranks
from semmoe.settings import DemoSettings, ReplaySettings, SolveSettings
from semmoe.solver import score, solve_methods
from semmoe.splitter import split
from semmoe.topology import Topology
from semmoe.trace import open_trace


def embedded_trace(folder: Path) -> RoutingTrace:
    """A profile of the embedded model on its held-out text."""
    from semmoe.demo import MODEL, demo_prompts
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    profiled, evaluated = demo_prompts(DemoSettings(), load_tokenizer(str(MODEL)))
    prompts = profiled + evaluated
    with console.bars() as bars:
        advance = bars.task("profiling", len(prompts))
        return record(load_model(str(MODEL)), str(MODEL), prompts, folder / "trace", advance)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trace = open_trace(arguments.trace) if arguments.trace else embedded_trace(Path(folder))
    f, measure, lines = trace.fingerprint, ReplaySettings(), []
    profile, evaluation = split(trace, 0.2, 0)
    print(f"{f.model}: {trace.num_requests} requests, {trace.num_tokens:,} tokens, {f.num_layers} layers,")
    print(f"top-{f.top_k} of {f.num_experts}; 20/80 by request, batches of 1,024 mixed; {platform.machine()}")
    for attention, ep_size in (("tp", 8), ("tp", 4), ("dp", 4)):
        topology = Topology.for_attention(attention, ep_size)
        methods = [name for name in ALL if obstacle(name, topology, 0) is None]
        rounds = [solve_methods(profile, topology, methods, SolveSettings()) for _ in range(arguments.rounds)]
        plans = rounds[-1][0]
        scores = score(evaluation, plans, measure)
        for name, metrics in scores.items():
            metrics["solve_seconds"] = statistics.median(seconds[name] for _, seconds in rounds)
            del metrics["layers"], metrics["rows_per_rank_pair"]
        uniform = uniform_remote_ranks(ep_size, f.num_experts, f.top_k)
        print(f"\nattention-{attention}, EP{ep_size}: uniform routing would give LAR {1 / ep_size:.3f}, "
              f"remote ranks {uniform:.3f}")  # fmt: skip
        width = max(map(len, scores))
        for name, m in scores.items():
            print(f"  {name:{width}}  LAR {m['lar']:.3f}  remote ranks {m['remote_ranks_per_token']:.3f}  "
                  f"bytes x{m['bytes_ratio']:.3f}  load {m['load_max_over_mean']:.3f}  "
                  f"solve {m['solve_seconds']:.2f} s")  # fmt: skip
        lines.append({"attention": attention, "ep_size": ep_size, "methods": scores})
    print("\n" + json.dumps({"trace": f.model, "rounds": arguments.rounds, "results": lines}, default=np.asarray))


if __name__ == "__main__":
    main()
