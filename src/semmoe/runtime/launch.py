"""Start, watch and end local processes together, one process per rank."""

import contextlib
import logging
import multiprocessing
import os
import pickle
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from typing import Any

log = logging.getLogger(__name__)
Reporter = Callable[[str, int], None]  # (name of the task, how many more units are done)


def run_ranks(
    size: int,
    target: Callable[..., Any],
    job: Any,
    progress: Reporter,
    preload: Sequence[str] = (),
    prepare: Callable[[int], None] | None = None,
) -> list[Any]:
    """Run `target(rank, size, job, report)` in `size` processes; return what each returned, by rank.

    `report` in a rank calls `progress` in this process. The first failure ends every rank and raises ValueError if a
    rank raised one, else RuntimeError naming the rank. preload: modules imported once, before ranks are forked.
    prepare: called first in a rank's process with its number, for example to join a network or to choose cores.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*preload])
    messages = context.SimpleQueue()
    arguments = [(target, rank, size, job, messages, prepare) for rank in range(size)]
    ranks = [context.Process(target=_run, args=own, daemon=True) for own in arguments]
    started: list[Any] = []
    try:
        for process in ranks:
            process.start()
            started.append(process)
        return _watch(ranks, messages, progress)
    except KeyboardInterrupt:
        _end_forkserver()
        raise
    finally:
        for process in started:
            process.kill()  # all together: a rank that outlives another would only report a broken connection
        for process in started:
            process.join()


def _end_forkserver() -> None:
    """Kill the process that forks ranks, which may still be importing and would then fork an orphaned rank."""
    server: Any = forkserver._forkserver
    if server._forkserver_pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(server._forkserver_pid, signal.SIGKILL)
        server._stop()


def _run(target: Callable[..., Any], rank: int, size: int, job: Any, messages: Any, prepare: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    try:
        if prepare is not None:
            prepare(rank)
        result = target(rank, size, job, lambda what, done: messages.put(("progress", what, done)))
        # as bytes: tensors in a message would be shared with a process that has ended when they are read
        messages.put(("done", pickle.dumps(result), rank))
    except ValueError as error:
        messages.put(("invalid", str(error), rank))
    except Exception as error:
        messages.put(("failed", f"{type(error).__name__}: {error}\n{traceback.format_exc()}", rank))


def _watch(ranks: list[Any], messages: Any, progress: Reporter) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(ranks):
        died = [r for r, process in enumerate(ranks) if process.exitcode not in (None, 0)]
        if messages.empty():
            if died:
                raise RuntimeError(f"rank {died[0]} ended with exit code {ranks[died[0]].exitcode}")
            time.sleep(0.02)
            continue
        kind, content, value = messages.get()
        if kind == "progress":
            progress(content, value)
        elif kind == "invalid":
            raise ValueError(content)
        elif kind == "failed":
            summary, details = content.split("\n", 1)
            log.error("rank %d: %s", value, details)
            raise RuntimeError(f"rank {value} failed: {summary}")
        else:
            results[value] = pickle.loads(content)
    return [results[rank] for rank in range(len(ranks))]
