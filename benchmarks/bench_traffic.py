"""What placement and scheduling save on a real engine: bytes of its expert all-to-all and LAR, each alone and both.

    python benchmarks/bench_traffic.py --engine sglang|vllm
        [--attention dp tp] [--ranks 4] [--prompts 64] [--redundant 0 8] [--new-tokens 16] [--quick]

In the engine's own environment. The shipped model in fp32 on held-out prompts, all in one request; outputs held against
transformers. placement: the plan's experts, requests by the engine's own balancer, tokens by position; scheduling: the
engine's contiguous experts, requests and tokens by tables made for these; both: the plan. Prints a table and one JSON
line.
"""

import argparse
import json
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.engine import Engine, ServerError, SetUp, add_engine, engine
from serving.server import Server, counters, serving

from semmoe.cli.demo import MODEL, demo_prompts
from semmoe.core import Plan, RoutingTrace
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.engines.transformers.verify import compare_outputs, plain_generate
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import save_plan
from semmoe.requests import predictor as request_map
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.solver import solve
from semmoe.tokens import predictor as predict
from semmoe.topology import Topology
from semmoe.traces.split import near_duplicates

PATIENCE = 1800  # seconds until the server must have answered
QUICK = ("vanilla", "both")


def tables_for_contiguous(trace: RoutingTrace, topology: Topology) -> Plan:
    """The engine's own placement, with the tables that serve it best."""
    plan = vanilla_plan(trace.fingerprint, topology)
    D, S = topology.dp_size, topology.attn_tp_size
    by_group = plan.placement.hosts.reshape(-1, D, S, trace.fingerprint.num_experts).any(axis=2).swapaxes(1, 2)
    rates = request_map.fit_request_rates(trace, near_duplicates(trace)) if D > 1 else None
    predictor = predict.fit(trace, SolveSettings().predictor, 0) if S > 1 else None
    return replace(
        plan,
        requests=request_map.project(rates, by_group) if rates else plan.requests,
        tokens=predict.project(predictor, trace, plan.placement, None) if predictor else plan.tokens,
        method="scheduling only",
    )


def set_ups(
    trace: RoutingTrace, attentions: Sequence[str], ranks: int, redundant: list[int], folder: Path
) -> list[SetUp]:
    out = []
    for attention in attentions:
        topology, alone = Topology.for_attention(attention, ranks), folder / f"{attention}-scheduling"
        save_plan(tables_for_contiguous(trace, topology), alone)

        def add(name: str, plan: Path | None, attention: str = attention, **of_plan: str) -> None:
            out.append(SetUp(name=name, attention=attention, ranks=ranks, plan=plan, **of_plan))

        add("vanilla", None)
        add("scheduling", alone)
        for copies in redundant:
            path = folder / f"{attention}-{copies}"
            save_plan(solve(trace, topology, SolveSettings(redundant_experts=copies)), path)
            suffix = f", {copies} redundant" if copies else ""
            add(f"placement{suffix}", path, schedule="engine", shuffle="off")
            add(f"both{suffix}", path)
    return out


def measure(
    served: Engine, set_up: SetUp, prompts: list[list[int]], new_tokens: int, scratch: Path
) -> tuple[list[list[int]], dict[str, Any]]:
    begin = time.perf_counter()
    with serving(served, set_up, scratch / "server", served.UNCACHED) as server:
        up = time.perf_counter() - begin
        time.sleep(2)  # counters are published once a second; servers warm up
        before = counters(server.folder)
        started = time.perf_counter()
        outputs = complete(server, prompts, new_tokens)
        seconds = time.perf_counter() - started
        time.sleep(2)
        found = {name: value - before.get(name, 0) for name, value in counters(server.folder).items()}
    print(f"  {set_up.attention.upper()}, {set_up.name}: up after {up:.0f} s, answers took {seconds:.0f} s, all in "
          f"{time.perf_counter() - begin:.0f} s", file=sys.stderr, flush=True)  # fmt: skip
    return outputs, figures(found) | {"seconds": seconds}


def complete(server: Server, prompts: list[list[int]], new_tokens: int) -> list[list[int]]:
    """Greedy completions."""
    body = {"model": str(MODEL), "prompt": prompts, "max_tokens": new_tokens, "temperature": 0,
            "return_token_ids": True}  # fmt: skip
    request = urllib.request.Request(f"{server.url}/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})  # fmt: skip
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        choices = json.load(answer)["choices"]
    return [choice["token_ids"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def figures(found: dict[str, float]) -> dict[str, Any]:
    load = [value for name, value in found.items() if name.startswith("served_pairs.by=")]
    return {
        "lar": found["pairs.local=true"] / found["pairs"],
        "remote_ranks_per_token": found["remote_rows"] / found["routed_tokens"],
        "all_to_all_bytes": round(found["all_to_all_bytes"]), "routed_tokens": round(found["routed_tokens"]),
        "load_max_over_mean": max(load) * len(load) / sum(load),
        "shuffled_bytes": round(sum(found.get(f"sent_bytes.kind={k}", 0) for k in ("reduce_scatter", "all_gather"))),
    }  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--attention", nargs="+", choices=["dp", "tp"], default=["dp", "tp"])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--redundant", type=int, nargs="*", default=[0, 8])
    parser.add_argument("--quick", action="store_true", help=f"{' and '.join(QUICK)} only, 16 prompts")
    a = parser.parse_args()
    if a.quick:
        a.prompts, a.redundant = 16, [0]
    return a


def run(a: argparse.Namespace, served: Engine) -> list[dict[str, Any]]:
    tokenizer, model = load_tokenizer(str(MODEL)), load_model(str(MODEL))
    demo = DemoSettings(profile_prompts=432, generate_prompts=a.prompts, max_prompt_tokens=192)
    profile, held_out = demo_prompts(demo, tokenizer)
    print(f"{served} on CPU, the shipped model, fp32, EP{a.ranks}; profile: {len(profile)} prompts; {len(held_out)} "
          f"held-out ones with {a.new_tokens} new tokens each, all at hand at once\n", flush=True)  # fmt: skip
    reference = plain_generate(model, held_out, GenerateSettings(max_new_tokens=a.new_tokens))
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        trace = record(model, str(MODEL), profile, Path(scratch, "trace"))
        for set_up in set_ups(trace, a.attention, a.ranks, a.redundant, Path(scratch)):
            if a.quick and set_up.name not in QUICK:
                continue
            outputs, found = measure(served, set_up, held_out, a.new_tokens, Path(scratch))
            agreement = compare_outputs(model, held_out, reference, outputs)
            rows.append({"attention": set_up.attention, "set_up": set_up.name, **found, "identical": str(agreement)})
            show(rows)
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The last row, beside vanilla of its attention."""
    row = rows[-1]
    vanilla = next(r for r in rows if r["attention"] == row["attention"])
    per_token = [r["all_to_all_bytes"] / r["routed_tokens"] for r in (row, vanilla)]
    if len(rows) == 1:
        print("| attention | set-up | LAR | remote ranks | all-to-all bytes per token and layer | of vanilla | load "
              "max/mean | tokens identical |\n|---|---|---|---|---|---|---|---|")  # fmt: skip
    print(f"| {row['attention'].upper()} | {row['set_up']} | {row['lar']:.3f} | {row['remote_ranks_per_token']:.3f} | "
          f"{per_token[0]:.0f} | {per_token[0] / per_token[1]:.2f} | {row['load_max_over_mean']:.2f} | "
          f"{row['identical']} |", flush=True)  # fmt: skip


def main() -> int:
    a = parse()
    served = engine(a.engine)
    try:
        rows = run(a, served)
    except (ServerError, ValueError) as error:
        print(f"bench_traffic.py: {error}", file=sys.stderr)
        return 2
    print("\n" + json.dumps({"engine": str(served), "ranks": a.ranks, "rows": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
