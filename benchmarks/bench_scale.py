"""Solving at scale: seconds and peak memory, on synthetic routing of any size or on a trace.

    python benchmarks/bench_scale.py --trace TRACE --ep-size 8 --num-nodes 1
    python benchmarks/bench_scale.py [--layers 58 --experts 256 --top-k 8 --vocabulary 129280 --tokens 350000
                                      --ep-size 64 --num-nodes 8] [--linearity]

Tokens have favourite experts and paths are correlated from layer to layer, so that there is something to find. The
trace goes to disk in shards and is read back before solving. `--linearity` solves three sizes each in tokens and in
layers. EPLB solves the same problem beside it. Prints a table and one JSON line.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path

import numpy as np

from semmoe.core import DECODE, RoutingTrace
from semmoe.settings import SolveSettings
from semmoe.solver import solve
from semmoe.topology import Fingerprint, Topology
from semmoe.trace import open_trace, save_trace


def synthetic(tokens: int, layers: int, experts: int, top_k: int, vocabulary: int, seed: int = 0) -> RoutingTrace:
    """Requests of 500 tokens; each token has a hidden topic, from its id or its request, with favourite experts."""
    rng = np.random.default_rng(seed)
    topics, length = experts // 4, 500
    lengths = np.full(tokens // length, length)
    ids = np.minimum(rng.zipf(1.2, lengths.sum()) - 1, vocabulary - 1).astype(np.int32)
    of_id, of_request = rng.integers(topics, size=vocabulary), rng.integers(topics, size=len(lengths))
    by_request = rng.random(len(ids)) < 0.4
    topic = np.where(by_request, of_request[np.repeat(np.arange(len(lengths)), length)], of_id[ids])
    chosen = np.empty((len(ids), layers, top_k), np.uint8 if experts <= 256 else np.int16)
    for l in range(layers):
        taste = rng.normal(size=(topics, experts)).astype(np.float32) * 2
        for first in range(0, len(ids), 1 << 14):
            part = slice(first, first + (1 << 14))
            noise = rng.gumbel(size=(len(ids[part]), experts)).astype(np.float32)
            chosen[part, l] = np.argsort(-(taste[topic[part]] + noise), axis=1)[:, :top_k]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    f = Fingerprint(model=f"synthetic {layers}x{experts}", architecture_hash="", tokenizer_hash="",
                    vocab_size=vocabulary, num_layers=layers, num_experts=experts, top_k=top_k)  # fmt: skip
    return RoutingTrace(token_ids=ids, expert_ids=chosen, request_offsets=offsets, prompt_ids=ids,
                        prompt_offsets=offsets, phase=np.full(len(ids), DECODE, np.uint8), fingerprint=f)  # fmt: skip


def timed(trace: RoutingTrace, topology: Topology, method: str) -> float:
    started = time.perf_counter()
    solve(trace, topology, SolveSettings(method=method))
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 58), ("experts", 256), ("top-k", 8), ("vocabulary", 129_280), ("tokens", 350_000),
                        ("ep-size", 64), ("num-nodes", 8)):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--linearity", action="store_true")
    parser.add_argument("--trace")
    a = parser.parse_args()
    topology, out = Topology(ep_size=a.ep_size, num_nodes=a.num_nodes), []
    if a.trace:
        trace = open_trace(Path(a.trace))
        seconds = {method: timed(trace, topology, method) for method in ("eplb", "paper", "semmoe")}
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("  ".join(f"{k} {v:,.1f} s" for k, v in seconds.items()), f"  peak {peak:.2f} GiB")
        print("\n" + json.dumps({"settings": vars(a), "seconds": seconds, "peak_gib": peak}))
        return
    sizes = [(a.tokens, a.layers)]
    if a.linearity:
        sizes = [(a.tokens // k, a.layers) for k in (4, 2, 1)] + [(a.tokens, a.layers // k) for k in (4, 2)]
    for tokens, layers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            save_trace(synthetic(tokens, layers, a.experts, a.top_k, a.vocabulary), Path(folder, "trace"))
            trace = open_trace(Path(folder, "trace"))
        row = {"tokens": trace.num_tokens, "layers": layers, "eplb_seconds": timed(trace, topology, "eplb")}
        row["semmoe_seconds"] = timed(trace, topology, "semmoe")
        row["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print("  ".join(f"{k} {v:,.1f}" if isinstance(v, float) else f"{k} {v:,}" for k, v in row.items()), flush=True)
        out.append(row)
    print("\n" + json.dumps({"settings": vars(a), "results": out}))


if __name__ == "__main__":
    main()
