"""Choose a backend and a rank for each request, by the plan, the prefix caches and the work in progress.

The ranks of all backends are numbered as groups, so that one scheduler covers them all. With two backends of three
ranks each, group 4 is rank 1 of backend 1:

    group      0 1 2 3 4 5
    backend    0 0 0 1 1 1
    rank       0 1 2 0 1 2

The router sees every request begin and end, so its account of the work is exact, except for requests that it did not
send and for answers that are shorter than expected.
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
Running = Sequence[int | None]  # per backend: requests in flight; None if it must not be used


class UnavailableError(Exception):
    """No backend can take the request."""


@dataclass(frozen=True)
class Choice:
    """Where a request goes. Give it to `RankScheduler.finish` when the request ends."""

    backend: int
    rank: int | None  # None if the engine chooses
    by: str  # who chose the rank: plan, named (the request) or engine
    cached_tokens: int = 0  # tokens of the prompt that the rank should have cached
    assigned: Assigned | None = None


class RankScheduler:
    """Chooses ranks by a plan. Not thread-safe: used from the event loop only."""

    def __init__(self, plan: Plan, settings: RouterSettings) -> None:
        if not plan.requests.by_tables:
            raise ValueError(
                "this plan schedules no requests: it is for attention tp, or was solved without scheduling"
            )
        ranks, urls = plan.topology.dp_size, len(settings.backends)
        alone = settings.backend_ranks == "urls"
        if alone and urls != ranks:
            raise ValueError(f"the plan has {ranks} ranks, and there are {urls} URLs: give one URL per rank")
        self.num_ranks = ranks
        copies = 1 if alone else urls
        self._backend = np.arange(ranks) if alone else np.repeat(np.arange(urls), ranks)  # (groups,) backend
        self._rank = np.tile(np.arange(ranks), copies)
        self._alone = alone  # each backend is one rank
        ledger = live_settings(ranks * copies, cache_tokens=settings.cache_tokens)
        self._scheduler = start(plan.requests.tiled(copies, settings.prefix_weight), ledger)

    @property
    def unknown_tokens(self) -> int:
        """Number of prompt token ids so far that are not in the plan's tables."""
        return self._scheduler.unknown_tokens

    @property
    def work(self) -> np.ndarray:
        """(backends * ranks,) tokens of work in progress; zeros for Algorithm 2, which does not account for work."""
        return self._scheduler.work

    def choose(self, prompt: Prompt, named: int | None, running: Running) -> Choice:
        """Where a request goes. named: the rank that it names, if any. Raises UnavailableError."""
        usable = np.array([count is not None for count in running])[self._backend]
        if named is not None:
            return self._named(prompt, named, usable)
        if prompt.ids is None:
            return self.spare(running)
        if not usable.any():
            raise UnavailableError
        return self._admit(prompt, usable, "plan")

    def choose_together(self, prompts: Sequence[Prompt], running: Running) -> list[Choice]:
        """Where several requests go whose prompts are known and that name no rank. Raises UnavailableError."""
        usable = np.array([count is not None for count in running])[self._backend]
        if not usable.any():
            raise UnavailableError
        ids, expected = [_ids(prompt) for prompt in prompts], [self._expected(prompt) for prompt in prompts]
        found = self._scheduler.admit_window(ids, expected, usable)
        return [self._choice(own, assigned, "plan") for own, assigned in zip(ids, found, strict=True)]

    def spare(self, running: Running) -> Choice:
        """Without the plan: the backend with the fewest requests; the engine chooses the rank."""
        counts = [(count, backend) for backend, count in enumerate(running) if count is not None]
        if not counts:
            raise UnavailableError
        backend = min(counts)[1]
        return Choice(backend, backend if self._alone else None, "engine")

    def finish(self, choice: Choice) -> None:
        """The request has ended or was not sent. To be called once per choice."""
        if choice.assigned is not None:
            self._scheduler.finish(choice.assigned, 0.0)

    def forget(self, backend: int) -> None:
        """The backend is gone, and its prefix caches with it."""
        for group in np.flatnonzero(self._backend == backend):
            self._scheduler.forget_prefixes(int(group))

    def _named(self, prompt: Prompt, named: int, usable: np.ndarray) -> Choice:
        allowed = usable & (self._rank == named)
        if not allowed.any():
            raise UnavailableError
        if not self._scheduler.keeps_ledger:  # Algorithm 2 has no state to update
            return Choice(int(self._backend[np.argmax(allowed)]), named, "named")
        return self._admit(prompt, allowed, "named")

    def _admit(self, prompt: Prompt, allowed: np.ndarray, by: str) -> Choice:
        ids = _ids(prompt)
        return self._choice(ids, self._scheduler.admit(ids, self._expected(prompt), allowed=allowed), by)

    def _expected(self, prompt: Prompt) -> float:
        return prompt.answers * expected_tokens(self._scheduler.mean_length, prompt.max_new_tokens)

    def _choice(self, ids: np.ndarray, assigned: Assigned, by: str) -> Choice:
        cached = len(ids) - int(assigned.prompt_work)  # each uncached prompt token is one token of work
        return Choice(int(self._backend[assigned.group]), int(self._rank[assigned.group]), by, cached, assigned)


def _ids(prompt: Prompt) -> np.ndarray:
    return NO_IDS if prompt.ids is None else prompt.ids


def warm_up(plan: Plan, settings: RouterSettings) -> None:
    """Compile the scheduling kernels with a throw-away scheduler, so that the first request does not wait for it."""
    scheduler = RankScheduler(plan, settings)
    running: list[int | None] = [0] * len(settings.backends)
    for named in (None, 0):
        scheduler.finish(scheduler.choose(Prompt(np.arange(64)), named, running))
    for choice in scheduler.choose_together([Prompt(np.arange(64))] * 2, running):
        scheduler.finish(choice)
