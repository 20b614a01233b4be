"""The command serve: print and run an engine's own server command on a plan."""

import importlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from semmoe import console
from semmoe.checkpoint.directory import read_config
from semmoe.cli.app import SERVING, app
from semmoe.cli.form import takes
from semmoe.cli.options import (
    INPUT,
    METHOD,
    OUTPUT,
    GivenTopology,
    ModelArgument,
    Server,
    check_installed,
    default_folder,
    ranks_at_hand,
    resolve_topology,
)
from semmoe.core import Plan
from semmoe.engines import ownership, supervisor, support
from semmoe.engines.settings import PLANS, PluginSettings
from semmoe.settings import ServeSettings
from semmoe.topology import Topology, physical_experts


@app.command(rich_help_panel=SERVING, context_settings={"allow_extra_args": True, "ignore_unknown_options": False})
@takes(given=GivenTopology, settings=ServeSettings)
def serve(
    ctx: typer.Context,
    model: ModelArgument,
    engine: Annotated[Server, typer.Option(help="The engine that serves.", rich_help_panel=INPUT)] = Server.sglang,
    plan: Annotated[
        Path | None,
        typer.Option(help="Serve on this plan, of any method; without it, vanilla.", rich_help_panel=METHOD),
    ] = None,
    given: Any = None,
    settings: Any = None,
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=OUTPUT)] = "127.0.0.1",
    control: Annotated[
        Path | None,
        typer.Option(
            help="Folder for counters and `semmoe record`; by default in ~/.local/state.",
            rich_help_panel=OUTPUT,
            show_default=False,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option(help="Print the command and stop.", rich_help_panel=OUTPUT)] = False,
) -> None:
    """Serve a model with expert parallelism: print the engine's own command, then run it.

    Options after `--` are passed to the engine unchanged. The printed command can be run by itself.

    Example: `semmoe serve MODEL --engine sglang --plan plan -- --mem-fraction-static 0.8`
    """
    asked: ServeSettings = settings()
    chosen = _load(model, plan) if plan else None
    topology = resolve_topology(chosen, given(), ranks_at_hand())
    _check(model, engine.value, chosen, topology, asked, ctx.args)
    folder = _own_folder(control or default_folder(asked.port))  # the printed command needs it too
    plugin = _plugin_settings(plan, asked, folder)
    launch = importlib.import_module(f"semmoe.engines.{engine.value}.launch")
    if not dry_run:
        check_installed(engine.value)
        held = ownership.claim(folder)
        _forget(folder)
        ownership.share(held)
    variables, words = launch.server(model, chosen, topology, plugin, host, asked.port, ctx.args)
    _announce(variables, words, folder)
    if dry_run:
        return
    _publish(folder, host, asked.port, ctx.args)
    code = supervisor.run([sys.executable, *words], {**os.environ, **variables})
    reason = supervisor.reported(folder)
    if reason is not None:
        raise ValueError(reason)
    raise typer.Exit(code)


def _publish(folder: Path, host: str, port: int, options: list[str]) -> None:
    """The counters of a node of vLLM without a front end, at the address that this would have. Raises ValueError."""
    sys.stdout.flush()
    if "--headless" not in options:
        return
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder / "prometheus"))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"counters cannot be published at {host}:{port}: {error}; give another --port") from None


def _check(
    model: str, engine: str, plan: Plan | None, topology: Topology, asked: ServeSettings, options: list[str]
) -> None:
    """Raise ValueError for what cannot be served, and warn of features that were never run."""
    from semmoe.engines.transformers.config import fingerprint_of

    if asked.window_ms and (plan is None or asked.schedule != "plan" or not plan.requests.by_tables):
        raise ValueError("--window-ms has no effect: requests are assigned only by a plan for attention dp or hybrid")
    shuffles = plan is not None and plan.tokens.by_tables and asked.shuffle != "off"
    if asked.shuffle_from and not shuffles:
        raise ValueError("--shuffle-from has no effect: only a plan for attention tp or hybrid shuffles tokens")
    if plan is None:
        # raises an error if sizes do not divide
        physical_experts(fingerprint_of(model).num_experts, 0, topology.ep_size)
        return
    shuffles, schedules = asked.shuffle != "off", asked.schedule == "plan"
    config = read_config(Path(model))
    use = support.use_of(engine, config, plan, shuffles=shuffles, schedules=schedules, options=options)
    for caution in support.check(use):
        console.warn(caution)


def _plugin_settings(plan: Path | None, asked: ServeSettings, folder: Path) -> PluginSettings:
    where = str(plan.resolve()) if plan else ""
    wait = f"{asked.window_ms:g}" if asked.window_ms else ""
    return PluginSettings(
        plan=where,
        schedule=asked.schedule,
        shuffle=asked.shuffle,
        shuffle_from=str(asked.shuffle_from or ""),
        window_ms=wait,
        control=str(folder),
    )


def _load(model: str, path: Path) -> Plan:
    from semmoe.engines.transformers.config import fingerprint_of
    from semmoe.plan import load_plan

    plan = load_plan(path)
    plan.check(fingerprint_of(model))
    return plan


def _own_folder(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    return folder.resolve()


def _forget(folder: Path) -> None:
    """Remove the state of an earlier server, so that counters start at zero and nothing is recorded."""
    names = ("activity-*.json", "status-*.json", "control.json", "swap-*.json", "expert_location-*.json")
    for old in (path for name in (*names, supervisor.REASON) for path in folder.glob(name)):
        old.unlink()
    shutil.rmtree(folder / PLANS, ignore_errors=True)
    for old in (folder / "prometheus").glob("*.db"):  # from which vLLM's processes would continue to count
        old.unlink()


def _announce(variables: dict[str, str], words: list[str], folder: Path) -> None:
    console.err.print("[bold]environment[/]")
    for name, value in variables.items():
        console.err.print(f"  {name}={shlex.quote(value)}", markup=False)
    console.err.print("[bold]command[/]")
    console.out.print(shlex.join(["python", *words]), markup=False)
    console.err.print(f"activity and `semmoe record` in {folder}", markup=False)
