"""What a solve costs and how good its plan is, this checkout's solver beside another's, case by case, in turn.

    python benchmarks/bench_solver.py --trace TRACE [--against CHECKOUT] [--efforts quick thorough] [--splits 3]
                                      [--cases trace:8:0 ...] [--kinds KINDS]

A case is shape:EP size:redundant experts[:nodes]. Shapes: `trace`, the routing that --trace names; `tiny`, the shipped
model's, of which half of 288 prompts is the profile; LxExKxT, synthetic routing of L layers, E experts, top-K and T
tokens over 32k token ids; `drift`, the trace's requests of half of their kinds (--kinds: a JSON list with the kind of
each request), where a warm start from a plan for the other half is timed beside a cold solve.

Each solve runs in a process of its own: seconds are those of `semmoe.solve`, after one of a small trace that compiles
the code. The plan is made from 20 % of the requests of `trace` (all of a synthetic shape's) and replayed on the rest.
Cost: rows to other ranks, and to other nodes, and pairs computed elsewhere, per token and layer, which is what the
solver minimises under the load limit. Moves are counted per CPU second of the local search. Prints a line per solve,
ratios, and one JSON line.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.core import DECODE, RoutingTrace
from semmoe.topology import Fingerprint

CASES = (
    "trace:8:0",
    "trace:8:8",
    "trace:8:32",
    "tiny:4:0",
    "tiny:4:8",
    "16x64x8x51000:8:0",
    "26x64x6x37000:8:0",
    "26x64x6x37000:8:32",
    "58x256x8x350000:64:0:8",
)
WORKER = """
import json, resource, sys, time
from dataclasses import replace
from pathlib import Path
import numpy as np
from semmoe import settings as all_settings
from semmoe.evaluation.replay import replay
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.trace import open_trace
folder, ranks, redundant, nodes = Path(sys.argv[1]), *map(int, sys.argv[2:5])
effort, topology = sys.argv[5], Topology(ep_size=ranks, num_nodes=nodes)
settings, more = all_settings.SolveSettings(redundant_experts=redundant), {}
if effort in ("quick", "thorough"):
    changed = replace(settings.cocluster, **getattr(all_settings, effort.upper()))
    settings = replace(settings, cocluster=changed)
solve(open_trace(folder / "warm"), topology, settings)
if effort == "warm":
    more = {"previous": solve(open_trace(folder / "before"), topology, settings)}
searched = {"seconds": [], "judged": [], "made": []}
def count_moves(module, name, figures):
    search = getattr(module, name)
    def timed(*given):
        started = time.thread_time()
        found = search(*given)
        searched["seconds"].append(time.thread_time() - started)
        for kind, number in zip(("judged", "made"), figures(given[0], found)):
            searched[kind].append(number)
        return found
    setattr(module, name, timed)
def looked_up(state, found):  # every step looks at all swaps, and with copies at all replacements
    (G, S), E = state.slots.shape, len(state.primary)
    return found[2] * (G * S * (G * S - S) // 2 + (G * S * (E - S) if G * S > E else 0)), found[2]
try:
    from semmoe.placement import layers
    count_moves(layers, "search_moves", looked_up)
except ImportError:  # a checkout whose search judges moves one by one and does not say how many it makes
    from semmoe.placement import cocluster
    count_moves(cocluster, "improve", lambda state, found: (found[1], 0))
trace = open_trace(folder / "profile")
started, cpu = time.perf_counter(), time.process_time()
plan = solve(trace, topology, settings, **more)
out = {"seconds": time.perf_counter() - started, "cpu_seconds": time.process_time() - cpu}
search = max(sum(searched["seconds"]), 1e-9)
out |= {"judged_per_second": sum(searched["judged"]) / search, "made_per_second": sum(searched["made"]) / search}
out["peak_gib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
held_out = folder / "evaluation"
seen = replay(open_trace(held_out if held_out.exists() else folder / "profile"), plan).as_dict()
out |= {k: seen[k] for k in ("lar", "remote_ranks_per_token", "load_max_over_mean")}
node = topology.node_of
between = np.array(seen["rows_per_rank_pair"])[node[:, None] != node].sum()
out["rows_between_nodes"] = float(between / max(np.sum(seen["rows_per_rank_pair"]), 1) * out["remote_ranks_per_token"])
print(json.dumps(out))
"""


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


def prepare(shape: str, given: argparse.Namespace, seed: int, folder: Path) -> None:
    """Write the profile, a small trace that compiles the code and, but for synthetic shapes, what is held out."""
    from lab.save import save_trace
    from semmoe.traces.split import split
    from semmoe.traces.trace import open_trace

    if shape[0].isdigit():
        layers, experts, top_k, tokens = map(int, shape.split("x"))
        profile = synthetic(tokens, layers, experts, top_k, 32_000, seed)
    elif shape == "drift":
        trace, kinds = open_trace(Path(given.trace)), np.array(json.loads(given.kinds.read_text()))
        names = np.random.default_rng(seed).permutation(np.unique(kinds))
        of_first = np.isin(kinds, names[: len(names) // 2])
        save_trace(split(trace.select(np.flatnonzero(of_first)), 0.4, seed)[0], folder / "before")
        profile, evaluation = split(trace.select(np.flatnonzero(~of_first)), 0.4, seed)
        save_trace(evaluation, folder / "evaluation")
    else:
        whole, share = (open_trace(Path(given.trace)), 0.2) if shape == "trace" else (open_trace(tiny()), 0.5)
        profile, evaluation = split(whole, share, seed)
        save_trace(evaluation, folder / "evaluation")
    save_trace(profile, folder / "profile")
    save_trace(profile.select(np.arange(min(profile.num_requests, 12))), folder / "warm")


def tiny() -> Path:
    """A profile of the shipped model, made once."""
    path = Path(tempfile.gettempdir(), "semmoe-bench-solver-tiny")
    if not path.exists():
        main = "from semmoe.cli import main; main()"
        words = ["profile", "tiny", "--limit", "288", "--max-prompt-tokens", "512", "--out", str(path)]
        subprocess.run([sys.executable, "-c", main, *words], check=True, stdout=subprocess.DEVNULL)
    return path


def worker(folder: Path, case: list[str], source: Path, effort: str) -> dict[str, Any]:
    """One solve with the package at `source`, and its plan's figures."""
    ranks, redundant, nodes = case[1], case[2], case[3] if len(case) > 3 else "1"
    words = [sys.executable, "-c", WORKER, str(folder), ranks, redundant, nodes, effort]
    done = subprocess.run(words, env=os.environ | {"PYTHONPATH": str(source)}, capture_output=True, text=True)
    if done.returncode != 0:
        raise SystemExit(done.stderr)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", help="real routing, for the cases called trace")
    parser.add_argument("--against", type=Path, help="another checkout, whose solver runs in turn with this one's")
    parser.add_argument("--efforts", nargs="+", default=[], help="quick, thorough: beside the default's")
    parser.add_argument("--splits", type=int, default=3)
    parser.add_argument("--cases", nargs="+", default=CASES)
    parser.add_argument("--kinds", type=Path, help="JSON list of the kind of each request, for the cases called drift")
    given = parser.parse_args()
    here = Path(__file__).parents[1] / "src"
    out: list[dict[str, Any]] = []
    for name in given.cases:
        case = name.split(":")
        if (case[0] in ("trace", "drift") and not given.trace) or (case[0] == "drift" and not given.kinds):
            print(f"{name}: left out, no --trace or --kinds")
            continue
        solvers = {effort: here for effort in ["this", *given.efforts, *(["warm"] if case[0] == "drift" else [])]}
        solvers |= {"other": given.against / "src"} if given.against else {}
        for seed in range(given.splits):
            with tempfile.TemporaryDirectory() as folder:
                prepare(case[0], given, seed, Path(folder))
                for solver, source in list(solvers.items())[:: 1 if seed % 2 else -1]:
                    row = {"case": name, "split": seed, "solver": solver} | worker(Path(folder), case, source, solver)
                    top_k = json.loads(Path(folder, "profile", "trace.json").read_text())["fingerprint"]["top_k"]
                    row["cost"] = row["remote_ranks_per_token"] + row["rows_between_nodes"] + top_k * (1 - row["lar"])
                    out.append(row)
                    print(
                        "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{v}" for k, v in row.items()),
                        flush=True,
                    )
        for other in list(solvers)[1:]:
            compare([row for row in out if row["case"] == name], other)
    print("\n" + json.dumps({"results": out}))


def compare(rows: list[dict[str, Any]], solver: str) -> None:
    """Ratios of this solver, as it is used by default, to another, split by split."""
    mine, other = ([row for row in rows if row["solver"] == which] for which in ("this", solver))
    faster = [b["seconds"] / a["seconds"] for a, b in zip(mine, other, strict=True)]
    worse = [a["cost"] / b["cost"] - 1 for a, b in zip(mine, other, strict=True)]
    print(f"  {solver} takes {min(faster):.2f} to {max(faster):.2f} times as long; this one's cost is ", end="")
    print(f"{min(worse):+.2%} to {max(worse):+.2%} of it, ", end="")
    print(f"mean {np.mean(worse):+.2%}", flush=True)


if __name__ == "__main__":
    main()
