"""The loop of `semmoe adapt`: watch, record, solve again, judge, swap, check; every decision is reported.

Plans are solved in a separate process, at a low priority and within a time.
"""

import multiprocessing
import os
import signal
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from semmoe.core import Plan, RoutingTrace
from semmoe.evaluation.online import schedule_live
from semmoe.evaluation.replay import replay
from semmoe.live import watch
from semmoe.live.client import Served
from semmoe.plan import load_plan, save_plan
from semmoe.settings import AdaptSettings, CoclusterSettings, ReplaySettings, SolveSettings, SwapSettings
from semmoe.solver import solve
from semmoe.traces.trace import open_trace

LOOKS_PER_WINDOW = 12
REST_WINDOWS = 2  # between two solves on drift
MIN_GAIN_ERRORS = 2.0  # standard errors of a plan's gain
MIN_MEASURED_SHARE = 0.3  # of the predicted gain; with less the old plan comes back
NICE = 10  # how far the solver stands back behind the server where they share cores
GRACE_SECONDS = 60.0  # beyond thrice the search: imports, replays
JUDGED = 0.3  # share of the requests, the newest, on which plans are scored
MIN_REQUESTS = 20  # that are solved on, and that are scored
STREAM = 1000  # requests that are replayed
PARTS = 8  # of the requests, scored one by one too
RUNNING = 8  # requests on each rank at a time: with few, ranks are kept even and plans differ less


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, its reason and its figures: one line of JSON."""

    action: str  # watch, record, solve, keep, swap, stay, back or fail
    why: str
    figures: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best new plan, and local activation rates: of the newest requests, then of PARTS parts."""

    path: Path
    old: np.ndarray  # (1 + PARTS,) on the served plan
    new: np.ndarray  # (1 + PARTS,) on the new one
    even: float  # the rate of an even spread of experts, without a plan: 1 / ranks


def wants(seen: watch.View, expected: float | None, quiet: float, s: AdaptSettings) -> Decision:
    """Decide whether to record requests now. quiet: seconds since the last solve."""
    action = "watch"
    if s.schedule and quiet >= s.schedule:
        action, why = "record", f"the last plan was solved {quiet:.0f} s ago"
    elif seen.known_lar is None:
        why = "too few tokens to judge"
    elif not seen.below(expected, s.margin):
        why = "requests are as expected"
    elif quiet < REST_WINDOWS * s.window:
        why = f"the last solve was {quiet:.0f} s ago"
    else:
        action, why = "record", f"local activation rate {seen.lar:.3f}, expected {expected:.3f}"
    figures = {"lar": seen.lar, "expected_lar": expected, "pairs": seen.pairs, "quiet": round(quiet, 1)}
    return Decision(action=action, why=why, figures=figures)


def judge(found: Found, min_gain: float) -> Decision:
    """Decide whether to swap: where a plan gains enough, and surely. min_gain: a share of its gain over no plan."""
    gains, new = found.new - found.old, float(found.new[0])
    gain, least = float(gains[0]), min_gain * max(new - found.even, 0.0)
    error = float(gains[1:].std(ddof=1) / PARTS**0.5)
    action, why = "swap", f"{gain:+.3f} of pairs local"
    if gain < least:
        action, why = "keep", f"the new plan keeps {gain:+.3f} of pairs local, less than {least:.3f}"
    elif gain < MIN_GAIN_ERRORS * error:
        action, why = "keep", f"the new plan keeps {gain:+.3f} of pairs local, with an error of {error:.3f}"
    return Decision(action=action, why=why, figures={"new_lar": new, "gain": gain, "error": error})


def confirm(before: float | None, after: watch.View, predicted: float) -> Decision:
    """Decide whether a swap stays. before: the local activation rate on the old plan; predicted: the gain in replay."""
    figures = {"before": before, "after": after.lar, "predicted_gain": predicted, "pairs": after.pairs}
    action, why = "watch", "too few tokens to judge the swap"
    if before is not None and after.known_lar is not None:
        gain = after.known_lar - before
        action = "back" if gain < MIN_MEASURED_SHARE * predicted else "stay"
        why = f"{gain:+.3f} of pairs local was measured, {predicted:+.3f} predicted"
    return Decision(action=action, why=why, figures=figures)


@dataclass
class Adapter:
    """Follows one server. plan: the served one; solve: same as `solve_aside`; report: gets every decision."""

    server: Served
    plan: Plan
    settings: AdaptSettings
    solve: Callable[[Path, Path, Path, float], Found]
    report: Callable[[Decision], None]
    dry_run: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.expected = watch.expected_lar(self.plan.expected)
        self._looks: deque[watch.Look] = deque([self.server.look()])
        self._solved, self._said = self.clock(), ("", "")

    def turn(self) -> Decision:
        """Look once, and adapt the plan if the requests ask for it. A failure leaves the served plan."""
        window = self.settings.window
        self.sleep(window / LOOKS_PER_WINDOW)
        seen = self._seen()
        if seen.seconds < window - window / LOOKS_PER_WINDOW:
            return self._say(Decision(action="watch", why="the first window is not over", figures={}))
        if self.expected is None:
            self.expected = seen.known_lar  # of a plan that does not say it
        decision = self._say(wants(seen, self.expected, self.clock() - self._solved, self.settings))
        if decision.action != "record":
            return decision
        try:
            with tempfile.TemporaryDirectory(prefix="adapt-", dir=self.server.folder) as scratch:
                return self._adapt(seen, Path(scratch))
        except (ValueError, RuntimeError, OSError) as error:
            self._solved = self.clock()
            return self._say(Decision(action="fail", why=" ".join(str(error).split()), figures={}))

    def _seen(self) -> watch.View:
        """What the server did in the last window."""
        return watch.view_window(self._looks, self.server.look(), self.settings.window)

    def _say(self, decision: Decision) -> Decision:
        """Report a decision, but not again that nothing is done, for the same reason."""
        said = decision.action, decision.why[:12]
        if said != self._said or decision.action not in ("watch", "fail"):
            self.report(decision)
        self._said = said
        return decision

    def _adapt(self, seen: watch.View, scratch: Path) -> Decision:
        """Record, solve, judge and perhaps swap."""
        self.server.record(scratch / "trace", self.settings.requests, self.settings.record_timeout)
        self._say(Decision(action="solve", why="requests are recorded", figures={}))
        save_plan(self.plan, scratch / "served")
        found = self.solve(scratch / "trace", scratch / "served", scratch, self.settings.window / 2)
        self._solved = self.clock()
        decision = self._say(judge(found, self.settings.min_gain))
        if decision.action == "keep":
            self.expected = seen.lar  # the plan's best for these requests, until they change again
        elif not self.dry_run:
            return self._swap(load_plan(found.path), decision.figures["gain"])
        return decision

    def _swap(self, plan: Plan, predicted: float) -> Decision:
        """Swap, watch a window, and go back if the gain is not there."""
        before, old = self._seen().known_lar, self.plan
        self._serve(plan)
        self.sleep(self.settings.window)
        decision = self._say(confirm(before, self._seen(), predicted))
        if decision.action == "back":
            self._serve(old)
        else:
            self.expected = decision.figures["after"]
        return decision

    def _serve(self, plan: Plan) -> None:
        status = self.server.swap(plan, SwapSettings())
        if status.state != "done":
            raise RuntimeError(f"the swap was {status.state}: {status.reason}")
        self.plan = plan
        self._looks = deque([self.server.look()])


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
    """Return local activation rates (1 + PARTS,) on a plan: of a stream of a trace's requests, then of its parts.

    The trace is not in arrival order: it interleaves the ranks' recordings, which would favor the plan that was
    serving. So requests are shuffled. They come again and again, since for few requests the bound on a group's lead is
    loose: a plan could send every request to the group that suits it.
    """
    rng, times = np.random.default_rng(0), -(-STREAM // trace.num_requests)
    again = np.concatenate([rng.permutation(trace.num_requests) for _ in range(times)])
    stream = trace.select(again)
    groups = schedule_live(stream, plan, RUNNING * plan.topology.dp_size)
    chosen = [np.arange(len(again)), *(np.flatnonzero(again % PARTS == part) for part in range(PARTS))]
    replayed = [replay(stream.select(part), plan, ReplaySettings(), groups[part]) for part in chosen]
    return np.array([result.total.lar for result in replayed])
