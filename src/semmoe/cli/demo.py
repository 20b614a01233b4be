"""The command demo on the shipped model: profile, solve, generate in five configurations, forecast, report."""

import json
import os
import platform
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semmoe.checkpoint.directory import EXPERT_FIELDS, config_count, read_config
from semmoe.checkpoint.relabel import plan_digest
from semmoe.core import Plan, RoutingTrace
from semmoe.costs.links import PhaseLinks, load_links
from semmoe.costs.timing import LayerShape
from semmoe.evaluation.results import DemoFile, checked
from semmoe.io.console import Bars
from semmoe.io.files import save_text
from semmoe.settings import DemoSettings, GenerateSettings, ReplaySettings, SolveSettings
from semmoe.topology import Fingerprint, Topology, physical_experts
from semmoe.traces.dataset import encode
from semmoe.traces.prompts import Prompt
from semmoe.traces.texts import held_out_prompts

if TYPE_CHECKING:
    from semmoe.engines.transformers.generate import Configuration

MODEL = Path(__file__).parents[1] / "models" / "tiny"
LINKS = "h200-nvlink"  # for which the demo predicts whether a plan is worth it, as `semmoe solve` does by default


def demo_prompts(settings: DemoSettings, tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """(profile, evaluation) token ids: text that the embedded model never saw, split by document."""
    texts = held_out_prompts(per_domain=settings.profile_prompts)
    documents = sorted({(domain, document) for domain, document, _ in texts})
    profiled = set(documents[::2])
    seen, unseen = ([Prompt(text=t[2]) for t in texts if (t[:2] in profiled) == kind] for kind in (True, False))
    return (
        encode(seen[: settings.profile_prompts], tokenizer, settings.max_prompt_tokens),
        encode(unseen[: settings.generate_prompts], tokenizer, settings.max_prompt_tokens),
    )


def run_demo(settings: DemoSettings, work: Path, progress: Bars) -> dict[str, Any]:
    """Run every stage; returns the table's rows and their settings.

    Under `work` it leaves the trace, plan-dp, plan-tp and demo.json, the returned figures.
    """
    experts = config_count(read_config(MODEL), *EXPERT_FIELDS)
    physical_experts(experts, 0, settings.ep_size)  # refuses a number of ranks that does not divide them

    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    advance = progress.task("loading the model", 1)
    tokenizer, model = load_tokenizer(str(MODEL)), load_model(str(MODEL))
    identity = fingerprint_of(str(MODEL))
    profile_ids, prompts = demo_prompts(settings, tokenizer)
    advance(1)
    advance = progress.task(f"profiling {len(profile_ids)} prompts", len(profile_ids))
    trace = record(model, str(MODEL), profile_ids, work / "trace", advance)
    configurations, digests = _configurations(trace, identity, settings, work, progress)
    lengths = GenerateSettings(max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size)
    found = generate_compared(str(MODEL), prompts, configurations, lengths, progress, verify=True)
    rows = [row | {"plan_hash": digests.get(row["name"])} for _, row in found]
    made = {
        "settings": asdict(settings),
        "prompts": len(prompts),
        "profile_tokens": trace.num_tokens,
        "set_ups": rows,
        "payoffs": _payoffs(rows, settings.ep_size),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("semmoe", "torch", "transformers")},
    }
    save_text(work / "demo.json", json.dumps(checked(DemoFile, made), indent=1))
    return made


def _configurations(
    trace: RoutingTrace, identity: Fingerprint, settings: DemoSettings, work: Path, progress: Bars
) -> tuple[list["Configuration"], dict[str, str]]:
    """Each attention with and without a plan, and the one without all-to-all; the plans' digests by name."""
    from semmoe.engines.transformers.generate import Configuration
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan, save_plan

    found, digests = [], {}
    for attention in ("dp", "tp"):
        topology, path = Topology.for_attention(attention, settings.ep_size), work / f"plan-{attention}"
        save_plan(_solve(trace, topology, settings, progress), path)
        name, vanilla = f"attention-{attention.upper()}", vanilla_plan(identity, topology)
        found.append(Configuration(name=f"{name}, vanilla", plan=vanilla))
        found.append(Configuration(name=f"{name}, on the plan", plan=load_plan(path)))
        digests[found[-1].name] = plan_digest(path)
    found.append(Configuration(name="attention-TP, all-reduce", plan=vanilla, exchange="all-reduce"))
    return found, digests


def generate_compared(
    model: str,
    prompts: list[list[int]],
    configurations: list["Configuration"],
    settings: GenerateSettings,
    progress: Bars,
    verify: bool,
) -> list[tuple[list[list[int]], dict[str, Any]]]:
    """Outputs and figures of every configuration, and if asked whether the outputs are those of plain transformers."""
    from semmoe.engines.transformers.generate import generate
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.verify import compare_outputs, plain_generate

    ranks, runs = configurations[0].plan.topology.ep_size, len(configurations)
    several = f", {runs} configurations" if runs > 1 else ""
    advance = progress.task(f"generating on {ranks} processes{several}", len(prompts) * runs)
    results = generate(model, prompts, configurations, settings, lambda name, done: advance(done))
    compared: list[dict[str, Any]] = [{"identical": None, "identical_text": "not verified"}] * runs
    if verify:
        plain = load_model(model)
        advance = progress.task("verifying with plain transformers", len(prompts))
        reference = plain_generate(plain, prompts, settings, advance)
        agreements = [compare_outputs(plain, prompts, reference, result.outputs) for result in results]
        compared = [{"identical": found.holds, "identical_text": str(found)} for found in agreements]
    return [(result.outputs, result.figures() | found) for result, found in zip(results, compared, strict=True)]


def _payoffs(rows: list[dict[str, Any]], ep_size: int) -> list[dict[str, Any]]:
    """Where plans with the traffic that was measured here would pay; nowhere on one rank, where nothing travels."""
    from semmoe.costs.payoff import measured, payoffs

    if ep_size == 1:
        return []
    dp, tp = measured("dp", rows[0], rows[1], ep_size), measured("tp", rows[2], rows[3], ep_size)
    return [asdict(one) for one in (*payoffs(dp), *payoffs(tp))]


def _solve(trace: RoutingTrace, topology: Topology, settings: DemoSettings, progress: Bars) -> Plan:
    """A plan with its forecast for held-out requests, and the verdict on LINKS; all of its passes are shuffled."""
    from semmoe.cli.solve import solve_expected
    from semmoe.placement.problem import Problem

    f, links = trace.fingerprint, load_links(LINKS)
    shape = LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)
    problem = Problem(trace=trace, topology=topology, settings=SolveSettings(seed=settings.seed))
    measure = ReplaySettings(seed=settings.seed)
    plan = solve_expected(problem, measure, PhaseLinks(links, links), shape, progress)
    return replace(plan, shuffle_from=1)
