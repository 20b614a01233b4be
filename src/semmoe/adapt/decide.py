"""The decisions of `semmoe adapt`: pure functions of what was seen, replayed and measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from semmoe.moving import Weighed
from semmoe.settings import AdaptSettings
from semmoe.watch import Look, View, view

SURE = 2.0  # times the error of a plan's gain that it must gain
STARVED = 0.5  # of a core: with less a solver takes twice its time


@dataclass(frozen=True, kw_only=True)
class Score:
    """What a plan does for requests on which it was not solved, by replay."""

    lar: float
    even: float  # what an even spread of experts, without a plan, keeps local: 1 / ranks
    parts: tuple[float, ...]  # the same for parts of the requests, by which it is known how sure a difference is
    seconds_per_token: float  # of a MoE layer on the links; 0 where the model's widths are not known


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What is done, why, and from which figures: one line of JSON."""

    action: str  # watch, record, solve, keep, swap, stay, back, fail or off
    why: str
    figures: dict[str, Any]


def wants(seen: View, expected: float | None, quiet: float, more: int, enough: int, s: AdaptSettings) -> Decision:
    """Whether to record requests now: since they drifted, or since it is time.

    quiet: seconds since the last solve. more: requests that were recorded since; with `enough` of them a plan is solved
    where this one does what is expected of it too, since another may be better by far.
    """
    figures = {"lar": seen.lar, "expected_lar": expected, "pairs": seen.pairs, "quiet": round(quiet, 1)}
    if s.schedule and quiet >= s.schedule:
        return Decision(action="record", why=f"the last plan was solved {quiet:.0f} s ago", figures=figures)
    if seen.known_lar is None:
        return Decision(action="watch", why="too few tokens to judge", figures=figures)
    if not seen.below(expected, s.margin):
        if more < enough or quiet < s.rest:
            return Decision(action="watch", why="requests are as expected", figures=figures)
        why = f"{more:,} requests were recorded since the last solve"
        return Decision(action="record", why=why, figures=figures)
    if quiet < s.rest:
        return Decision(action="watch", why=f"the last solve was {quiet:.0f} s ago", figures=figures)
    why = f"local activation rate {seen.lar:.3f}, expected {expected:.3f}"
    return Decision(action="record", why=why, figures=figures)


def with_core(decision: Decision, core: float) -> Decision:
    """A decision, and what its solver had of a core, which is said where it was little.

    core: seconds of computing per second that passed.
    """
    late = f"; the solver had {core:.2f} of a core, so that plans come late: leave it one (taskset)"
    why = decision.why + late * (core < STARVED)
    return replace(decision, why=why, figures={**decision.figures, "solver_core": round(core, 2)})


def drifted_since(looks: Sequence[Look], expected: float | None, s: AdaptSettings) -> float:
    """The time of the look from which on every reading is below what is expected; the last look's if none is.

    A reading of too few tokens says nothing and is passed over. looks: two or more, oldest first.
    """
    since = looks[-1].time
    for before, after in zip(reversed(list(looks)[:-1]), reversed(looks), strict=False):
        seen = view(before, after)
        if seen.below(expected, s.margin):
            since = before.time
        elif seen.known_lar is not None:
            break
    return since


def too_little(old: Score, new: Score, least_gain: float) -> str:
    """Why the new plan does not gain enough, or "": a share of what it gains over an even spread, and SURE errors."""
    gain, error = new.lar - old.lar, float(np.std(np.subtract(new.parts, old.parts), ddof=1) / np.sqrt(len(new.parts)))
    if gain < (least := least_gain * max(new.lar - new.even, 0.0)):
        return f"the new plan keeps {gain:+.3f} of pairs local, less than {least:.3f}"
    if gain < SURE * error:
        return f"the new plan keeps {gain:+.3f} of pairs local, with an error of {error:.3f}"
    return ""


def judge(old: Score, new: Score, weighed: Weighed, s: AdaptSettings) -> Decision:
    """Whether the new plan is swapped in: where it is more local by the least gain, and pays for the move."""
    gain = new.lar - old.lar
    figures = {"old_lar": old.lar, "new_lar": new.lar, "saved": weighed.saved, "cost": weighed.cost,
               "pays_after": None if weighed.after == inf else weighed.after}  # fmt: skip
    if why := too_little(old, new, s.least_gain):
        return Decision(action="keep", why=why, figures=figures)
    if weighed.cost > 0 and not weighed.pays:
        why = f"the move takes {weighed.cost:.3g} s, and {weighed.saved * s.horizon:.3g} s are saved in {s.horizon:g} s"
        return Decision(action="keep", why=why, figures=figures)
    return Decision(action="swap", why=f"{gain:+.3f} of pairs local", figures=figures)


def confirm(before: float | None, after: View, predicted: float, again: bool, s: AdaptSettings) -> Decision:
    """After a swap: whether the gain is there. before: the local activation rate that was seen on the old plan.

    predicted: the gain in replay. again: whether the old plan will be replayed on requests since the swap. Where these
    go on changing the rate falls by itself, so that then only a fall by more than the margin is the new plan's.
    """
    figures = {"before": before, "after": after.lar, "predicted_gain": predicted, "pairs": after.pairs}
    if before is None or after.known_lar is None:
        return Decision(action="watch", why="too few tokens to judge the swap", figures=figures)
    gain = after.known_lar - before
    if gain < (-s.margin if again else s.least_share * predicted):
        why = f"{gain:+.3f} of pairs local was measured, {predicted:+.3f} predicted"
        return Decision(action="back", why=why, figures=figures)
    return Decision(action="stay", why=f"{gain:+.3f} of pairs local was measured", figures=figures)
