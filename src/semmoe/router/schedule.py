"""Where each request goes: by the plan, the prefix caches and the work that now runs.

Groups are the ranks of all backends in one row, so that one ledger and one rule serve them. With two backends of three
ranks each, group 4 is rank 1 of backend 1:

    group      0 1 2 3 4 5
    backend    0 0 0 1 1 1
    rank       0 1 2 0 1 2

The router sees every request begin and end: its ledger is exact, but for what it did not send and for answers that are
shorter than expected.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from semmoe.core import Plan
from semmoe.online import expected_tokens, live_settings, start
from semmoe.requests.scheduler import Assigned
from semmoe.router.prompts import Prompt
from semmoe.router.settings import RouterSettings

NO_IDS = np.zeros(0, np.int64)
Running = Sequence[int | None]  # by backend: requests that it now has; None: it must not be used


class UnavailableError(Exception):
    """No backend can take the request."""


@dataclass(frozen=True)
class Choice:
    """Where a request goes; `RankScheduler.finish` takes it back."""

    backend: int
    rank: int | None  # None: the engine chooses
    by: str  # plan, named (by the request) or engine
    cached_tokens: int = 0  # of the prompt, as far as the router knows
    assigned: Assigned | None = None


class RankScheduler:
    """Not thread-safe: the event loop alone uses it."""

    def __init__(self, plan: Plan, settings: RouterSettings) -> None:
        unfit = "this plan schedules no requests: it is for attention tp, or was solved without"
        if not plan.requests.by_tables:
            raise ValueError(unfit)
        ranks, urls = plan.topology.dp_size, len(settings.backends)
        alone = settings.backend_ranks == "urls"
        if alone and urls != ranks:
            raise ValueError(f"the plan has {ranks} ranks, and there are {urls} URLs: give one a rank")
        self.num_ranks = ranks
        copies = 1 if alone else urls
        self._backend = np.arange(ranks) if alone else np.repeat(np.arange(urls), ranks)  # of each group
        self._rank = np.tile(np.arange(ranks), copies)
        self._alone = alone  # a backend is one rank
        ledger = live_settings(ranks * copies, cache_tokens=settings.cache_tokens)
        self._scheduler = start(plan.requests.tiled(copies, settings.prefix_weight), ledger)

    @property
    def unknown_tokens(self) -> int:
        """Prompt ids outside the tables so far."""
        return self._scheduler.unknown_tokens

    @property
    def work(self) -> np.ndarray:
        """(backends * ranks,) tokens of work that now run; zeros for Algorithm 2, which keeps no ledger."""
        return self._scheduler.work

    def choose(self, prompt: Prompt, named: int | None, running: Running) -> Choice:
        """For a request that names its rank, or None. Raises UnavailableError."""
        usable = np.array([count is not None for count in running])[self._backend]
        if named is not None:
            return self._named(prompt, named, usable)
        if prompt.ids is None:
            return self.spare(running)
        if not usable.any():
            raise UnavailableError
        return self._admit(prompt, usable, "plan")

    def spare(self, running: Running) -> Choice:
        """Without the plan: the backend that has fewest requests; its rank is the engine's choice."""
        counts = [(count, backend) for backend, count in enumerate(running) if count is not None]
        if not counts:
            raise UnavailableError
        backend = min(counts)[1]
        return Choice(backend, backend if self._alone else None, "engine")

    def finish(self, choice: Choice) -> None:
        """The request has ended, or never began; once for each choice."""
        if choice.assigned is not None:
            self._scheduler.finish(choice.assigned, 0.0)

    def forget(self, backend: int) -> None:
        """The backend is gone, and with it what it had cached."""
        for group in np.flatnonzero(self._backend == backend):
            self._scheduler.forget_prefixes(int(group))

    def _named(self, prompt: Prompt, named: int, usable: np.ndarray) -> Choice:
        allowed = usable & (self._rank == named)
        if not allowed.any():
            raise UnavailableError
        if not self._scheduler.keeps_ledger:  # Algorithm 2 deals out its own requests only
            return Choice(int(self._backend[np.argmax(allowed)]), named, "named")
        return self._admit(prompt, allowed, "named")

    def _admit(self, prompt: Prompt, allowed: np.ndarray, by: str) -> Choice:
        ids = NO_IDS if prompt.ids is None else prompt.ids
        expected = prompt.answers * expected_tokens(self._scheduler.mean_length, prompt.max_new_tokens)
        assigned = self._scheduler.admit(ids, expected, allowed=allowed)
        cached = len(ids) - int(assigned.prompt_work)  # a prompt token that is not cached is one token of work
        return Choice(int(self._backend[assigned.group]), int(self._rank[assigned.group]), by, cached, assigned)


def warm_up(plan: Plan, settings: RouterSettings) -> None:
    """Compile what scheduling needs, on a scheduler of its own: the first request shall not wait for that."""
    scheduler = RankScheduler(plan, settings)
    running: list[int | None] = [0] * len(settings.backends)
    for named in (None, 0):
        scheduler.finish(scheduler.choose(Prompt(np.arange(64)), named, running))
