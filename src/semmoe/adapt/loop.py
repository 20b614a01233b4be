"""The loop of `semmoe adapt`: watch, record, solve again, weigh the move, swap, check; every decision is told."""

import shutil
import tempfile
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from semmoe import watch
from semmoe.adapt.decide import Decision, Score, confirm, drifted_since, judge, wants, with_core
from semmoe.adapt.recording import MORE, Recorder, Recording
from semmoe.adapt.solving import Found, Job
from semmoe.calibration import Links
from semmoe.core import Plan
from semmoe.engines.live.files import plan_name, plan_number
from semmoe.moving import move_between, weigh
from semmoe.plan import load_plan, save_plan
from semmoe.settings import AdaptSettings

LEARNED = 4  # windows from which it is learnt what to expect of a plan
SWITCH = "adapt.off"  # a file in the control folder: nothing is done while it is there


class Server(Recorder, Protocol):
    """A running server, as the loop needs it."""

    def look(self) -> watch.Look: ...  # its counters now
    def expert_bytes(self) -> int: ...  # weights of one expert of one layer
    def swap(self, plan: Plan) -> str: ...  # swap to a plan; why it is not served now, or ""


@dataclass
class Adapter:
    """Follows one server. plan: what it serves on, `path` where that is; links: what moves and layers are timed on.

    solve: does a job within so many seconds. tell: called with every decision that is more than to go on watching, and
    with each of those where the reason changed.
    """

    server: Server
    plan: Plan
    path: Path
    links: Links
    links_name: str
    settings: AdaptSettings
    folder: Path  # the control folder
    solve: Callable[[Job, float], Found]
    tell: Callable[[Decision], None]
    dry_run: bool = False
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.expected = watch.expected_lar(self.plan.expected)
        self._looks: deque[watch.Look] = deque([self.server.look()])
        self._first = self._looks[0] if self.expected is None else None  # from where on it is learnt what to expect
        self._solved, self._said = self.clock(), ""
        self._recording = Recording(self.server, self.settings, self.folder, self.clock, self.sleep)
        self._kept: list[Path] = []  # plans that served before, the newest last
        self._changed = self._taken = self.clock()  # when requests became what they are; when some were last taken
        self._enough = MORE * self.settings.requests  # new ones for another solve

    def close(self) -> None:
        """Leave the server as it serves, with no recording on."""
        self._recording.close()

    def turn(self) -> Decision:
        """One turn: watch, and go on from there as far as it leads."""
        self.sleep(self.settings.every)
        if (self.folder / SWITCH).exists():
            self._recording.close()
            return self._say(Decision(action="off", why=f"{self.folder / SWITCH} exists", figures={}))
        try:
            self._recording.note()
        except (ValueError, RuntimeError, OSError) as error:
            return self._say(Decision(action="fail", why=" ".join(str(error).split()), figures={}))
        seen = self._seen()
        if seen.seconds < self.settings.window - self.settings.every:
            return self._say(Decision(action="watch", why="the first window is not over", figures={}))
        quiet, more = self.clock() - self._solved, self._recording.since(self._taken)
        found = self._say(wants(seen, self.expected, quiet, more, self._enough, self.settings))
        if found.action == "record":
            return self._adapt(seen)
        self._learn()
        return found

    def _learn(self) -> None:
        """Expect of a plan what it does in its first windows, since one alone may be some hundredths too high."""
        if self._first is None:
            return
        seen = watch.view(self._first, self._looks[-1])
        if seen.known_lar is not None:
            self.expected = seen.known_lar
            if seen.seconds >= LEARNED * self.settings.window:
                self._first = None

    def _seen(self) -> watch.View:
        """What the server did in the last window."""
        self._looks.append(self.server.look())
        while len(self._looks) > 2 and self._looks[-1].time - self._looks[1].time >= self.settings.window:
            self._looks.popleft()
        return watch.view(self._looks[0], self._looks[-1])

    def _say(self, decision: Decision) -> Decision:
        """Tell a decision, but not that of the turn before again."""
        said = decision.action if decision.action in ("watch", "off", "fail") else ""
        if not said or said + decision.why[:12] != self._said:
            self.tell(decision)
        self._said = said + decision.why[:12] if said else ""
        return decision

    def _adapt(self, seen: watch.View) -> Decision:
        """Record, solve, weigh and perhaps swap. What fails leaves the server as it is."""
        try:
            with tempfile.TemporaryDirectory(prefix="adapt-", dir=self.folder) as scratch:
                return self._from_recording(seen, Path(scratch))
        except (ValueError, RuntimeError, OSError) as error:
            self._solved = self.clock()
            return self._say(Decision(action="fail", why=" ".join(str(error).split()), figures={}))

    def _from_recording(self, seen: watch.View, scratch: Path) -> Decision:
        s = self.settings
        if seen.below(self.expected, s.margin):
            self._changed = drifted_since(self._looks, self.expected, s)
        older = self._recording.take(self._changed, scratch / "trace")
        self._taken, counted = self.clock(), self._recording.since(self._changed)
        self._enough = min(max(counted, s.requests), MORE * s.requests)  # as many again make a better plan
        kept = [path for path in self._kept if path != self.path]
        job = Job(trace=scratch / "trace", plan=self.path, folder=scratch, seconds=s.solve_seconds, judged=s.judged,
                  links=self.links_name, older=older, kept=kept, least_gain=s.least_gain)  # fmt: skip
        self._say(Decision(action="solve", why="requests are recorded", figures={}))
        solved = self.solve(job, 3 * s.solve_seconds + 60)
        self._solved, plan = self.clock(), load_plan(solved.path)
        found = self._say(with_core(self._weigh(seen, plan, solved.old, solved.new), solved.core))
        if found.action != "swap" or self.dry_run:
            # What the plan does for these requests is what it can do, until they change again.
            if found.action == "keep":
                self.expected, self._first = seen.lar, self._looks[0]
            return found
        return self._swap(plan, solved.new.lar - solved.old.lar)

    def _weigh(self, seen: watch.View, plan: Plan, old: Score, new: Score) -> Decision:
        cost = float(move_between(self.plan, plan).seconds(self.server.expert_bytes(), self.links).sum())
        saved = old.seconds_per_token - new.seconds_per_token
        return judge(old, new, weigh(saved, seen.routed_tokens_per_second, cost, self.settings.horizon), self.settings)

    def _swap(self, plan: Plan, predicted: float) -> Decision:
        """Swap, watch a window, and go back if the gain is not there."""
        before = self._seen().lar
        problem = self.server.swap(plan)
        if problem:
            return self._say(Decision(action="fail", why=problem, figures={}))
        self._looks = deque([self.server.look()])
        self._recording.note()
        self.sleep(self.settings.window)
        again = self.settings.keep_recording and self.settings.kept_plans > 0
        found = self._say(confirm(before, self._seen(), predicted, again, self.settings))
        if found.action == "back":
            problem = self.server.swap(self.plan)
            self._looks = deque([self.server.look()])
            self._first = self._first and self._looks[0]
            if not problem:
                return found
            found = self._say(Decision(action="fail", why=f"the new plan serves on: {problem}", figures=found.figures))
        self.plan, self.path = plan, self._keep(plan)
        self.expected, self._first = found.figures["after"], self._looks[0]
        return found

    def _keep(self, plan: Plan) -> Path:
        """Keep a plan that is served where it can be found; not before its gain is confirmed, since it may go back.

        The plan before it stays too, and the newest that served, so that they are there when traffic comes back.
        """
        target = self.folder / "adapted" / plan_name(plan_number(plan))
        save_plan(plan, target)
        self._kept = [path for path in (*self._kept, self.path) if path != target]
        while len(self._kept) > self.settings.kept_plans:
            path = self._kept.pop(0)
            if path.parent == target.parent:  # a plan that the user gave is the user's
                shutil.rmtree(path)
        return target
