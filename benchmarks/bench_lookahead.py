"""What look-ahead gains and costs: predictions without and with it beside true routing, on one placement, in one run.

    OMP_NUM_THREADS=1 python benchmarks/bench_lookahead.py [--ep-size 4 8] [--redundant 0 8] [--prompts 24] [--rounds 5]

The shipped model on the demo's text: one half of the documents is profiled with look-ahead, the other half is scored
by replay, in both kinds of batches, and then generated on four processes, where every output is compared with plain
transformers. `share` is how far look-ahead goes from prediction without it to true routing. The router is timed on the
rows that a rank of four has of 1,024 tokens, beside the layer's MoE block on them. Prints configuration, tables, one
JSON line.
"""

import argparse
import json
import platform
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from true_routing import TrueRouting

from semmoe.core import Plan, RoutingTrace
from semmoe.demo import MODEL, demo_prompts
from semmoe.engines.transformers.generate import Configuration, generate
from semmoe.engines.transformers.model import load_model, moe_layers, router_lookahead
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.engines.transformers.verify import compare_outputs, plain_generate
from semmoe.replayer import replay
from semmoe.settings import DemoSettings, GenerateSettings, PredictorSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.tokens.predictor import fit, project
from semmoe.topology import Topology

RANKS, BATCH = 4, 1024


def plans(profile: RoutingTrace, ep_size: int, redundant: int) -> dict[str, Plan]:
    """One placement, and three ways to send tokens after it."""
    looking = PredictorSettings(lookahead=True)
    settings = SolveSettings(redundant_experts=redundant, predictor=looking)
    plan = solve(profile, Topology(ep_size=ep_size), settings)
    without = project(fit(profile, PredictorSettings(), 0), profile, plan.placement)
    return {
        "without": replace(plan, tokens=without),
        "look-ahead": plan,
        "true routing": replace(plan, tokens=TrueRouting()),
    }


def shares(figures: dict[str, dict[str, float]]) -> dict[str, float]:
    """How far look-ahead goes from prediction without it to true routing."""
    low, mid, high = (figures[name] for name in ("without", "look-ahead", "true routing"))
    return {name: (mid[name] - low[name]) / (high[name] - low[name]) for name in ("lar", "remote_ranks")}


def offline(profile: RoutingTrace, held_out: RoutingTrace, ep_size: int, redundant: int) -> list[dict[str, Any]]:
    rows = []
    solved = plans(profile, ep_size, redundant)
    for batches in ("mixed", "prefill"):
        figures, by_layer = {}, {}
        for name, plan in solved.items():
            result = replay(held_out, plan, ReplaySettings(batches=batches, batch_tokens=BATCH))
            figures[name] = {
                "lar": result.total.lar,
                "remote_ranks": result.total.remote_ranks_per_token,
                "load": float(result.load_max_over_mean.mean()),
            }
            by_layer[name] = [layer.lar for layer in result.layers]
        print(f"EP{ep_size}, {redundant} redundant experts, {batches} batches")
        for name, found in figures.items():
            layers = " ".join(f"{lar:.3f}" for lar in by_layer[name])
            print(f"  {name:13} LAR {found['lar']:.3f}  remote ranks {found['remote_ranks']:.3f}  "
                  f"load {found['load']:.3f}  by layer {layers}")  # fmt: skip
        gone = shares(figures)
        print(f"  share of the way: LAR {gone['lar']:.2f}, remote ranks {gone['remote_ranks']:.2f}", flush=True)
        rows.append({"ep_size": ep_size, "redundant": redundant, "batches": batches, **figures, "share": gone})
    return rows


def named(trace: RoutingTrace) -> dict[str, list[float]]:
    """The share of chosen experts that is named ahead at each layer but the first, by K and by all ids."""
    assert trace.lookahead_ids is not None
    chosen = trace.expert_ids[:, 1:, :, None]
    hits = chosen == trace.lookahead_ids[:, :, None, :]
    K = trace.fingerprint.top_k
    found = {"K ids": hits[..., :K], "all ids": hits}
    return {name: one.any(axis=3).mean(axis=(0, 2)).tolist() for name, one in found.items()}


def live(model: Any, profile: RoutingTrace, prompts: list[list[int]], settings: GenerateSettings) -> dict[str, Any]:
    """Both plans on four processes."""
    solved, reference = plans(profile, RANKS, 0), plain_generate(model, prompts, settings)
    ups = [Configuration(name=name, plan=solved[name]) for name in ("without", "look-ahead")]
    rows = {}
    for result in generate(str(MODEL), prompts, ups, settings):
        agreement = compare_outputs(model, prompts, reference, result.outputs)
        rows[result.name] = {
            "lar": result.lar,
            "remote_ranks": result.remote_ranks_per_token,
            "all_to_all_mb": result.all_to_all_bytes / 1e6,
            "all_gather_mb": result.sent_bytes["all_gather"] / 1e6,
            "total_mb": result.total_bytes / 1e6,
            "identical": agreement.holds,
        }
        print(f"  {result.name:13} " + "  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}"
              for k, v in rows[result.name].items()), flush=True)  # fmt: skip
    return rows


@torch.no_grad()
def cost(model: Any, rounds: int) -> dict[str, float]:
    """Microseconds of asking a router ahead of time, and of a MoE block, for one rank's share of a batch."""
    ahead, block = router_lookahead(model, 2), moe_layers(model)[1]
    rows, found = torch.randn(BATCH // RANKS, model.config.hidden_size), {"asking": [], "moe": []}
    for _ in range(rounds + 1):
        for name, job in (("asking", lambda: ahead(0, rows)), ("moe", lambda: block(rows[None]))):
            started = time.perf_counter()
            for _ in range(20):
                job()
            found[name].append((time.perf_counter() - started) / 20 * 1e6)
    return {name: median(times[1:]) for name, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ep-size", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--redundant", type=int, nargs="*", default=[0, 8])
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, settings = load_model(str(MODEL)), DemoSettings()
    profiled, held_out = demo_prompts(settings, load_tokenizer(str(MODEL)))
    with tempfile.TemporaryDirectory() as folder:
        profile = record(model, str(MODEL), profiled, Path(folder, "profile"), lookahead=True)
        evaluation = record(model, str(MODEL), held_out, Path(folder, "held-out"), lookahead=True)
    f = profile.fingerprint
    print(f"{f.model}: {f.num_layers} layers, top-{f.top_k} of {f.num_experts}; {profile.num_tokens:,} tokens "
          f"profiled, {evaluation.num_tokens:,} held out; batches of {BATCH:,}; {platform.machine()}")  # fmt: skip
    hits = named(evaluation)
    for name, by_layer in hits.items():
        print(f"share of experts that {name} name, layer by layer from the second: "
              + " ".join(f"{one:.2f}" for one in by_layer))  # fmt: skip
    rows = [
        row
        for ep in arguments.ep_size
        for copies in arguments.redundant
        for row in offline(profile, evaluation, ep, copies)
    ]
    print(f"live, EP{RANKS}, {arguments.prompts} prompts, {settings.max_new_tokens} new tokens each")
    lengths = GenerateSettings(max_new_tokens=settings.max_new_tokens)
    served = live(model, profile, held_out[: arguments.prompts], lengths)
    times = cost(model, arguments.rounds)
    print(f"asking ahead takes {times['asking']:.0f} us of a rank, its MoE block {times['moe']:.0f} us")
    print("\n" + json.dumps({"named": hits, "offline": rows, "live": served, "microseconds": times}))


if __name__ == "__main__":
    main()
