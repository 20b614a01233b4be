"""The command init: a configuration file and the commands for a deployment that runs already."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.cli.app import TOOLS, app
from semmoe.cli.options import INPUT, OUTPUT, Force, Json, ModelArgument, default_folder


@app.command(rich_help_panel=TOOLS, context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
def init(
    ctx: typer.Context,
    model: ModelArgument,
    out: Annotated[Path, typer.Option(help="The configuration file.", rich_help_panel=OUTPUT)] = Path("semmoe.toml"),
    redundant_experts: Annotated[
        int,
        typer.Option(min=0, max=1 << 20, help="Redundant experts, if the engine has none yet.", rich_help_panel=INPUT),
    ] = 0,
    force: Force = False,
    as_json: Json = False,
) -> None:
    """Read the command line by which an engine serves today, and write how semmoe joins it.

    The engine's own command follows `--`. Only the model's configuration is read, no weights. The file holds the
    options of this deployment for `semmoe --config`; the commands that record, solve and serve are printed, and what
    semmoe does not support of it is said, with exit code 1.

    Example: `semmoe init MODEL -- vllm serve MODEL --tensor-parallel-size 1 --data-parallel-size 8 --port 8000`
    """
    from semmoe.engines import deployment
    from semmoe.files import atomic_file, check_output

    check_output(out, force=force)
    found = deployment.read(ctx.args, redundant_experts)
    refused, untried = deployment.verdict(found, Path(model))
    commands = deployment.commands(found, model, out, default_folder(found.port))
    if not refused:
        with atomic_file(out) as staged:
            staged.write_text(deployment.config_file(found, model), encoding="utf-8")
    if as_json:
        told = {"refused": refused, "untried": untried, "commands": [] if refused else [words for _, words in commands]}
        console.print_json({"out": None if refused else str(out), **deployment.stated(found), **told})
    else:
        _tell(deployment.stated(found), out, refused, untried, commands)
    if refused:
        raise typer.Exit(1)


def _tell(
    stated: dict[str, Any], out: Path, refused: list[str], untried: list[str], commands: list[tuple[str, list[str]]]
) -> None:
    known = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in stated.items())
    console.out.print(known, markup=False)
    for text in refused:
        console.out.print(f"refused: {text}", markup=False)
    for text in untried:
        console.out.print(f"never run: {text}", markup=False)
    if refused:
        return
    console.out.print(f"{out}: written", markup=False)
    for what, words in commands:
        console.out.print(f"\n# {what}\n{shlex.join(words)}", markup=False)
