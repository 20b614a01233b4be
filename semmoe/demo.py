"""The main line on the embedded default: profile, solve, generate in five set-ups, and one table."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from semmoe.console import Bars
from semmoe.core import Topology, require
from semmoe.dataset import Prompt, encode, load_dataset
from semmoe.settings import DemoSettings, GenerateSettings, SolveSettings
from semmoe.texts import held_out_prompts

MODEL = Path(__file__).parent / "models" / "tiny"


def demo_prompts(
    settings: DemoSettings, tokenizer: Any, dataset: Path | None = None
) -> tuple[list[list[int]], list[list[int]]]:
    """(profile, evaluation) token ids: from `dataset`, or text that the embedded model never saw.

    Held-out text is split by document, so that the two share none; a dataset's first three quarters are profiled.
    """
    if dataset is None:
        profile, rest = _held_out_texts(settings)
    else:
        prompts = load_dataset(dataset)
        cut = min(len(prompts) * 3 // 4, settings.profile_prompts)
        require(cut >= settings.ep_size, f"{dataset} holds {len(prompts)} prompts: too few to profile and evaluate")
        profile, rest = prompts[:cut], prompts[cut:]
    return (
        encode(profile[: settings.profile_prompts], tokenizer, settings.max_prompt_tokens),
        encode(rest[: settings.generate_prompts], tokenizer, settings.max_prompt_tokens),
    )


def _held_out_texts(settings: DemoSettings) -> tuple[list[Prompt], list[Prompt]]:
    texts = held_out_prompts(per_domain=settings.profile_prompts)
    documents = sorted({(domain, document) for domain, document, _ in texts})
    profiled = set(documents[::2])
    profile = [Prompt(text=text) for domain, document, text in texts if (domain, document) in profiled]
    rest = [Prompt(text=text) for domain, document, text in texts if (domain, document) not in profiled]
    return profile, rest


def run_demo(settings: DemoSettings, work: Path, progress: Bars, dataset: Path | None = None) -> dict[str, Any]:
    """Run every stage, artefacts under `work`; returns the table's rows and what they rest on."""
    from semmoe.engines.transformers import generate as gen
    from semmoe.engines.transformers import verify
    from semmoe.engines.transformers.model import fingerprint_of, load_model, load_tokenizer
    from semmoe.engines.transformers.recorder import record
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan, save_plan
    from semmoe.solve import solve

    advance = progress.task("loading the model", 1)
    tokenizer, model, identity = load_tokenizer(str(MODEL)), load_model(str(MODEL)), fingerprint_of(str(MODEL))
    profile_ids, prompts = demo_prompts(settings, tokenizer, dataset)
    advance(1)

    advance = progress.task(f"profiling {len(profile_ids)} prompts", len(profile_ids))
    trace, set_ups = record(model, str(MODEL), profile_ids, work / "trace", advance), []
    advance = progress.task("solving plans", 2)
    for attention in ("dp", "tp"):
        topology = Topology.for_attention(attention, settings.ep_size)
        save_plan(solve(trace, topology, SolveSettings(seed=settings.seed)), work / f"plan-{attention}")
        plan = load_plan(work / f"plan-{attention}")
        vanilla = vanilla_plan(identity, topology)
        set_ups.append(gen.SetUp(name=f"attention-{attention.upper()}, vanilla", plan=vanilla))
        set_ups.append(gen.SetUp(name=f"attention-{attention.upper()}, on the plan", plan=plan))
        advance(1)
    set_ups.append(gen.SetUp(name="attention-TP, all-reduce", plan=vanilla, exchange="all-reduce"))

    generate_settings = GenerateSettings(max_new_tokens=settings.max_new_tokens, batch_size=settings.batch_size)
    advance = progress.task("generating with plain transformers", len(prompts))
    reference = verify.plain_generate(model, prompts, generate_settings, advance)
    advance = progress.task(
        f"generating on {settings.ep_size} processes, {len(set_ups)} set-ups", len(prompts) * len(set_ups)
    )
    results = gen.generate(str(MODEL), prompts, set_ups, generate_settings, lambda name, done: advance(done))
    rows = []
    for result in results:
        agreement = verify.compare_outputs(model, prompts, reference, result.outputs)
        rows.append({**result.figures(), "identical": agreement.holds, "identical_text": str(agreement)})
    return {"settings": asdict(settings), "prompts": len(prompts), "profile_tokens": trace.num_tokens, "set_ups": rows}
