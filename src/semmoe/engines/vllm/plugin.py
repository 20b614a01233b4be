"""Entry point of `vllm.general_plugins`: what vLLM calls in each of its processes before it starts."""

import functools
import logging
from typing import Any

from semmoe.core import Plan
from semmoe.engines.counters import Counters
from semmoe.engines.hooks import cpu_patches
from semmoe.engines.start import once, start
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
    from semmoe.engines.vllm.rank import RankPlugin
    from semmoe.engines.vllm.registry import add, around, prove
    from semmoe.plan import load_plan

    logging.getLogger("semmoe").parent = logging.getLogger("vllm")  # the root logger has no handler
    plan = load_plan(settings.plan) if settings.plan else None
    on_cpu = current_platform.is_cpu()
    rank = RankPlugin(plan, settings)
    schedules = settings.schedules(plan)
    prove(_needed(settings, plan, rank.splits_tokens, schedules, on_cpu))
    if on_cpu:
        cpu_patches("vllm").patch()
    rank.register(on_cpu)
    if settings.folder is not None:
        offer(rank, settings.folder)
    if schedules and plan is not None:
        made = once("frontend", settings.folder, functools.partial(_client, plan))
        add(targets.CLIENT, targets.PREPARE, lambda client, other: made().prepare(other))
        around(targets.SCHEDULE, lambda *call: made().choose(*call))
        around(targets.FINISHED, lambda *call: made().finished(*call))


def _needed(settings: VllmSettings, plan: Plan | None, splits: bool, schedules: bool, on_cpu: bool) -> list[Any]:
    hooks = list(targets.MODEL_HOOKS)
    hooks += targets.PLAN_HOOKS if plan is not None else ()
    hooks += targets.RECORD_HOOKS if settings.folder is not None else ()
    hooks += targets.SPLIT_HOOKS if splits else ()
    hooks += targets.REQUEST_HOOKS if schedules else ()
    return [*hooks, targets.LOAD_MODEL_CPU, *cpu_patches("vllm").HOOKS] if on_cpu else hooks


def _client(plan: Plan, counters: Counters) -> Any:
    from semmoe.engines.vllm.requests import RequestHook

    return RequestHook(plan, counters)
