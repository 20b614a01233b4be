"""Entry point of `sglang.srt.plugins`: what SGLang calls in each of its processes before it starts."""

import functools
import os
from typing import Any

from semmoe.core import Plan
from semmoe.engines.counters import Counters
from semmoe.engines.hooks import cpu_patches
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
    from semmoe.engines.sglang.rank import RankPlugin
    from semmoe.engines.sglang.registry import around, prove
    from semmoe.plan import load_plan

    plan = load_plan(settings.plan) if settings.plan else None
    hooks = [*targets.MODEL_HOOKS, *(targets.PLAN_HOOKS if plan is not None else ())]
    rank = RankPlugin(plan, settings)
    if on_cpu():
        hooks += cpu_patches("sglang").patch(rank.dispatch_comms)
    rank.register()
    hooks += targets.RECORD_HOOKS if settings.folder is not None else ()
    if plan is not None and settings.schedules(plan):
        hook = once("controller", settings.folder, functools.partial(_controller, plan, settings))
        around(targets.SCHEDULE, lambda *call, **named: hook().dispatch(*call, **named))
        around(targets.CONTROL, lambda *call: hook().told(*call))
        hooks += targets.REQUEST_HOOKS
        if settings.window_seconds > 0:
            around(targets.EVENT_LOOP, lambda *call: hook().run(*call))
            hooks += targets.WINDOW_HOOKS
    if rank.shuffles:
        hooks += targets.SHUFFLE_HOOKS
    prove(hooks)


def _controller(plan: Plan, settings: SglangSettings, counters: Counters) -> Any:
    from semmoe.engines.sglang.requests import RequestHook

    return RequestHook(plan, counters, settings.window_seconds, settings.folder)
