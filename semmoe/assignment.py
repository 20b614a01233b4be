"""What the online side decides by looking up a Schedule: requests to groups, tokens to equal slices.

Pure NumPy and numba, so that the offline experiment (`replay`) and the engines run the very same decisions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numba
import numpy as np

from semmoe.core import PRIOR, Plan, RequestMap, RequestTable, ShuffleTables
from semmoe.scheduler import CapacityScheduler, SchedulerSettings
from semmoe.scores import known_rows

BATCH_LEAD = 0.05  # most that a group may have above the mean of a batch, where requests are small enough


class RequestScheduler:
    """Algorithm 2: requests to attention-DP groups by the summed group shares of their prompt's tokens.

    In every round of D requests each group gets one; the paper prints the mask inverted (its line 4), a group used
    in this round is the one left out.
    """

    def __init__(self, table: RequestTable) -> None:
        self._scores = table.request_scores
        self._unknown = table.request_source == PRIOR
        self._used = np.zeros(self._scores.shape[1], bool)
        self.unknown_tokens = 0  # tokens served by the prior, so far

    def assign(self, prompt_ids: np.ndarray, allowed: np.ndarray | None = None) -> int:
        """The group for one request; ids outside the vocabulary are served by the prior and counted.

        allowed (D,) bool: groups that may be chosen; a round ends when these have had their request.
        """
        rows = known_rows(prompt_ids, len(self._scores))
        self.unknown_tokens += int(self._unknown[rows].sum())
        closed = np.zeros_like(self._used) if allowed is None else ~allowed
        if (self._used | closed).all():
            self._used[:] = False
        group = int(np.argmax(np.where(self._used | closed, -np.inf, self._scores[rows].sum(axis=0))))
        self._used[group] = True
        return group


def schedule_requests(
    prompts: Sequence[Sequence[int] | np.ndarray], plan: Plan, lengths: np.ndarray | None = None, window: int = 1,
    unfinished: int = 0,
) -> np.ndarray:  # fmt: skip
    """(R,) int64: the attention group of each request in arrival order, by the plan's tables, or in turn without.

    For a plan with a request map: lengths (R,) decode tokens, told of a request once more than `unfinished` others have
    arrived after it (None: never); window: requests that wait to be assigned together. Algorithm 2 knows neither.
    """
    table = plan.schedule.requests if plan.schedule else None
    if table is None:
        return np.arange(len(prompts)) % plan.topology.dp_size
    if isinstance(table, RequestTable):
        scheduler = RequestScheduler(table)
        return np.array([scheduler.assign(np.asarray(prompt)) for prompt in prompts], np.int64)
    waiting = window if window > 1 else 0
    settings = SchedulerSettings(max_wait=waiting, release=max(window // 4, 1))
    return schedule_with(CapacityScheduler(table, settings), prompts, lengths, unfinished)


def schedule_batch(prompts: Sequence[Sequence[int] | np.ndarray], plan: Plan, new_tokens: int) -> np.ndarray:
    """(R,) int64: the groups of requests that are all at hand and decode `new_tokens` each.

    By a request map in one window, under a budget of prompt and decode tokens: a batch takes as long as its fullest
    group. Other plans, and maps that follow prefix caches, as of `schedule_requests`: nothing is cached yet.
    """
    table = plan.schedule.requests if plan.schedule else None
    if not isinstance(table, RequestMap) or table.cache_weight > 0:
        return schedule_requests(prompts, plan)
    settings = SchedulerSettings(lead_requests=0, lead_share=BATCH_LEAD, prompt_cost=1)
    return np.array([a.group for a in CapacityScheduler(table, settings).admit_window(prompts, new_tokens)], np.int64)


def schedule_with(
    scheduler: CapacityScheduler, prompts: Sequence[Sequence[int] | np.ndarray], lengths: np.ndarray | None,
    unfinished: int,
) -> np.ndarray:  # fmt: skip
    """(R,) int64 groups of requests that arrive in turn; lengths and unfinished as for `schedule_requests`."""
    assigned, told = [], 0
    for r, prompt in enumerate(prompts):
        assigned += scheduler.submit(prompt)
        while lengths is not None and told < len(assigned) and assigned[told].request < r - unfinished:
            scheduler.finish(assigned[told], float(lengths[assigned[told].request]))
            told += 1
    assigned += scheduler.flush()
    return np.array([a.group for a in sorted(assigned, key=lambda a: a.request)], np.int64)


@dataclass(frozen=True)
class Preference:
    """Where each of B tokens would best go, and next best, by rank inside the group; -1 is no preference."""

    first: np.ndarray  # (B,) int16
    first_confidence: np.ndarray  # (B,) float32
    second: np.ndarray  # (B,) int16
    second_confidence: np.ndarray  # (B,) float32

    def __getitem__(self, rows: np.ndarray) -> "Preference":
        return Preference(
            self.first[rows], self.first_confidence[rows], self.second[rows], self.second_confidence[rows]
        )


def look_up(
    tables: ShuffleTables, layer: int, group: np.ndarray | int, token_ids: np.ndarray, history: np.ndarray | None
) -> Preference:
    """Algorithm 3, line 2: the more confident of T (by token id) and A (by the token's devices at earlier layers).

    group: the attention group, or (B,) one for each token; token_ids: (B,); history: (B, lookback) devices, most
    recent layer first, or None where the token has no full history yet and T alone serves.
    """
    rows = known_rows(token_ids, tables.token_ranks.shape[2])
    by_token = tables.token_ranks[layer, group, rows]
    token_confidence = tables.token_confidence[layer, group, rows].astype(np.float32)
    if history is None:
        nothing = np.full(len(token_ids), -1, np.int16)
        return Preference(by_token, token_confidence, nothing, np.zeros(len(token_ids), np.float32))
    path = path_key(history, slices_of(tables))
    by_path = tables.path_ranks[layer, group, path]
    path_confidence = tables.path_confidence[layer, group, path].astype(np.float32)
    token_wins = token_confidence > path_confidence
    return Preference(
        np.where(token_wins, by_token, by_path), np.maximum(token_confidence, path_confidence),
        np.where(token_wins, by_path, by_token), np.minimum(token_confidence, path_confidence),
    )  # fmt: skip


def slices_of(tables: ShuffleTables) -> int:
    """Ranks inside a group, from the shape of A."""
    return round(tables.path_ranks.shape[2] ** (1 / tables.lookback))


def path_key(history: np.ndarray, num_ranks: int) -> np.ndarray:
    """(B,) int64 row in A of each device sequence (B, lookback): the most recent device counts least.

    No device (-1: none of the token's experts in its group) reads as device 0.
    """
    return np.maximum(history, 0).astype(np.int64) @ num_ranks ** np.arange(history.shape[1])


def position_slices(num_tokens: int, num_slices: int) -> np.ndarray:
    """(B,) int16: tokens to equal slices by position, what an engine does without a plan."""
    return (np.arange(num_tokens) // slice_size(num_tokens, num_slices)).astype(np.int16)


def slice_size(num_tokens: int, num_slices: int) -> int:
    """Rows of each slice: reduce-scatter gives every rank equally many, the last ones padded."""
    return max(-(-num_tokens // num_slices), 1)


def assign_slices(preference: Preference, num_slices: int) -> np.ndarray:
    """(B,) int16: tokens to equal slices. Source: Algorithm 3, `group_by_key` and `align`.

    A slice keeps its most confident tokens up to its size; the others, in turn by confidence, go to their second
    choice where that has room, and at last to any free slot. Worked example, two slices for four tokens that prefer
    slices 0, 0, 0, 1 with confidence .9, .5, .7, .6: slice 0 keeps tokens 0 and 2, token 1 moves, so [0, 1, 0, 1].
    """
    tokens = len(preference.first)
    by_first = np.argsort(-preference.first_confidence, kind="stable")
    by_second = np.argsort(-preference.second_confidence, kind="stable")
    size = slice_size(tokens, num_slices)
    return _fill_slices(preference.first, by_first, preference.second, by_second, num_slices, size)


@numba.njit(cache=True)
def _fill_slices(first, by_first, second, by_second, num_slices, size):
    out = np.full(first.shape[0], -1, np.int16)
    room = np.full(num_slices, size, np.int64)
    for choice, order in ((first, by_first), (second, by_second)):
        for t in order:
            if out[t] < 0 and choice[t] >= 0 and room[choice[t]] > 0:
                out[t] = choice[t]
                room[choice[t]] -= 1
    free = 0
    for t in range(first.shape[0]):
        if out[t] < 0:
            while room[free] == 0:
                free += 1
            out[t] = free
            room[free] -= 1
    return out
