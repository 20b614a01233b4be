"""A plug-in that lets an engine fork its processes where it would spawn them, so that none imports the engine again.

`fork_from_one` does the same for an engine in a process of tests, which has a state of its own that no rank may have.
"""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import context, forkserver


class Forked(context.ForkServerProcess):
    """Forked from one process that has imported the engine, with the variables of the process that starts it."""

    @staticmethod
    def _Popen(process):  # noqa: N802
        process._target, process._args = _begin, (dict(os.environ), process._target, process._args)
        return context.ForkServerProcess._Popen(process)


class FromOne(context.ForkServerContext):
    Process = Forked


def register() -> None:
    if not isinstance(context._concrete_contexts["spawn"], FromOne):
        context._concrete_contexts["spawn"] = context._concrete_contexts["fork"]
        os.register_at_fork(after_in_child=_publish_anew)


def fork_from_one(*modules: str) -> None:
    """Processes that this one starts from now on are forked from a new one that has imported `modules`."""
    forkserver._forkserver._stop()
    made = FromOne()
    made.set_forkserver_preload(list(modules))
    context._concrete_contexts["spawn"] = made


def end_forked(*asked, **named) -> None:
    """All that were forked, but not the process that they are forked from, which the engine would end with them."""
    import psutil

    pid = forkserver._forkserver._forkserver_pid
    for process in psutil.Process(pid).children(recursive=True) if pid else ():
        process.kill()


def _begin(variables: dict[str, str], target: Callable[..., None], args: tuple, **named) -> None:
    os.environ.clear()
    os.environ.update(variables)
    _publish_anew()
    register()
    multiprocessing.set_start_method("spawn", force=True)
    target(*args, **named)


def _publish_anew() -> None:
    """prometheus_client decides when it is imported whether a process publishes for others."""
    from prometheus_client import values

    values.ValueClass = values.get_value_class()
