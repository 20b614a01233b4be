"""Start a plug-in in a process of an engine. Engines log a plug-in's exceptions and serve without it, which would be a
setting silently ignored: here a plug-in that does not fit ends the process with one line.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from semmoe.core import Plan
from semmoe.engines.counters import Counters
from semmoe.engines.hooks import Replacement
from semmoe.engines.ownership import join
from semmoe.engines.settings import Settings, control_folder, from_environment
from semmoe.engines.supervisor import report

if TYPE_CHECKING:
    from semmoe.engines.host import Host

Hook = TypeVar("Hook")
Rank = TypeVar("Rank", bound="Host")


def start(engine: str, kind: type[Settings], register: Callable[[Settings], None]) -> None:
    """Read the plug-in's settings of type `kind` from the environment, and `register` its hooks with the engine."""
    folder = control_folder()
    try:
        settings = from_environment(kind)
        if folder is not None:
            join(folder)
        register(settings)
    except (ValueError, RuntimeError, OSError) as error:
        report(folder, str(error))
        print(f"semmoe: {error}; {engine} does not start", file=sys.stderr, flush=True)
        raise SystemExit(2) from None


def hooked(
    settings: Settings,
    vanilla: Callable[[Settings], Rank],
    planned: Callable[[Plan, Settings], Rank],
    scheduling: Callable[[Plan, Settings], list[Replacement]],
) -> tuple[Rank, list[Replacement]]:
    """The rank of this process, made by `vanilla` or `planned`, and the engine's places with what replaces them.

    scheduling: the replacements in the process that assigns requests, where the plan does that.
    """
    from semmoe.plan import load_plan

    if not settings.plan:
        rank = vanilla(settings)
        return rank, rank.hooks()
    plan = load_plan(settings.plan)
    rank = planned(plan, settings)
    return rank, [*rank.hooks(), *(scheduling(plan, settings) if settings.schedules(plan) else ())]


def once(process: str, folder: Path | None, make: Callable[[Counters], Hook]) -> Callable[[], Hook]:
    """Return a function that makes a hook with the counters of `process` when a process first calls it.

    Only the process that schedules requests calls it, though all of an engine's processes register its hooks.
    """

    @functools.cache
    def get() -> Hook:
        counters = Counters(process, folder)
        hook = make(counters)
        counters.start()
        return hook

    return get
