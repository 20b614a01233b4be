"""The interface of request schedulers, and the round-robin scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np

from semmoe.requests.policy import RoundRobin


@dataclass(frozen=True)
class Assigned:
    """The handle of an assigned request, an argument of `finish`."""

    request: int  # its number in order of arrival, from 0
    group: int
    work: float = 0.0  # expected work as entered in the ledger, in decode tokens
    prompt_work: float = 0.0  # the part of `work` that the prompt causes


class RequestScheduler(Protocol):
    """Assigns requests by a request policy: `admit` assigns a request to a group, `finish` reports its end."""

    keeps_ledger: ClassVar[bool]  # whether it counts the work of groups, including requests that name their own group
    mean_length: float  # decode tokens expected of a request of unknown length
    unknown_tokens: int  # prompt tokens outside the tables, so far

    @property
    def work(self) -> np.ndarray:
        """(D,) tokens of work of each group; zeros without a ledger."""

    def admit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
    ) -> Assigned:
        """Assign one request at once."""

    def admit_window(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        expected_tokens: float | Sequence[float] | None = None,
    ) -> list[Assigned]:
        """Assign several requests together; expected_tokens: of all of them, or of each."""

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Report that a request ended after `actual_tokens` decode tokens. Call it once per handle."""

    @property
    def arrivals(self) -> int:
        """Requests so far."""

    def follow(self, before: "RequestScheduler") -> None:
        """Begin with the ledger of another scheduler over as many groups, whose handles `finish` then takes too."""


class OneByOne:
    """Base of schedulers without a ledger: every request is assigned on arrival, and no state of it is kept."""

    keeps_ledger: ClassVar[bool] = False
    mean_length = 0.0
    unknown_tokens = 0

    def __init__(self, num_groups: int) -> None:
        self._arrivals, self._groups = 0, num_groups

    @property
    def work(self) -> np.ndarray:
        """(D,) zeros, since no work is counted."""
        return np.zeros(self._groups)

    def choose(self, prompt_ids: np.ndarray) -> int:
        """Choose a group."""
        raise NotImplementedError

    def admit(
        self,
        prompt_ids: Sequence[int] | np.ndarray,
        expected_tokens: float | None = None,
    ) -> Assigned:
        """Assign one request; its work has no effect."""
        group = self.choose(np.asarray(prompt_ids, np.int64))
        self._arrivals += 1
        return Assigned(self._arrivals - 1, group, prompt_work=float(len(prompt_ids)))

    def admit_window(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        expected_tokens: float | Sequence[float] | None = None,
    ) -> list[Assigned]:
        """Assign the requests one after the other."""
        return [self.admit(prompt) for prompt in prompts]

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Do nothing: the work of requests is not counted."""

    @property
    def arrivals(self) -> int:
        """Requests so far."""
        return self._arrivals

    def follow(self, before: "RequestScheduler") -> None:
        """Go on counting arrivals: there is no ledger."""
        self._arrivals = before.arrivals


class RoundRobinScheduler(OneByOne):
    """Assigns requests to groups round-robin."""

    def __init__(self, policy: RoundRobin) -> None:
        super().__init__(policy.num_groups)

    def choose(self, prompt_ids: np.ndarray) -> int:
        """The next group."""
        return self._arrivals % self._groups
