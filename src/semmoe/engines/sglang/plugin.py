"""Entry point of `sglang.srt.plugins`: what SGLang calls in each of its processes before it starts."""

import functools
import os

from semmoe.core import Plan
from semmoe.engines.hooks import Replacement, cpu_patches
from semmoe.engines.sglang import targets
from semmoe.engines.sglang.settings import SglangSettings
from semmoe.engines.start import once, start


def register() -> None:
    """Hook SGLang if the environment says so; end the process with one line if anything does not fit."""
    start("SGLang", SglangSettings, _register)


def on_cpu() -> bool:
    return os.environ.get("SGLANG_USE_CPU_ENGINE") == "1"


def _register(settings: SglangSettings) -> None:
    if not (settings.plan or settings.control or on_cpu()):
        return
    from semmoe.engines.sglang.planned import PlannedRank
    from semmoe.engines.sglang.rank import RankPlugin
    from semmoe.engines.sglang.registry import install
    from semmoe.plan import load_plan

    rank: RankPlugin
    requests: list[Replacement] = []
    if settings.plan:
        plan = load_plan(settings.plan)
        rank = PlannedRank(plan, settings)
        requests = _scheduling(plan, settings) if settings.schedules(plan) else []
    else:
        rank = RankPlugin(settings)
    patches = cpu_patches("sglang").patch(rank.dispatch_comms) if on_cpu() else ()
    install([*rank.hooks(), *requests], patches)


def _scheduling(plan: Plan, settings: SglangSettings) -> list[Replacement]:
    """Hooks of the controller, which assigns requests."""
    from semmoe.engines.sglang.requests import RequestHook

    hook = once("controller", settings.folder, functools.partial(RequestHook, plan, settings.folder))
    return [
        (targets.SCHEDULE, lambda *call, **named: hook().dispatch(*call, **named)),
        (targets.CONTROL, lambda *call: hook().told(*call)),
    ]
