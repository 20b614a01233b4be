"""The command serve: print and run an engine's own server command on a plan."""

import importlib
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated

import typer

from semmoe.checkpoint.directory import read_config
from semmoe.cli import options
from semmoe.cli.app import PASSED_ON, SERVING, command
from semmoe.core import Plan
from semmoe.engines import ownership, supervisor, support
from semmoe.engines.launch import Asked
from semmoe.engines.settings import PLANS, PluginSettings
from semmoe.io import console
from semmoe.settings import ServeSettings
from semmoe.topology import Topology, physical_experts

FORGOTTEN = (
    "activity-*.json",
    "status-*.json",
    "control.json",
    "swap-*.json",
    "expert_location-*.json",
    "prometheus/*.db",  # from which vLLM's processes would continue to count
    supervisor.REASON,
)


@command(SERVING, context_settings=PASSED_ON)
def serve(
    *,
    ctx: typer.Context,
    model: options.ModelArgument,
    plan: Annotated[Path | None, options.method("Serve on this plan, of any method; without it, vanilla.")] = None,
    given: options.GivenTopology,
    asked: ServeSettings,
    host: Annotated[str, options.output("Address to listen on.")] = "127.0.0.1",
    control: Annotated[
        Path | None, options.output("Folder for counters and `semmoe record`; by default in ~/.local/state.")
    ] = None,
    dry_run: Annotated[bool, options.output("Print the command and stop.")] = False,
) -> None:
    """Serve a model with expert parallelism: print the engine's own command, then run it.

    Options after `--` are passed to the engine unchanged. The printed command can be run by itself.

    Example: `semmoe serve MODEL --engine sglang --plan plan -- --mem-fraction-static 0.8`
    """
    chosen = options.plan_for(model, plan) if plan else None
    topology = given.resolve(chosen, options.ranks_at_hand())
    _check(model, chosen, topology, asked, ctx.args)
    folder = (control or options.default_folder(asked.port)).resolve()
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # the printed command needs it too
    folder.chmod(0o700)
    plugin = PluginSettings(
        plan=str(plan.resolve()) if plan else "",
        schedule=asked.schedule,
        shuffle=asked.shuffle,
        shuffle_from=str(asked.shuffle_from or ""),
        control=str(folder),
        untried="1" if asked.untried else "",
    )
    launch = importlib.import_module(f"semmoe.engines.{asked.engine}.launch")
    if not dry_run:
        options.check_installed(asked.engine)
        held = ownership.claim(folder)
        _forget(folder)
        ownership.share(held)
    server = Asked(model=model, topology=topology, settings=plugin, host=host, port=asked.port, options=ctx.args)
    variables, words = launch.planned(server, chosen) if chosen else launch.vanilla(server)
    _announce(variables, words, folder)
    if dry_run:
        return
    _publish(folder, host, asked.port, ctx.args)
    code = supervisor.run([sys.executable, *words], {**os.environ, **variables})
    reason = supervisor.reported(folder)
    if reason is not None:
        raise ValueError(reason)
    raise typer.Exit(code)


def _publish(folder: Path, host: str, port: int, words: list[str]) -> None:
    """The counters of a node of vLLM without a front end, at the address that this would have. Raises ValueError."""
    sys.stdout.flush()
    if "--headless" not in words:
        return
    from prometheus_client import CollectorRegistry, start_http_server
    from prometheus_client.multiprocess import MultiProcessCollector

    registry = CollectorRegistry()
    MultiProcessCollector(registry, path=str(folder / "prometheus"))
    try:
        start_http_server(port, host, registry)
    except OSError as error:
        raise ValueError(f"counters cannot be published at {host}:{port}: {error}; give another --port") from None


def _check(model: str, plan: Plan | None, topology: Topology, asked: ServeSettings, words: list[str]) -> None:
    """Raise ValueError for what cannot be served, and warn of features that were never run."""
    from semmoe.engines.transformers.config import fingerprint_of

    shuffles, schedules = asked.shuffle != "off", asked.schedule == "plan"
    options.check_shuffle_from(asked.shuffle_from, plan, shuffles)
    if plan is None:
        # raises an error if sizes do not divide
        physical_experts(fingerprint_of(model).num_experts, 0, topology.ep_size)
        return
    config = read_config(Path(model))
    use = support.use_of(
        asked.engine, config, plan, shuffles=shuffles, schedules=schedules, options=words, untried=asked.untried
    )
    for caution in support.check(use):
        console.warn(caution)


def _forget(folder: Path) -> None:
    """Remove the state of an earlier server, so that counters start at zero and nothing is recorded."""
    for name in FORGOTTEN:
        for old in folder.glob(name):
            old.unlink()
    shutil.rmtree(folder / PLANS, ignore_errors=True)


def _announce(variables: dict[str, str], words: list[str], folder: Path) -> None:
    console.err.print("[bold]environment[/]")
    for name, value in variables.items():
        console.err.print(f"  {name}={shlex.quote(value)}", markup=False)
    console.err.print("[bold]command[/]")
    console.say(shlex.join(["python", *words]))
    console.err.print(f"activity and `semmoe record` in {folder}", markup=False)
