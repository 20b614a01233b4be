"""Commands that run a model: profile, generate, demo."""

import importlib.util
import tempfile
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from semmoe.checkpoint.directory import read_config
from semmoe.checkpoint.relabel import plan_digest
from semmoe.cli import options, tables
from semmoe.cli.app import OFFLINE, PASSED_ON, TOOLS, command, install_hint, refuse_given
from semmoe.cli.demo import generate_compared, run_demo
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.evaluation.results import GenerateFile, checked
from semmoe.io import console
from semmoe.io.files import check_output
from semmoe.settings import DemoSettings, ExchangeSettings, GenerateSettings, ProfileSettings, PromptSettings
from semmoe.traces.dataset import LeftOut, check_token_ids, digest, encode_usable, is_running_text, read_prompts
from semmoe.traces.prompts import Prompt
from semmoe.traces.texts import held_out_prompts
from semmoe.traces.trace import TraceHeader, TraceWriter, request_lengths


@dataclass(frozen=True, kw_only=True)
class GivenPrompts(PromptSettings):
    """The prompts that a model continues: of a dataset, or given one by one."""

    dataset: options.Dataset = None
    prompt: Annotated[list[str] | None, options.inputs("A prompt; may be given several times.")] = None


@command(OFFLINE, context_settings=PASSED_ON)
def profile(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    out: options.TraceOut,
    dataset: options.Dataset = None,
    engine: Annotated[
        Literal["transformers", "sglang", "vllm"],
        options.inputs("sglang, vllm: by a server that is started for it; options after `--` go to the engine."),
    ] = "transformers",
    asked: ProfileSettings,
    as_json: options.Json = False,
) -> None:
    """Record which experts each token chooses.

    Without --dataset, held-out texts of the standard library are used. A run that was stopped resumes where it ended.

    Example: `semmoe profile MODEL --dataset chats.jsonl.gz --limit 500 --max-new-tokens 64 --out trace`
    """
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.traces.streams import check_tokens

    own = engine == "transformers"
    check_output(out, directory=True, force=own, inputs=(model, dataset))  # a profile of our own resumes
    if not own:
        options.check_installed(engine)
    elif ctx.args:
        raise ValueError(f"{ctx.args[0]}: transformers has no such option")
    identity = fingerprint_of(model)  # refuses a model before its tokenizer is asked
    prompts, counts = _prompts(model, load_tokenizer(model), dataset, asked)
    check_token_ids(prompts, identity.vocab_size)
    if own:
        stated = {"decode": asked.max_new_tokens, "max_prompt_tokens": asked.max_prompt_tokens}
        header = TraceHeader(fingerprint=identity, dataset_hash=digest(prompts), settings=stated)
        _profile_here(model, prompts, out, header, asked)
    else:
        _profile_served(engine, model, prompts, out, asked, ctx.args)
    check_tokens(out, str(out))
    requests = sum(map(len, request_lengths(out)))
    console.tell(as_json, {"trace": str(out), "requests": requests, **counts}, f"{requests} requests in {out}")


def _profile_here(model: str, prompts: list[list[int]], out: Path, header: TraceHeader, asked: ProfileSettings) -> None:
    """Record prompts with the embedded engine."""
    from semmoe.engines.transformers.model import load_model
    from semmoe.engines.transformers.recorder import record_prompts

    loaded = load_model(model)  # refuses a model before anything is written
    with TraceWriter(out, header) as writer, console.bars() as bars:
        if writer.num_requests:
            console.note(f"resuming: {writer.num_requests} of {len(prompts)} requests are recorded")
        advance = bars.task("profiling", len(prompts))
        advance(writer.num_requests)
        tokens, batch = asked.max_new_tokens, asked.batch_size
        record_prompts(loaded, prompts, writer, max_new_tokens=tokens, batch_size=batch, progress=advance)


def _profile_served(
    engine: str, model: str, prompts: list[list[int]], out: Path, asked: ProfileSettings, words: list[str]
) -> None:
    """Record prompts with another engine."""
    from semmoe.live.client import profile as profile_served

    console.note(f"starting {engine}; a large model takes minutes")
    with console.bars() as bars:
        advance = bars.task("profiling", len(prompts))
        for _ in profile_served(engine, model, prompts, out, asked, words):
            advance(1)


def _prompts(
    model: str, tokenizer: Any, dataset: Path | None, asked: PromptSettings
) -> tuple[list[list[int]], dict[str, Any]]:
    """Return the prompts' token ids and the numbers of cut and left-out prompts, which are also printed."""
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
        used = f"prompts used: {len(encoded)}; for one prompt per line give jsonl"
        console.note(f"{dataset} is read as running text: {used}")
    cut = sum(len(ids) > most for ids in encoded)
    if cut:
        console.note(f"{cut} of {len(encoded)} prompts are cut to --max-prompt-tokens {most}")
    return [ids[:most] for ids in encoded], {"cut_prompts": cut, **left_out.counts()}


@command(TOOLS)
def generate(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    plan: Annotated[Path | None, options.method("Run on this plan; without it, vanilla.")] = None,
    topology: options.GivenTopology,
    exchange: ExchangeSettings,
    given: GivenPrompts,
    settings: GenerateSettings,
    verify: Annotated[bool, options.output("Compare every token with plain transformers.")] = False,
    as_json: options.Json = False,
) -> None:
    """Generate greedily with expert parallelism, each rank a process that holds its own experts only.

    With --verify the exit code is 1 if a token differs.

    Example: `semmoe generate MODEL --plan plan --dataset prompts.jsonl --verify`
    """
    if given.prompt:
        refuse_given(ctx, ["dataset", "limit", "max_prompt_tokens", "strict"], "each --prompt is taken whole")
    configuration = _configuration(model, plan, topology, exchange)
    tokenizer = load_tokenizer(model)
    texts = given.prompt or []
    prompts, counts = _encode_given(texts, tokenizer) if texts else _prompts(model, tokenizer, given.dataset, given)
    with console.bars() as bars:
        [(outputs, figures)] = generate_compared(model, prompts, [configuration], settings, bars, verify)
    row = figures | {"plan_hash": plan_digest(plan) if plan else None, **counts}
    completions = tokenizer.batch_decode(outputs)
    result = checked(GenerateFile, {**row, "completions": completions})
    title = f"{len(prompts)} requests, {configuration.plan.topology.ep_size} processes"
    console.tell(as_json, result, lambda: _show_run(title, row, texts, completions))
    if row["identical"] is False:
        raise typer.Exit(1)


def _show_run(title: str, row: dict[str, Any], texts: list[str], completions: list[str]) -> None:
    console.print_table(title, *tables.generated([row]))
    tables.print_times(row)
    for prompt, completion in zip(texts, completions, strict=False):
        console.say(f"{prompt}{completion}\n")


def _configuration(model: str, path: Path | None, given: options.GivenTopology, ways: ExchangeSettings) -> Any:
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.engines.transformers.generate import Configuration
    from semmoe.placement.linear import vanilla_plan

    planned = options.plan_for(model, path) if path else None
    topology = given.resolve(planned, options.ranks_at_hand())
    plan = planned or vanilla_plan(fingerprint_of(model), topology)
    options.check_shuffle_from(ways.shuffle_from, planned)
    plan = replace(plan, shuffle_from=ways.shuffle_from or plan.shuffle_from)
    way = "on the plan" if path else "vanilla" if ways.exchange == "all-to-all" else ways.exchange
    name = f"attention-{topology.attention.upper()}, {way}"
    return Configuration(name=name, plan=plan, exchange=ways.exchange)


def _encode_given(texts: list[str], tokenizer: Any) -> tuple[list[list[int]], dict[str, Any]]:
    """Same as `_prompts` for given texts, which are never cut."""
    if not all(text for text in texts):
        raise ValueError("a prompt is empty")
    return tokenizer(texts)["input_ids"], {"cut_prompts": 0}


@command(TOOLS)
def demo(
    *,
    out: Annotated[Path | None, options.output("Keep trace, plans, measurements and the report here.")] = None,
    as_json: options.Json = False,
    settings: DemoSettings,
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
            result = run_demo(settings, Path(work), bars)
        if not as_json:
            _show_demo(result)
        page = _demo_report(Path(work), folder)
    found = f"report: {page}" if page else f"for all this as one page: {install_hint('report')}"
    console.tell(as_json, {**result, "report": page and str(page)}, found)
    if not all(row["identical"] for row in result["set_ups"]):
        raise typer.Exit(1)


def _show_demo(result: dict[str, Any]) -> None:
    tables.print_payoffs(result)
    title = f"Counted: {result['prompts']} held-out prompts, {result['settings']['ep_size']} processes"
    console.print_table(title, *tables.generated(result["set_ups"], with_speed=False))
    tables.print_gain(result["set_ups"])


def _demo_report(work: Path, folder: Path) -> Path | None:
    """Write the report on the demo's results in `work` and return its path; None without Jinja."""
    if importlib.util.find_spec("jinja2") is None:
        return None
    from semmoe.report.page import write

    return write(work, folder / "report.html", "semmoe demo").path
