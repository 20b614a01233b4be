"""Commands that run a model: profile, generate, demo."""

import importlib
import json
import tempfile
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from semmoe import console, tables
from semmoe.checkpoint.directory import read_config
from semmoe.cli.app import OFFLINE, TOOLS, app, install_hint, refuse_given
from semmoe.cli.form import takes
from semmoe.cli.options import (
    INPUT,
    METHOD,
    OUTPUT,
    Dataset,
    Force,
    GivenTopology,
    Json,
    ModelArgument,
    TraceOut,
    check_installed,
    check_result,
    option,
    ranks_at_hand,
    resolve_topology,
    tell_result,
)
from semmoe.core import Plan
from semmoe.dataset import LeftOut, check_token_ids, digest, encode_usable, is_running_text, read_prompts
from semmoe.demo import run_demo
from semmoe.files import atomic_file, check_output
from semmoe.prompts import Prompt
from semmoe.results import GenerateFile
from semmoe.settings import DemoSettings, ExchangeSettings, GenerateSettings, ProfileSettings, PromptSettings
from semmoe.texts import held_out_prompts
from semmoe.trace import TraceHeader, TraceWriter

if TYPE_CHECKING:
    from semmoe.engines.transformers.generate import Configuration


class Engine(str, Enum):
    transformers = "transformers"
    sglang = "sglang"
    vllm = "vllm"


@app.command(rich_help_panel=OFFLINE, context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
@takes(settings=ProfileSettings)
def profile(
    ctx: typer.Context,
    model: ModelArgument,
    out: TraceOut,
    dataset: Dataset = None,
    settings: Any = None,
    engine: Annotated[
        Engine, option(INPUT, "sglang, vllm: its offline engine; options after `--` go to it.")
    ] = Engine.transformers,
    as_json: Json = False,
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
        check_installed(engine.value)
    elif ctx.args:
        raise ValueError(f"{ctx.args[0]}: transformers has no such option")
    identity = fingerprint_of(model)  # refuses a model before its tokenizer is asked
    prompts, _, counts = _prompts(model, dataset, asked)
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


def _recorder(engine: Engine, model: str, top_k: int, options: list[str]) -> Callable[..., None]:
    """The function that records prompts with the embedded engine, or with another engine's offline mode."""
    if engine is Engine.transformers:
        from semmoe.engines.transformers.model import load_model
        from semmoe.engines.transformers.recorder import record_prompts

        return partial(record_prompts, load_model(model))
    profiling = importlib.import_module(f"semmoe.engines.{engine.value}.profile")
    return partial(profiling.profile, model, top_k=top_k, options=options)


def _prompts(model: str, dataset: Path | None, asked: PromptSettings) -> tuple[list[list[int]], Any, dict[str, Any]]:
    """Return the prompts' token ids, the tokenizer, and counts of what is cut or left out, which are also printed."""
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    tokenizer, most = load_tokenizer(model), asked.max_prompt_tokens
    texts = [] if dataset else held_out_prompts(per_domain=40)
    left_out = LeftOut(dataset or Path("held-out texts"), asked.strict, records=len(texts))
    prompts = read_prompts(dataset, left_out) if dataset else (Prompt(text=text) for _, _, text in texts)
    usable = encode_usable(prompts, tokenizer, read_config(Path(model)), left_out)
    encoded = [ids[: most + 1] for ids in islice(usable, asked.limit or None)]
    left_out.check()
    _warn_of(left_out)
    if dataset is not None and is_running_text(dataset):
        text = f"{dataset} is read as running text: prompts used: {len(encoded)}; for one prompt per line give jsonl"
        console.err.print(text, markup=False, soft_wrap=True)
    cut = sum(len(ids) > most for ids in encoded)
    if cut:
        text = f"{cut} of {len(encoded)} prompts are cut to --max-prompt-tokens {most}"
        console.err.print(text, soft_wrap=True)
    return [ids[:most] for ids in encoded], tokenizer, {"cut_prompts": cut, **left_out.counts()}


def _warn_of(left_out: LeftOut) -> None:
    if left_out.reasons:
        console.warn(f"{left_out.path}: {left_out}")


@app.command(rich_help_panel=TOOLS)
@takes(topology=GivenTopology, exchange=ExchangeSettings, inputs=PromptSettings, settings=GenerateSettings)
def generate(
    ctx: typer.Context,
    model: ModelArgument,
    plan: Annotated[Path | None, option(METHOD, "Run on this plan; without it, vanilla.")] = None,
    topology: Any = None,
    exchange: Any = None,
    dataset: Dataset = None,
    prompt: Annotated[list[str] | None, option(INPUT, "A prompt; may be given several times.")] = None,
    inputs: Any = None,
    settings: Any = None,
    verify: Annotated[bool, option(OUTPUT, "Compare every token with plain transformers.")] = False,
    out: Annotated[
        Path | None, option(OUTPUT, "Write prompts and completions as jsonl, and the result beside them.")
    ] = None,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Generate greedily with expert parallelism, each rank a process that holds its own experts only.

    With --verify the exit code is 1 if a token differs.

    Example: `semmoe generate MODEL --plan plan --dataset prompts.jsonl --verify`
    """
    for path in (out, out and _beside(out)):
        check_result(path, force, (model, plan, dataset))
    if prompt:
        refuse_given(ctx, ["dataset", "limit", "max_prompt_tokens", "strict"], "each --prompt is taken whole")
    chosen, cuts, asked = _plan_to_run(model, plan, topology()), inputs(), settings()
    prompts, tokenizer, counts = _encode_given(model, prompt) if prompt else _prompts(model, dataset, cuts)
    result, agreement = _run(model, prompts, _configuration(chosen, plan, exchange()), asked, verify)
    completions = tokenizer.batch_decode(result.outputs)
    row = _row(result, agreement, plan) | counts
    if out is not None:
        _write_completions(out, tokenizer.batch_decode(prompts), completions)
    if not tell_result(GenerateFile, {**row, "completions": completions}, out and _beside(out), as_json):
        _show(row, len(prompts), chosen.topology.ep_size, zip(prompt or [], completions, strict=False))
    if agreement is not None and not agreement.holds:
        raise typer.Exit(1)


def _configuration(plan: Plan, path: Path | None, ways: ExchangeSettings) -> "Configuration":
    from semmoe.engines.transformers.generate import Configuration

    if ways.shuffle_from and (path is None or not plan.tokens.by_tables):
        raise ValueError("--shuffle-from has no effect: only a plan for attention tp or hybrid shuffles tokens")
    plan = replace(plan, shuffle_from=ways.shuffle_from or plan.shuffle_from)
    way = "on the plan" if path else "vanilla" if ways.exchange == "all-to-all" else ways.exchange
    name = f"attention-{plan.topology.attention.upper()}, {way}"
    return Configuration(name=name, plan=plan, exchange=ways.exchange)


def _run(
    model: str, prompts: list[list[int]], configuration: "Configuration", settings: GenerateSettings, verify: bool
) -> tuple[Any, Any]:
    """What the ranks generated, and its agreement with plain transformers, None if that was not requested."""
    from semmoe.engines.transformers.generate import generate as run

    with console.bars() as bars:
        advance = bars.task(f"generating on {configuration.plan.topology.ep_size} processes", len(prompts))
        result = run(model, prompts, [configuration], settings, lambda name, done: advance(done))[0]
        agreement = _hold_against_plain(model, prompts, result.outputs, settings, bars) if verify else None
    return result, agreement


def _row(result: Any, agreement: Any, plan: Path | None) -> dict[str, Any]:
    from semmoe.checkpoint.relabel import plan_digest

    return {
        **result.figures(),
        "identical": agreement.holds if agreement else None,
        "identical_text": str(agreement) if agreement else "not verified",
        "plan_hash": plan_digest(plan) if plan else None,
    }


def _show(row: dict[str, Any], requests: int, ranks: int, answers: Iterable[tuple[str, str]]) -> None:
    console.print_table(f"{requests} requests, {ranks} processes", *tables.generated([row]))
    tables.print_times(row)
    for given, text in answers:
        console.out.print(f"{given}{text}\n", markup=False)


def _beside(out: Path) -> Path:
    """The path of the result file next to the completions file `out`."""
    return out.with_suffix(".json" if out.suffix != ".json" else ".result.json")


def _plan_to_run(model: str, path: Path | None, given: GivenTopology) -> Plan:
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.placement.linear import vanilla_plan
    from semmoe.plan import load_plan

    identity = fingerprint_of(model)
    plan = None if path is None else load_plan(path)
    if plan is not None:
        plan.check(identity)
    topology = resolve_topology(plan, given, ranks_at_hand())
    return plan or vanilla_plan(identity, topology)


def _encode_given(model: str, texts: list[str]) -> tuple[list[list[int]], Any, dict[str, Any]]:
    """Same as `_prompts` for given texts, which are never cut."""
    from semmoe.engines.transformers.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(model)
    if not all(text for text in texts):
        raise ValueError("a prompt is empty")
    return tokenizer(texts)["input_ids"], tokenizer, {"cut_prompts": 0}


def _hold_against_plain(model: str, prompts: Any, outputs: Any, settings: GenerateSettings, bars: Any) -> Any:
    from semmoe.engines.transformers import verify
    from semmoe.engines.transformers.model import load_model

    plain = load_model(model)
    advance = bars.task("verifying with plain transformers", len(prompts))
    reference = verify.plain_generate(plain, prompts, settings, advance)
    return verify.compare_outputs(plain, prompts, reference, outputs)


def _write_completions(path: Path, prompts: list[str], completions: list[str]) -> None:
    with atomic_file(path) as staged, staged.open("w", encoding="utf-8") as file:
        for prompt, completion in zip(prompts, completions, strict=True):
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")


@app.command(rich_help_panel=TOOLS)
@takes(settings=DemoSettings)
def demo(
    dataset: Dataset = None,
    out: Annotated[Path | None, option(OUTPUT, "Keep trace, plans, measurements and the report here.")] = None,
    as_json: Json = False,
    settings: Any = None,
) -> None:
    """Run all steps on the embedded model: profile, solve, generate in five ways, and where a plan pays.

    It takes about two minutes. Without --dataset the prompts are texts of the standard library that the model never
    saw. The page is semmoe-demo/report.html, or DIR/report.html with --out DIR.

    Example: `semmoe demo --out out`
    """
    asked: DemoSettings = settings()
    left_out = LeftOut(dataset or Path("held-out texts"), asked.strict)
    folder = out or Path("semmoe-demo")
    check_output(folder, directory=True, force=True, inputs=(dataset,))
    if any((folder / name).exists() for name in ("plan.json", "trace.json")):
        raise ValueError(f"{folder} is a plan or a trace: choose another directory")
    kept = nullcontext(out) if out else tempfile.TemporaryDirectory(prefix="semmoe-demo-")
    with kept as work:
        with console.bars() as bars:
            result = run_demo(asked, Path(work), bars, dataset, left_out)
        _warn_of(left_out)
        if not as_json:
            _show_demo(result, f"{result['prompts']} {'given' if dataset else 'held-out'} prompts")
        page = _demo_report(Path(work), folder)
    found = f"report: {page}" if page else f"for all this as one page: {install_hint('report')}"
    console.tell(as_json, {**result, **left_out.counts(), "report": page and str(page)}, found)
    if not all(row["identical"] for row in result["set_ups"]):
        raise typer.Exit(1)


def _show_demo(result: dict[str, Any], prompts: str) -> None:
    rows, ranks = result["set_ups"], result["settings"]["ep_size"]
    console.print_table(f"{prompts}, {ranks} processes", *tables.generated(rows, with_speed=False))
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
