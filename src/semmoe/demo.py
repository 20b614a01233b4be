"""The main line on the embedded default: profile, solve, generate in five set-ups; where a plan pays; one page."""

import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from semmoe.checkpoint.directory import EXPERT_FIELDS, config_count, read_config
from semmoe.console import Bars
from semmoe.core import Plan, RoutingTrace
from semmoe.dataset import encode
from semmoe.files import atomic_file
from semmoe.prompts import Prompt
from semmoe.results import DemoFile, checked
from semmoe.settings import DemoSettings, GenerateSettings, ReplaySettings, SolveSettings
from semmoe.texts import held_out_prompts
from semmoe.topology import Fingerprint, Topology, physical_experts

if TYPE_CHECKING:
    from semmoe.engines.transformers.generate import Configuration

MODEL = Path(__file__).parent / "models" / "tiny"
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
    """Run every stage; returns the table's rows and what they rest on.

    Under `work` it leaves the trace, plan-dp, plan-tp and demo.json, the returned figures.
    """
    experts = config_count(read_config(MODEL), *EXPERT_FIELDS)
    physical_experts(experts, 0, settings.ep_size)  # refuses a number of ranks that does not divide them

    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    advance = progress.task("loading the model", 1)
    tokenizer, model, identity = load_tokenizer(str(MODEL)), load_model(str(MODEL)), fingerprint_of(str(MODEL))
    profile_ids, prompts = demo_prompts(settings, tokenizer)
    advance(1)
    advance = progress.task(f"profiling {len(profile_ids)} prompts", len(profile_ids))
    trace = record(model, str(MODEL), profile_ids, work / "trace", advance)
    configurations, digests = _configurations(trace, identity, settings, work, progress)
    rows = _compare(model, prompts, configurations, settings, progress)
    rows = [row | {"plan_hash": digests.get(row["name"])} for row in rows]
    made = {
        "settings": asdict(settings),
        "prompts": len(prompts),
        "profile_tokens": trace.num_tokens,
        "set_ups": rows,
        "payoffs": _payoffs(rows, settings.ep_size),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("semmoe", "torch", "transformers")},
    }
    _save(work / "demo.json", checked(DemoFile, made))
    return made


def _configurations(
    trace: RoutingTrace, identity: Fingerprint, settings: DemoSettings, work: Path, progress: Bars
) -> tuple[list["Configuration"], dict[str, str]]:
    """Each attention with and without a plan, and the one without all-to-all; the plans' digests by name."""
    from semmoe.checkpoint.relabel import plan_digest
    from semmoe.engines.transformers.generate import Configuration
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan, save_plan

    found, digests = [], {}
    advance = progress.task("solving plans", 4)
    for attention in ("dp", "tp"):
        topology, path = Topology.for_attention(attention, settings.ep_size), work / f"plan-{attention}"
        save_plan(_solve(trace, topology, settings, advance), path)
        name, vanilla = f"attention-{attention.upper()}", vanilla_plan(identity, topology)
        found.append(Configuration(name=f"{name}, vanilla", plan=vanilla))
        found.append(Configuration(name=f"{name}, on the plan", plan=load_plan(path)))
        digests[found[-1].name] = plan_digest(path)
    found.append(Configuration(name="attention-TP, all-reduce", plan=vanilla, exchange="all-reduce"))
    return found, digests


def _compare(
    model: Any,
    prompts: list[list[int]],
    configurations: list["Configuration"],
    settings: DemoSettings,
    progress: Bars,
) -> list[dict[str, Any]]:
    """Figures of every configuration, and whether its outputs are those of plain transformers."""
    from semmoe.engines.transformers import verify
    from semmoe.engines.transformers.generate import generate

    lengths = GenerateSettings(max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size)
    advance = progress.task("generating with plain transformers", len(prompts))
    reference = verify.plain_generate(model, prompts, lengths, advance)
    number = len(configurations)
    advance = progress.task(
        f"generating on {settings.ep_size} processes, {number} configurations", len(prompts) * number
    )
    rows = []
    for result in generate(str(MODEL), prompts, configurations, lengths, lambda name, done: advance(done)):
        agreement = verify.compare_outputs(model, prompts, reference, result.outputs)
        rows.append({**result.figures(), "identical": agreement.holds, "identical_text": str(agreement)})
    return rows


def _payoffs(rows: list[dict[str, Any]], ep_size: int) -> list[dict[str, Any]]:
    """Where plans with the traffic that was measured here would pay; nowhere on one rank, where nothing travels."""
    from semmoe.payoff import measured, payoffs

    if ep_size == 1:
        return []
    dp, tp = measured("dp", rows[0], rows[1], ep_size), measured("tp", rows[2], rows[3], ep_size)
    return [asdict(one) for one in (*payoffs(dp), *payoffs(tp))]


def _solve(trace: RoutingTrace, topology: Topology, settings: DemoSettings, advance: Callable[[int], None]) -> Plan:
    """A plan, with what it should do for requests that it has not seen and whether that is worth it on LINKS."""
    from semmoe.calibration import PhaseLinks, load_links
    from semmoe.cost import LayerShape
    from semmoe.expectation import expect
    from semmoe.placement.problem import Problem
    from semmoe.solver import solve_problem

    f, solving = trace.fingerprint, SolveSettings(seed=settings.seed)
    shape = LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)
    measure, links = ReplaySettings(seed=settings.seed), load_links(LINKS)
    problem = Problem(trace=trace, topology=topology, settings=solving)
    expected = expect(problem, measure, PhaseLinks(links, links), shape)
    advance(1)
    plan = replace(solve_problem(problem), expected=expected)
    advance(1)
    return plan


def _save(path: Path, value: Any) -> None:
    with atomic_file(path) as staged:
        staged.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
