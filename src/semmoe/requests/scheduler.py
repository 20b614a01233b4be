"""Request schedulers: what all share, and the round-robin scheduler."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np

from semmoe.requests.policy import RoundRobin

Prompt: TypeAlias = Sequence[int] | np.ndarray  # (n,) token ids


@dataclass(frozen=True)
class Assigned:
    """The handle of an assigned request, an argument of `finish`."""

    request: int  # its number in order of arrival, from 0
    group: int
    work: float = 0.0  # expected work as entered in the ledger, in decode tokens
    prompt_work: float = 0.0  # the part of `work` that the prompt causes


class RequestScheduler:
    """Assigns requests by a request policy: `admit` assigns requests to groups, `finish` reports that a request ended.

    This base class keeps no ledger: every request is assigned on arrival, and no state of it is kept.
    """

    keeps_ledger: ClassVar[bool] = False  # whether it counts the work of groups
    mean_length = 0.0  # decode tokens expected of a request of unknown length
    unknown_tokens = 0  # prompt tokens outside the tables, so far
    arrivals = 0  # requests so far

    def __init__(self, num_groups: int) -> None:
        self._groups = num_groups
        self.running = np.zeros(num_groups)  # (D,) requests in the ledger, if there is one
        self.most_at_once = 0  # requests that a group runs at once; 0: not known

    @property
    def work(self) -> np.ndarray:
        """(D,) tokens of work of each group; zeros without a ledger."""
        return np.zeros(self._groups)

    def choose(self, prompt_ids: np.ndarray) -> int:
        """Choose a group."""
        raise NotImplementedError

    def admit(self, prompts: Sequence[Prompt], expected_tokens: Sequence[float] | None = None) -> list[Assigned]:
        """Assign the requests of a window, in order of arrival.

        expected_tokens: decode tokens expected of each, by default the profile's mean.
        """
        return [self._admit_one(prompt) for prompt in prompts]

    def _admit_one(self, prompt_ids: Prompt) -> Assigned:
        group = self.choose(np.asarray(prompt_ids, np.int64))
        self.arrivals += 1
        return Assigned(self.arrivals - 1, group, prompt_work=float(len(prompt_ids)))

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        """Report that a request ended after `actual_tokens` decode tokens. Call it once per handle."""

    def follow(self, before: "RequestScheduler") -> None:
        """Begin with the ledger of another scheduler over as many groups, whose handles `finish` then takes too."""
        self.arrivals, self.most_at_once = before.arrivals, before.most_at_once
        self.running = before.running.copy()


class RoundRobinScheduler(RequestScheduler):
    """Assigns requests to groups round-robin."""

    def __init__(self, policy: RoundRobin) -> None:
        super().__init__(policy.num_groups)

    def choose(self, prompt_ids: np.ndarray) -> int:
        """The next group."""
        return self.arrivals % self._groups
