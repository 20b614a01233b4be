"""Solve a plan for recorded requests, in a process of its own that stands back behind the server, within a time.

The oldest requests are for solving, from the plan that is served; the newest are for scoring plans. Where traffic comes
back, a plan that served before is there at once: the best of these is taken if it gains enough and takes no longer, and
else a new one is solved, which goes to the job's folder.
"""

import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from semmoe.adapt.decide import Score, too_little
from semmoe.calibration import Links, load_links
from semmoe.core import Plan, RoutingTrace
from semmoe.cost import LayerShape, predict
from semmoe.online import schedule_live
from semmoe.plan import load_plan, save_plan
from semmoe.replayer import replay
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.trace import open_trace

STREAM = 1000  # requests that are replayed
PARTS = 8  # of the requests, scored one by one too
RUNNING = 8  # of them on each rank at a time: with few, ranks are kept even and plans differ less
LEAST_REQUESTS = 20  # that are solved on, and that are scored


@dataclass(frozen=True, kw_only=True)
class Job:
    """What to solve."""

    trace: Path
    plan: Path  # that is served
    folder: Path  # for new plans
    seconds: float  # for the search
    judged: float  # share of requests, the newest, that are for scoring
    links: str  # a file or a shipped name; "" for the shipped default
    older: int  # the first requests of the trace, which do not count
    kept: Sequence[Path]  # plans that served before
    least_gain: float  # by which one of them must be better: a share of its own gain over an even spread


@dataclass(frozen=True, kw_only=True)
class Found:
    """The plan to weigh against the one that serves, and what both do."""

    path: Path
    old: Score
    new: Score
    core: float = 1.0  # what the solver had of one: seconds of computing per second that passed


class Solver:
    """Solves in a process that stays, so that what it imports and compiles is there for the next job too."""

    def __init__(self, nice: int = 0) -> None:
        self._begin = partial(multiprocessing.get_context("spawn").Pool, 1, _stand_back, (nice,))
        self._pool = self._begin()

    def __call__(self, job: Job, seconds: float) -> Found:
        """Raises RuntimeError if it fails or takes longer."""
        try:
            return self._pool.apply_async(find, (job,)).get(seconds)
        except multiprocessing.TimeoutError:
            self.close()
            self._pool = self._begin()
            raise RuntimeError(f"no plan was found within {seconds:g} s") from None
        except Exception as error:
            raise RuntimeError(str(error) or repr(error)) from error

    def close(self) -> None:
        self._pool.terminate()


def _stand_back(nice: int) -> None:
    os.nice(nice)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loop ends this process


def find(job: Job) -> Found:
    """Take a plan that served before, or solve one; score it and the one that serves."""
    began, computed = time.monotonic(), time.process_time()
    trace, old = open_trace(job.trace), load_plan(job.plan)
    seen, newest = by_age(trace.select(np.arange(job.older, trace.num_requests)), job.judged)
    links = load_links(job.links or default_links(old), old.topology)
    before = score(newest, old, links)
    scores = {path: score(newest, load_plan(path), links) for path in job.kept}
    no_longer = [path for path in scores if scores[path].seconds_per_token <= before.seconds_per_token]
    best = max(no_longer, key=lambda path: scores[path].lar, default=None)
    if best is None or too_little(before, scores[best], job.least_gain):
        scores |= {path: score(newest, load_plan(path), links) for path in _solve(job, seen, old)}
        best = max(
            scores, key=lambda path: (scores[path].seconds_per_token <= before.seconds_per_token, scores[path].lar)
        )
    core = (time.process_time() - computed) / (time.monotonic() - began)
    return Found(path=best, old=before, new=scores[best], core=core)


def _solve(job: Job, seen: RoutingTrace, old: Plan) -> list[Path]:
    """Plans from the one that is served, which moves few experts, and from nothing, which may be far from it."""
    settings, paths = SolveSettings(redundant_experts=old.placement.redundant_experts), []
    settings = replace(settings, cocluster=replace(settings.cocluster, budget=job.seconds))
    for name, previous in (("plan", old), ("afresh", None)):
        paths.append(job.folder / name)
        save_plan(solve(seen, old.topology, settings, previous=previous), paths[-1])
    return paths


def by_age(trace: RoutingTrace, judged: float) -> tuple[RoutingTrace, RoutingTrace]:
    """The oldest requests, and the newest share `judged`; requests are in order of their ends.

    Raises ValueError if either has too few.
    """
    count = round(trace.num_requests * (1 - judged))
    if min(count, trace.num_requests - count) < LEAST_REQUESTS:
        raise ValueError(f"{trace.num_requests} requests were recorded, too few to solve on some and score on others")
    requests = np.arange(trace.num_requests)
    return trace.select(requests[:count]), trace.select(requests[count:])


def default_links(plan: Plan) -> str:
    return "h200-nvlink" if plan.topology.num_nodes == 1 else "h200-400g"


def score(trace: RoutingTrace, plan: Plan, links: Links) -> Score:
    """What a plan does for a stream of a trace's requests, which come again and again, each time in another order.

    Their order in the trace is none of arrival: what ranks recorded is joined in turns, so that requests alternate that
    the plan which served had sent to one rank and to another, as this plan would wish. For few requests the bound on a
    group's lead is loose: a plan could send all of them to the group that suits them.
    """
    rng, times = np.random.default_rng(0), -(-STREAM // trace.num_requests)
    again = np.concatenate([rng.permutation(trace.num_requests) for _ in range(times)])
    stream, f = trace.select(again), trace.fingerprint
    groups = schedule_live(stream, plan, RUNNING * plan.topology.dp_size)
    found, parts = replay(stream, plan, ReplaySettings(), groups), []
    for part in range(PARTS):
        chosen = np.flatnonzero(again % PARTS == part)
        parts.append(replay(stream.select(chosen), plan, ReplaySettings(), groups[chosen]).total.lar)
    time = 0.0
    if f.hidden_size and f.expert_size:
        shape = LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)
        rows = found.rows_per_batch(links.all_to_all)
        time = predict(plan.method, rows, found.busiest_pairs, shape, plan.topology, links).time.total
    even = 1 / plan.topology.ep_size
    return Score(lar=found.total.lar, even=even, parts=tuple(parts), seconds_per_token=time / found.tokens_per_batch)
