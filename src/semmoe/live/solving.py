"""Solve plans for recorded requests in a separate process, at a low priority and within a time."""

import multiprocessing
import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from semmoe.core import Plan, RoutingTrace
from semmoe.evaluation.online import schedule_live
from semmoe.evaluation.replay import replay
from semmoe.plan import load_plan, save_plan
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.traces.trace import open_trace

NICE = 10  # how far the solver stands back behind the server where they share cores
GRACE_SECONDS = 60.0  # beyond thrice the search: imports, replays
JUDGED = 0.3  # share of the requests, the newest, on which plans are scored
MIN_REQUESTS = 20  # that are solved on, and that are scored
STREAM = 1000  # requests that are replayed
PARTS = 8  # of the requests, scored one by one too
RUNNING = 8  # requests on each rank at a time: with few, ranks are kept even and plans differ less


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best new plan, and local activation rates: of the newest requests, then of PARTS parts."""

    path: Path
    old: np.ndarray  # (1 + PARTS,) on the served plan
    new: np.ndarray  # (1 + PARTS,) on the new one
    even: float  # the rate of an even spread of experts, without a plan: 1 / ranks


def solve_aside(trace: Path, served: Path, folder: Path, seconds: float) -> Found:
    """Run `find` in a separate process. Raises RuntimeError if it takes far longer than `seconds`."""
    limit = 3 * seconds + GRACE_SECONDS
    with multiprocessing.get_context("spawn").Pool(1, _stand_back) as pool:
        try:
            return pool.apply_async(find, (trace, served, folder, seconds)).get(limit)
        except multiprocessing.TimeoutError:
            raise RuntimeError(f"no plan was found within {limit:g} s") from None


def _stand_back() -> None:
    os.nice(NICE)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the loop ends this process


def find(trace: Path, served: Path, folder: Path, seconds: float) -> Found:
    """Solve from the served plan, which moves few experts, and afresh; return the plan that is better.

    Plans are solved on the oldest requests of the trace and scored on the newest; new ones are saved in `folder`.
    """
    old = load_plan(served)
    oldest, newest = by_age(open_trace(trace))
    search = CoclusterSettings(budget=seconds)
    settings = SolveSettings(redundant_experts=old.placement.redundant_experts, cocluster=search)
    rates = {}
    for name, previous in (("warm", old), ("afresh", None)):
        plan = solve(oldest, old.topology, settings, previous=previous)
        plan = replace(plan, shuffle_from=old.shuffle_from)
        save_plan(plan, folder / name)
        rates[folder / name] = score(newest, plan)
    best = max(rates, key=lambda path: float(rates[path][0]))
    return Found(path=best, old=score(newest, old), new=rates[best], even=1 / old.topology.ep_size)


def by_age(trace: RoutingTrace) -> tuple[RoutingTrace, RoutingTrace]:
    """Split a trace, in order of ends, into the oldest requests and the newest. Raises ValueError if either has few."""
    requests = np.arange(trace.num_requests)
    count = round(trace.num_requests * (1 - JUDGED))
    if min(count, trace.num_requests - count) < MIN_REQUESTS:
        raise ValueError(f"{trace.num_requests} requests were recorded, too few to solve on some and score on others")
    return trace.select(requests[:count]), trace.select(requests[count:])


def score(trace: RoutingTrace, plan: Plan) -> np.ndarray:
    """Return local activation rates (1 + PARTS,) on a plan: of all requests, then of each of PARTS disjoint parts.

    The trace is not in arrival order: it interleaves the ranks' recordings, which would favor the plan that was
    serving. So requests are shuffled. They are repeated up to STREAM requests, since a short stream does not reach the
    bound on a group's lead: a plan could send every request to the group that suits it.
    """
    rng, times = np.random.default_rng(0), -(-STREAM // trace.num_requests)
    again = np.concatenate([rng.permutation(trace.num_requests) for _ in range(times)])
    stream = trace.select(again)
    groups = schedule_live(stream, plan, RUNNING * plan.topology.dp_size)
    chosen = [np.arange(len(again)), *(np.flatnonzero(again % PARTS == part) for part in range(PARTS))]
    replayed = [replay(stream.select(part), plan, ReplaySettings(), groups[part]) for part in chosen]
    return np.array([result.total.lar for result in replayed])
