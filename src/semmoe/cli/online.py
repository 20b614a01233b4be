"""Commands that run a model: profile, generate, demo."""

import importlib
import json
import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console, tables
from semmoe.checkpoint.directory import read_config
from semmoe.checkpoint.relabel import plan_digest
from semmoe.cli import options
from semmoe.cli.app import OFFLINE, TOOLS, app, install_hint, refuse_given
from semmoe.cli.form import takes
from semmoe.dataset import LeftOut, check_token_ids, digest, encode_usable, is_running_text, read_prompts
from semmoe.demo import run_demo
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.files import atomic_file, check_output
from semmoe.prompts import Prompt
from semmoe.results import GenerateFile
from semmoe.settings import DemoSettings, ExchangeSettings, GenerateSettings, ProfileSettings, PromptSettings
from semmoe.texts import held_out_prompts
from semmoe.trace import TraceHeader, TraceWriter


class Engine(str, Enum):
    transformers = "transformers"
    sglang = "sglang"
    vllm = "vllm"


@app.command(rich_help_panel=OFFLINE, context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
@takes(settings=ProfileSettings)
def profile(
    ctx: typer.Context,
    model: options.ModelArgument,
    out: options.TraceOut,
    dataset: options.Dataset = None,
    settings: Any = None,
    engine: Annotated[
        Engine, options.inputs("sglang, vllm: its offline engine; options after `--` go to it.")
    ] = Engine.transformers,
    as_json: options.Json = False,
) -> None:
    """Record which experts each token chooses.

    Without --dataset, held-out texts of the standard library are used. A run that was stopped resumes where it ended.

    Example: `semmoe profile MODEL --dataset chats.jsonl.gz --limit 500 --max-new-tokens 64 --out trace`
    """
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.streams import check_tokens

    check_output(out, directory=True, force=True, inputs=(model, dataset))  # a profile that was stopped resumes
    asked: ProfileSettings = settings()
    if engine is not Engine.transformers:
        options.check_installed(engine.value)
    elif ctx.args:
        raise ValueError(f"{ctx.args[0]}: transformers has no such option")
    identity = fingerprint_of(model)  # refuses a model before its tokenizer is asked
    prompts, counts = _prompts(model, load_tokenizer(model), dataset, asked)
    check_token_ids(prompts, identity.vocab_size)
    stated = {"decode": asked.max_new_tokens, "max_prompt_tokens": asked.max_prompt_tokens}
    header = TraceHeader(fingerprint=identity, dataset_hash=digest(prompts), settings=stated)
    record = _recorder(engine, model, identity.top_k, ctx.args)  # refuses a model before anything is written
    with TraceWriter(out, header) as writer, console.bars() as bars:
        if writer.num_requests:
            console.err.print(f"resuming: {writer.num_requests} of {len(prompts)} requests are recorded")
        advance = bars.task("profiling", len(prompts))
        advance(writer.num_requests)
        record(prompts, writer, max_new_tokens=asked.max_new_tokens, batch_size=asked.batch_size, progress=advance)
        requests = writer.num_requests
    check_tokens(out, str(out))
    console.tell(as_json, {"trace": str(out), "requests": requests, **counts}, f"{requests} requests in {out}")


def _recorder(engine: Engine, model: str, top_k: int, words: list[str]) -> Callable[..., None]:
    """The function that records prompts with the embedded engine, or with another engine's offline mode."""
    if engine is Engine.transformers:
        from semmoe.engines.transformers.model import load_model
        from semmoe.engines.transformers.recorder import record_prompts

        return partial(record_prompts, load_model(model))
    profiling = importlib.import_module(f"semmoe.engines.{engine.value}.profile")
    return partial(profiling.profile, model, top_k=top_k, options=words)


def _prompts(
    model: str, tokenizer: Any, dataset: Path | None, asked: PromptSettings
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the prompts' token ids, and counts of what is cut or left out, which are also printed."""
    most = asked.max_prompt_tokens
    texts = [] if dataset else held_out_prompts(per_domain=40)
    left_out = LeftOut(dataset or Path("held-out texts"), asked.strict, records=len(texts))
    prompts = read_prompts(dataset, left_out) if dataset else (Prompt(text=text) for _, _, text in texts)
    usable = encode_usable(prompts, tokenizer, read_config(Path(model)), left_out)
    encoded = [ids[: most + 1] for ids in islice(usable, asked.limit or None)]
    left_out.check()
    if left_out.reasons:
        console.warn(f"{left_out.path}: {left_out}")
    if dataset is not None and is_running_text(dataset):
        text = f"{dataset} is read as running text: prompts used: {len(encoded)}; for one prompt per line give jsonl"
        console.err.print(text, markup=False, soft_wrap=True)
    cut = sum(len(ids) > most for ids in encoded)
    if cut:
        text = f"{cut} of {len(encoded)} prompts are cut to --max-prompt-tokens {most}"
        console.err.print(text, soft_wrap=True)
    return [ids[:most] for ids in encoded], {"cut_prompts": cut, **left_out.counts()}


@app.command(rich_help_panel=TOOLS)
@takes(topology=options.GivenTopology, exchange=ExchangeSettings, inputs=PromptSettings, settings=GenerateSettings)
def generate(
    ctx: typer.Context,
    model: options.ModelArgument,
    plan: Annotated[Path | None, options.method("Run on this plan; without it, vanilla.")] = None,
    topology: Any = None,
    exchange: Any = None,
    dataset: options.Dataset = None,
    prompt: Annotated[list[str] | None, options.inputs("A prompt; may be given several times.")] = None,
    inputs: Any = None,
    settings: Any = None,
    verify: Annotated[bool, options.output("Compare every token with plain transformers.")] = False,
    out: Annotated[
        Path | None, options.output("Write prompts and completions as jsonl, and the result beside them.")
    ] = None,
    force: options.Force = False,
    as_json: options.Json = False,
) -> None:
    """Generate greedily with expert parallelism, each rank a process that holds its own experts only.

    With --verify the exit code is 1 if a token differs.

    Example: `semmoe generate MODEL --plan plan --dataset prompts.jsonl --verify`
    """
    beside = out and out.with_suffix(".json" if out.suffix != ".json" else ".result.json")
    for path in (out, beside):
        options.check_result(path, force, (model, plan, dataset))
    if prompt:
        refuse_given(ctx, ["dataset", "limit", "max_prompt_tokens", "strict"], "each --prompt is taken whole")
    configuration = _configuration(model, plan, topology(), exchange())
    tokenizer = load_tokenizer(model)
    prompts, counts = _encode_given(prompt, tokenizer) if prompt else _prompts(model, tokenizer, dataset, inputs())
    outputs, row = _run(model, prompts, configuration, settings(), verify)
    row |= {"plan_hash": plan_digest(plan) if plan else None, **counts}
    completions = tokenizer.batch_decode(outputs)
    if out is not None:
        _write_completions(out, tokenizer.batch_decode(prompts), completions)
    if not options.tell_result(GenerateFile, {**row, "completions": completions}, beside, as_json):
        title = f"{len(prompts)} requests, {configuration.plan.topology.ep_size} processes"
        console.print_table(title, *tables.generated([row]))
        tables.print_times(row)
        for given, text in zip(prompt or [], completions, strict=False):
            console.out.print(f"{given}{text}\n", markup=False)
    if row["identical"] is False:
        raise typer.Exit(1)


def _configuration(model: str, path: Path | None, given: options.GivenTopology, ways: ExchangeSettings) -> Any:
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.generate import Configuration
    from semmoe.placement.linear import vanilla_plan

    planned = options.plan_for(model, path) if path else None
    topology = options.resolve_topology(planned, given, options.ranks_at_hand())
    plan = planned or vanilla_plan(fingerprint_of(model), topology)
    if ways.shuffle_from and (path is None or not plan.tokens.by_tables):
        raise ValueError("--shuffle-from has no effect: only a plan for attention tp or hybrid shuffles tokens")
    plan = replace(plan, shuffle_from=ways.shuffle_from or plan.shuffle_from)
    way = "on the plan" if path else "vanilla" if ways.exchange == "all-to-all" else ways.exchange
    name = f"attention-{topology.attention.upper()}, {way}"
    return Configuration(name=name, plan=plan, exchange=ways.exchange)


def _run(
    model: str, prompts: list[list[int]], configuration: Any, settings: GenerateSettings, verify: bool
) -> tuple[list[list[int]], dict[str, Any]]:
    """What the ranks generated, and their figures; verify: compare it with plain transformers."""
    from semmoe.engines.transformers import verify as verifying
    from semmoe.engines.transformers.generate import generate as run
    from semmoe.engines.transformers.model import load_model

    with console.bars() as bars:
        advance = bars.task(f"generating on {configuration.plan.topology.ep_size} processes", len(prompts))
        result = run(model, prompts, [configuration], settings, lambda name, done: advance(done))[0]
        if not verify:
            return result.outputs, {**result.figures(), "identical": None, "identical_text": "not verified"}
        plain = load_model(model)
        advance = bars.task("verifying with plain transformers", len(prompts))
        reference = verifying.plain_generate(plain, prompts, settings, advance)
    agreement = verifying.compare_outputs(plain, prompts, reference, result.outputs)
    return result.outputs, {**result.figures(), "identical": agreement.holds, "identical_text": str(agreement)}


def _encode_given(texts: list[str], tokenizer: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Same as `_prompts` for given texts, which are never cut."""
    if not all(text for text in texts):
        raise ValueError("a prompt is empty")
    return tokenizer(texts)["input_ids"], {"cut_prompts": 0}


def _write_completions(path: Path, prompts: list[str], completions: list[str]) -> None:
    with atomic_file(path) as staged, staged.open("w", encoding="utf-8") as file:
        for prompt, completion in zip(prompts, completions, strict=True):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


@app.command(rich_help_panel=TOOLS)
@takes(settings=DemoSettings)
def demo(
    out: Annotated[Path | None, options.output("Keep trace, plans, measurements and the report here.")] = None,
    as_json: options.Json = False,
    settings: Any = None,
) -> None:
    """Run all steps on the embedded model: profile, solve, generate in five ways, and where a plan pays.

    It takes about two minutes. The prompts are texts of the standard library that the model never saw. The page is
    semmoe-demo/report.html, or DIR/report.html with --out DIR.

    Example: `semmoe demo --out out`
    """
    folder = out or Path("semmoe-demo")
    check_output(folder, directory=True, force=True)
    if any((folder / name).exists() for name in ("plan.json", "trace.json")):
        raise ValueError(f"{folder} is a plan or a trace: choose another directory")
    kept = nullcontext(out) if out else tempfile.TemporaryDirectory(prefix="semmoe-demo-")
    with kept as work:
        with console.bars() as bars:
            result = run_demo(settings(), Path(work), bars)
        if not as_json:
            _show_demo(result)
        page = _demo_report(Path(work), folder)
    found = f"report: {page}" if page else f"for all this as one page: {install_hint('report')}"
    console.tell(as_json, {**result, "report": page and str(page)}, found)
    if not all(row["identical"] for row in result["set_ups"]):
        raise typer.Exit(1)


def _show_demo(result: dict[str, Any]) -> None:
    rows, ranks = result["set_ups"], result["settings"]["ep_size"]
    console.print_table(
        f"{result['prompts']} held-out prompts, {ranks} processes", *tables.generated(rows, with_speed=False)
    )
    tables.print_gain(rows)
    tables.print_payoffs(result["payoffs"], ranks)


def _demo_report(work: Path, folder: Path) -> Path | None:
    """Write the report on the demo's results in `work` and return its path; None if its packages are missing."""
    try:
        importlib.import_module("jinja2")
        importlib.import_module("plotly.offline")
    except ModuleNotFoundError:
        return None
    from semmoe.report.page import write

    return write(work, folder / "report.html", "semmoe demo").path
