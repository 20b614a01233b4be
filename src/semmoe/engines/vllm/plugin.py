"""Entry point of `vllm.general_plugins`: what vLLM calls in each of its processes before it starts."""

import functools
import logging

from semmoe.core import Plan
from semmoe.engines.hooks import Replacement, cpu_patches
from semmoe.engines.start import hooked, once, start
from semmoe.engines.vllm import targets
from semmoe.engines.vllm.settings import VllmSettings


def register() -> None:
    """Hook vLLM if the environment says so; end the process with one line if anything does not fit."""
    start("vLLM", VllmSettings, _register)


def _register(settings: VllmSettings) -> None:
    if not (settings.plan or settings.control or settings.sequence_parallel):
        return
    from vllm.platforms import current_platform

    from semmoe.engines.vllm.live import offer
    from semmoe.engines.vllm.planned import PlannedRank
    from semmoe.engines.vllm.rank import RankPlugin
    from semmoe.engines.vllm.registry import install

    logging.getLogger("semmoe").parent = logging.getLogger("vllm")  # the root logger has no handler
    rank, hooks = hooked(settings, RankPlugin, PlannedRank, _scheduling)
    relied_on = [targets.ROUTE, targets.TO_PHYSICAL]
    patches = cpu_patches("vllm") if current_platform.is_cpu() else None
    install(hooks, [*relied_on, *(patches.HOOKS if patches else ())])
    if patches:
        patches.patch()
    if settings.folder is not None:
        offer(rank, settings.folder)


def _scheduling(plan: Plan, settings: VllmSettings) -> list[Replacement]:
    """Hooks of the front end, which assigns requests."""
    from semmoe.engines.vllm.registry import add
    from semmoe.engines.vllm.requests import RequestHook

    hook = once("frontend", settings.folder, functools.partial(RequestHook, plan))
    add(targets.CLIENT, targets.PREPARE, lambda client, other: hook().prepare(other))
    return [
        (targets.SCHEDULE, lambda *call: hook().choose(*call)),
        (targets.FINISHED, lambda *call: hook().finished(*call)),
    ]
