"""Request policies at work: what all of them do, and the one that deals requests out in turn."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from semmoe.requests.policy import RoundRobin


@dataclass(frozen=True)
class Assigned:
    """The handle of one request, which `finish` takes back."""

    request: int  # its number in order of arrival, from 0
    group: int
    work: float = 0.0  # as entered in the ledger, decode tokens
    prompt_work: float = 0.0  # the part of it that is known


class RequestScheduler(Protocol):
    """A request policy at work: `admit` lets a request in, `finish` tells of its end."""

    keeps_ledger: ClassVar[bool]  # whether it counts the work of groups, also of requests that name their own
    mean_length: float  # decode tokens of a request of which nothing is known
    unknown_tokens: int  # prompt tokens outside the tables, so far

    @property
    def work(self) -> np.ndarray:
        """(D,) tokens of work of each group; zeros without a ledger."""

    def admit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
        cached_tokens: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> Assigned:
        """Assign one request at once, to one of the groups `allowed` (D,) bool."""

    def admit_window(
        self, prompts: Sequence[Sequence[int] | np.ndarray], expected_tokens: float | None = None
    ) -> list[Assigned]:
        """Assign requests that wait together."""

    def submit(self, prompt_ids: Sequence[int] | np.ndarray) -> list[Assigned]:
        """Let one request wait for a window; returns those assigned now, if any."""

    def flush(self) -> list[Assigned]:
        """Assign all that wait."""

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """A request ended after so many decode tokens; once for each handle."""

    def forget_prefixes(self, group: int) -> None:
        """The group's prefix cache is empty."""


class OneByOne:
    """What schedulers without a ledger share: every request is assigned as it comes, and nothing is kept of it."""

    keeps_ledger: ClassVar[bool] = False
    mean_length = 0.0
    unknown_tokens = 0

    def __init__(self, num_groups: int) -> None:
        self._arrivals, self._groups = 0, num_groups

    @property
    def work(self) -> np.ndarray:
        """(D,) zeros."""
        return np.zeros(self._groups)

    def choose(self, prompt_ids: np.ndarray, allowed: np.ndarray) -> int:
        """The group among `allowed` (D,) bool, of which there is one."""
        raise NotImplementedError

    def admit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
        cached_tokens: np.ndarray | None = None,
        allowed: np.ndarray | None = None,
    ) -> Assigned:
        """Assign one request; work and caches do not count."""
        open_groups = np.ones(self._groups, bool) if allowed is None else allowed
        group = self.choose(np.asarray(prompt_ids, np.int64), open_groups)
        self._arrivals += 1
        return Assigned(self._arrivals - 1, group, prompt_work=float(len(prompt_ids)))

    def admit_window(
        self, prompts: Sequence[Sequence[int] | np.ndarray], expected_tokens: float | None = None
    ) -> list[Assigned]:
        """One after the other."""
        return [self.admit(prompt) for prompt in prompts]

    def submit(self, prompt_ids: Sequence[int] | np.ndarray) -> list[Assigned]:
        """Nothing waits."""
        return [self.admit(prompt_ids)]

    def flush(self) -> list[Assigned]:
        """Nothing waits."""
        return []

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Nothing is kept."""

    def forget_prefixes(self, group: int) -> None:
        """Nothing is kept."""


class RoundRobinScheduler(OneByOne):
    """Requests to groups in turn, those that are not allowed left out."""

    def __init__(self, policy: RoundRobin) -> None:
        super().__init__(policy.num_groups)
        self._next = 0

    def choose(self, prompt_ids: np.ndarray, allowed: np.ndarray) -> int:
        """The next allowed group."""
        turns = (self._next + np.arange(self._groups)) % self._groups
        group = int(turns[np.argmax(allowed[turns])])
        self._next = (group + 1) % self._groups
        return group
