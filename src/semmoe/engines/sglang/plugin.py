"""Entry point of `sglang.srt.plugins`: what SGLang calls in each of its processes before it starts."""

import functools
import os

from semmoe.core import Plan
from semmoe.engines.hooks import Replacement, cpu_patches
from semmoe.engines.settings import PluginSettings
from semmoe.engines.sglang import targets
from semmoe.engines.start import hooked, once, start


def register() -> None:
    """Hook SGLang if the environment says so; end the process with one line if anything does not fit."""
    start("SGLang", PluginSettings, _register)


def on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _register(settings: PluginSettings) -> None:
    if not (settings.plan or settings.control or on_cpu()):
        return
    from semmoe.engines.sglang.planned import PlannedRank
    from semmoe.engines.sglang.rank import RankPlugin
    from semmoe.engines.sglang.registry import install

    rank, hooks = hooked(settings, RankPlugin, PlannedRank, _scheduling)
    patches = cpu_patches("sglang").patch(rank.dispatch_comms) if on_cpu() else ()
    install(hooks, patches)


def _scheduling(plan: Plan, settings: PluginSettings) -> list[Replacement]:
    """Hooks of the controller, which assigns requests."""
    from semmoe.engines.sglang.requests import RequestHook

    hook = once("controller", settings.folder, functools.partial(RequestHook, plan, settings.folder))
    return [
        (targets.SCHEDULE, lambda *call, **named: hook().dispatch(*call, **named)),
        (targets.CONTROL, lambda *call: hook().told(*call)),
    ]
