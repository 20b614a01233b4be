"""SGLang's offline engine for the tests, with or without a plan, in processes forked from one that has imported it."""

import functools
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from serving import FORKED as PLUGIN
from serving import NEW_TOKENS, free_port

from semmoe.engines.launch import command_line
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import launch
from semmoe.plan import load_plan
from semmoe.topology import Topology

Out = TypeVar("Out")


class Offline:
    """A running engine."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def complete(self, prompts: list[list[int]], max_new_tokens: int, **more: Any) -> list[list[int]]:
        """The new tokens of greedy completions."""
        sampling = {"temperature": 0, "max_new_tokens": max_new_tokens}
        answers = self.engine.generate(input_ids=prompts, sampling_params=sampling, **more)
        return [answer["output_ids"] for answer in answers]


SECONDS = 600
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(["sglang.srt.entrypoints.engine", "sglang.srt.managers.scheduler"])
LIMITS = ["--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16", "--chunked-prefill-size",
          "128", "--mem-fraction-static", "0.5"]  # fmt: skip


def completed(batches: list[list[list[int]]], *where: Any, **how: Any) -> list[list[int]]:
    """Tokens of every prompt, batch after batch, of an engine as `on_engine` starts it."""
    return on_engine(functools.partial(_complete, batches), *where, **how)


def completed_with_images(
    prompts: list[list[int]], asked: list[list[int]], images: list[str], *where: Any, **how: Any
) -> list[list[int]]:
    """Tokens of every prompt, and of every one in `asked`, each with one of the images."""
    return on_engine(functools.partial(_complete_with_images, prompts, asked, images), *where, **how)


def on_engine(
    work: Callable[[Offline], Out], model: str, topology: Topology, folder: Path, plan: str = "",
    options: tuple[str, ...] = (), fresh: bool = False, spoil: Callable[[], None] | None = None, **settings: str,
) -> Out:  # fmt: skip
    """What `work`, which can be pickled, returns for an engine.

    The engine has an all-to-all over gloo, by default in all passes; counters, `semmoe record` and what its processes
    say, in log.txt, are in `folder`. fresh: it imports SGLang by itself, which looks for `deep_ep` at its import.
    spoil: called in the process from which the engine's are forked.
    """
    os.makedirs(folder, mode=0o700, exist_ok=True)
    log = folder / "log.txt"
    log.touch()
    context = multiprocessing.get_context("spawn") if fresh else FORKED
    here, there = context.Pipe()
    options = ("--port", str(free_port()), *options)  # the first of several that it takes
    opened = functools.partial(_engine, model, topology, folder, plan, options, settings, spoil)
    process = context.Process(target=_run, args=(there, work, opened, log, dict(os.environ)))
    process.start()
    there.close()
    try:
        out, error = here.recv() if here.poll(SECONDS) else (None, "no answer")
    except EOFError:
        out, error = None, "the engine ended"
    process.join(30)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    assert not error, f"{error}\n{log.read_text(errors='replace')[-4000:]}"
    return out


def _run(pipe: Any, work: Callable[[Offline], Any], opened: Any, log: Path, variables: dict[str, str]) -> None:
    os.setsid()
    os.environ.clear()
    os.environ.update(variables)
    with log.open("ab") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    sys.path.append(str(PLUGIN))
    from semmoe_forked import register

    register()
    try:
        with opened() as engine:
            answer = work(engine), ""
    except Exception:
        answer = None, traceback.format_exc()
    pipe.send(answer)


@contextmanager
def _engine(
    model: str, topology: Topology, folder: Path, plan: str, options: tuple[str, ...], settings: dict[str, str],
    spoil: Callable[[], None] | None,
) -> Iterator[Offline]:  # fmt: skip
    given = PluginSettings(plan=plan, control=str(folder), **settings)
    location, redundant = None, 0
    if plan:
        made = load_plan(plan)
        location, redundant = launch.write_location(made, Path(model), folder), made.placement.redundant_experts
    words = [*command_line(launch.arguments(topology, location, redundant, on_cpu=True)), *LIMITS, *options]
    os.environ.update(launch.environment(given, topology, on_cpu=True))
    from sglang import Engine
    from sglang.srt.server_args import prepare_server_args

    if spoil:
        spoil()
    words = ["--model-path", model, "--random-seed", "0", "--log-level", "warning", *words]
    engine = Engine(server_args=prepare_server_args(words))
    try:
        yield Offline(engine)
    finally:
        engine.shutdown()


def _complete(batches: list[list[list[int]]], engine: Offline, **more: Any) -> list[list[int]]:
    tokens = [done for batch in batches for done in engine.complete(batch, NEW_TOKENS, **more)]
    time.sleep(2.5)  # counters are published once a second
    return tokens


def _complete_with_images(
    prompts: list[list[int]], asked: list[list[int]], images: list[str], engine: Offline
) -> list[list[int]]:
    return engine.complete(prompts, NEW_TOKENS) + _complete([asked], engine, image_data=images)
