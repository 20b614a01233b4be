"""The command doctor: check versions, hooks and a plan."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from semmoe.cli import options
from semmoe.cli.app import TOOLS, command
from semmoe.engines.doctor import ENGINES, EngineState, PlanState, examine, examine_plan, supported, versions
from semmoe.io import console
from semmoe.io.bounds import choice


@dataclass(frozen=True, kw_only=True)
class Engine:
    engine: str | None = choice(None, ENGINES, panel="Input", help="Check only this engine, which must be installed.")


@command(TOOLS)
def doctor(
    *,
    given: Engine,
    plan: Annotated[Path | None, options.inputs("Show and check this plan.")] = None,
    model: Annotated[
        str | None,
        options.model("The model that the plan is to run on; without a plan, show what is supported of it."),
    ] = None,
    as_json: options.Json = False,
) -> None:
    """Show what is installed, whether semmoe's hooks fit it, and what a plan expects.

    Engines are imported, never started. The exit code is 1 if a hook does not resolve or the plan does not fit
    the model.

    Examples: `semmoe doctor`, `semmoe doctor --model MODEL` and
    `semmoe doctor --engine sglang --plan plan --model MODEL`
    """
    found = versions()
    chosen = ENGINES if given.engine is None else (given.engine,)
    wanted = examine_plan(plan, model, chosen) if plan else None
    uses = supported(Path(model), chosen) if model and not plan else []
    engines = [examine(name, found[name], needed=given.engine is not None) for name in chosen]
    problems = [text for state in engines for text in state.problems] + (wanted.problems if wanted else [])
    if as_json:
        states = {"engines": list(map(asdict, engines)), "plan": asdict(wanted) if wanted else None, "supported": uses}
        console.print_json({"versions": found, **states, "problems": problems})
    else:
        console.print_table("Installed", ["package", "version"], [[k, v or "not installed"] for k, v in found.items()])
        for state in engines:
            _print_engine(state)
        if wanted:
            _print_plan(wanted)
        if uses:
            _say(f"{model}, by its configuration:")
            for use in uses:
                _say(f"    {use['engine']}, {use['use']}: {use['state']}; {use['note']}")
        _say(f"problems: {len(problems)}" if problems else "no problem found")
    if problems:
        raise typer.Exit(1)


def _print_engine(state: EngineState) -> None:
    if state.version is None and not state.problems:
        return
    good = sum(hook.problem is None for hook in state.hooks)
    name = f"{state.engine} {state.version}" if state.version else state.engine
    _say(f"{name}: {state.note or f'{good} of {len(state.hooks)} hooks resolve'}")
    if state.tried:
        _say(f"    tried on {state.tried}, this is another version: compare its outputs with vanilla's first")
    for hook in state.hooks:
        _say(f"    FAIL  {hook.problem}" if hook.problem else f"    ok    {hook.target}: {hook.purpose}")


def _print_plan(state: PlanState) -> None:
    f, topology = state.fingerprint, ", ".join(f"{name} {value}" for name, value in state.topology.items())
    _say(f"{state.plan}: method {state.method}; {topology}; {state.redundant_experts} redundant experts")
    _say(
        f"    made for {f['model']}: {f['num_layers']} MoE layers, {f['num_experts']} experts, top-{f['top_k']}, "
        f"{f['vocab_size']} token ids; architecture {f['architecture_hash'][:12]}, "
        f"tokenizer {f['tokenizer_hash'][:12]}"
    )
    for engine, flags in state.launch.items():
        _say(f"    {engine}: {flags}")
    _say(f"    compared with the model: {state.checked}")
    for engine, texts in state.cautions.items():
        for text in texts:
            _say(f"    {engine}: {text}")
    for text in state.problems:
        _say(f"    FAIL  {text}")


def _say(text: str) -> None:
    """Print plain text, since names in plans and messages of engines may contain markup."""
    console.out.print(console.plain(text))
