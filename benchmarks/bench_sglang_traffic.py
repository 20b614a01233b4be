"""What placement and scheduling save on the real SGLang: bytes of its expert all-to-all and LAR, each alone and both.

    python benchmarks/bench_sglang_traffic.py [--ranks 4] [--prompts 64] [--redundant 0 8] [--new-tokens 16]

In SGLang's own environment. The shipped model in fp32 on held-out prompts, all at hand at once; outputs held against
transformers. placement: the plan's experts, requests by SGLang's own balancer, tokens by position; scheduling: SGLang's
contiguous experts, requests and tokens by tables made for these; both: the plan. Prints a table and one JSON line.
"""

import argparse
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")

from semmoe import predictor as predict
from semmoe import request_map
from semmoe.core import Plan, RoutingTrace, Schedule, Topology
from semmoe.demo import MODEL, demo_prompts
from semmoe.engines.metrics import Activity
from semmoe.engines.sglang import launch
from semmoe.engines.sglang.offline import running
from semmoe.engines.sglang.settings import PluginSettings
from semmoe.engines.transformers.model import load_model, load_tokenizer
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.verify import compare_outputs, plain_generate
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import load_plan, save_plan
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.solve import solve
from semmoe.split import near_duplicates

LIMITS = ["--dtype", "float32", "--max-total-tokens", "32768", "--max-running-requests", "64", "--chunked-prefill-size",
          "1024", "--mem-fraction-static", "0.1", "--disable-radix-cache"]  # fmt: skip


@dataclass(frozen=True)
class SetUp:
    attention: str
    name: str
    plan: str  # a directory; empty: vanilla
    schedule: str = "plan"
    shuffle: str = "layer"


def tables_for_contiguous(trace: RoutingTrace, topology: Topology) -> Plan:
    """SGLang's own placement, with the tables that serve it best."""
    plan = vanilla_plan(trace.fingerprint, topology)
    D, S = topology.dp_size, topology.attn_tp_size
    by_group = plan.placement.hosts.reshape(-1, D, S, trace.fingerprint.num_experts).any(axis=2).swapaxes(1, 2)
    rates = request_map.fit_request_rates(trace, near_duplicates(trace)) if D > 1 else None
    predictor = predict.fit(trace, SolveSettings().predictor, 0) if S > 1 else None
    schedule = Schedule(
        requests=request_map.project(rates, by_group) if rates else None,
        shuffle=predict.project(predictor, trace, plan.placement, None) if predictor else None,
    )
    return Plan(topology=topology, placement=plan.placement, schedule=schedule, fingerprint=trace.fingerprint,
                method="scheduling only")  # fmt: skip


def set_ups(trace: RoutingTrace, ranks: int, redundant: list[int], folder: Path) -> list[SetUp]:
    out = []
    for attention in ("dp", "tp"):
        topology, alone = Topology.for_attention(attention, ranks), folder / f"{attention}-scheduling"
        save_plan(tables_for_contiguous(trace, topology), alone)
        out += [SetUp(attention, "vanilla", ""), SetUp(attention, "scheduling", str(alone))]
        for copies in redundant:
            path = folder / f"{attention}-{copies}"
            save_plan(solve(trace, topology, SolveSettings(redundant_experts=copies)), path)
            suffix = f", {copies} redundant" if copies else ""
            out.append(SetUp(attention, f"placement{suffix}", str(path), "engine", "off"))
            out.append(SetUp(attention, f"both{suffix}", str(path)))
            if attention == "tp":
                out.append(SetUp(attention, f"both, once a batch{suffix}", str(path), shuffle="batch"))
    return out


def run(set_up: SetUp, ranks: int, prompts: list[list[int]], new_tokens: int, folder: Path) -> None:
    """In a process of its own; leaves answers and counters in `folder`."""
    topology = Topology.for_attention(set_up.attention, ranks)
    plan = load_plan(set_up.plan) if set_up.plan else None
    location = launch.write_location(plan, MODEL, folder) if plan else None
    arguments = launch.arguments(topology, location, plan.placement.redundant_experts if plan else 0, True)
    settings = PluginSettings(plan=set_up.plan, schedule=set_up.schedule, shuffle=set_up.shuffle, control=str(folder))
    environment = launch.environment(settings, topology, True)
    with running(str(MODEL), launch.command_line(arguments) + LIMITS, environment) as engine:
        started = time.perf_counter()
        answers = engine.complete(prompts, new_tokens)
        seconds = time.perf_counter() - started
        time.sleep(2)  # counters are published once a second
    (folder / "answers.json").write_text(json.dumps({"seconds": seconds, "outputs": [a.token_ids for a in answers]}))


def measure(set_up: SetUp, ranks: int, prompts: list[list[int]], new_tokens: int) -> tuple[list[list[int]], dict]:
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        arguments = (set_up, ranks, prompts, new_tokens, Path(scratch))
        process = multiprocessing.get_context("spawn").Process(target=run, args=arguments)
        process.start()
        process.join()
        answers = json.loads(Path(scratch, "answers.json").read_text())
        return answers["outputs"], figures(Path(scratch)) | {"seconds": answers["seconds"]}


def figures(folder: Path) -> dict[str, Any]:
    totals: Counter[str] = Counter()
    load: Counter[str] = Counter()
    for path in folder.glob("activity-*.json"):
        for sample in Activity.model_validate_json(path.read_bytes()).samples:
            totals[sample.name + sample.labels.get("local", "") + sample.labels.get("kind", "")] += int(sample.value)
            if sample.name == "served_pairs":
                load[sample.labels["by"]] += int(sample.value)
    pairs = totals["pairstrue"] + totals["pairsfalse"]
    return {
        "lar": totals["pairstrue"] / pairs, "remote_ranks_per_token": totals["remote_rows"] / totals["routed_tokens"],
        "all_to_all_bytes": totals["all_to_all_bytes"], "routed_tokens": totals["routed_tokens"],
        "load_max_over_mean": max(load.values()) * len(load) / sum(load.values()),
        "shuffled_bytes": totals["sent_bytesreduce_scatter"] + totals["sent_bytesall_gather"],
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--redundant", type=int, nargs="*", default=[0, 8])
    a = parser.parse_args()
    tokenizer, model = load_tokenizer(str(MODEL)), load_model(str(MODEL))
    demo = DemoSettings(profile_prompts=432, generate_prompts=a.prompts, max_prompt_tokens=192)
    profile, held_out = demo_prompts(demo, tokenizer)
    print(f"SGLang {version('sglang')} on CPU, the shipped model, fp32, EP{a.ranks}; profile: {len(profile)} prompts; "
          f"{len(held_out)} held-out ones with {a.new_tokens} new tokens each, all at hand at once\n")  # fmt: skip
    settings = GenerateSettings(max_new_tokens=a.new_tokens)
    reference = plain_generate(model, held_out, settings)
    rows = []
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        trace = record(model, str(MODEL), profile, Path(scratch, "trace"))
        for set_up in set_ups(trace, a.ranks, a.redundant, Path(scratch)):
            outputs, found = measure(set_up, a.ranks, held_out, a.new_tokens)
            agreement = compare_outputs(model, held_out, reference, outputs)
            rows.append({"attention": set_up.attention, "set_up": set_up.name, **found, "identical": str(agreement)})
            show(rows)
    print("\n" + json.dumps({"sglang": version("sglang"), "ranks": a.ranks, "rows": rows}))


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


if __name__ == "__main__":
    main()
