"""What may be said of paired rounds: ratios within a round, intervals of their median, and the rule against a placebo.

Pure functions of numbers. A round gives one figure for each configuration; a ratio is to another configuration in the
same round. Intervals are bootstrap intervals of the median over rounds, with a fixed seed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE, RESAMPLES = 0.90, 4000
ROUNDS = 7  # fewer allow no claim: the median of few rounds has an interval as wide as their range
TAIL = 1000  # requests from which a 99th percentile is told
NO_DIFFERENCE, TOO_FEW = "no difference seen", "too few rounds"


@dataclass(frozen=True)
class Estimate:
    """A median of paired ratios and its interval."""

    ratio: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.ratio:.2f} [{self.low:.2f}, {self.high:.2f}]"


def paired_ratios(own: Mapping[int, float], base: Mapping[int, float]) -> np.ndarray:
    """own / base (rounds,), by round, of the rounds that both have."""
    return np.array([own[i] / base[i] for i in sorted(own.keys() & base.keys()) if base[i]])


def estimate(ratios: np.ndarray, seed: int = 0) -> Estimate:
    """The median of ratios (rounds,), at least one, and its bootstrap interval."""
    drawn = np.random.default_rng(seed).choice(ratios, (RESAMPLES, len(ratios)))
    outside = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.median(drawn, axis=1), (outside, 1 - outside))
    return Estimate(float(np.median(ratios)), float(low), float(high), len(ratios))


def hull(placebos: Sequence[Estimate]) -> Estimate:
    """What the placebos span, widened to 1: differences within it are of the method of measurement."""
    low = min([1.0, *(p.low for p in placebos)])
    high = max([1.0, *(p.high for p in placebos)])
    rounds = min((p.rounds for p in placebos), default=0)
    return Estimate(1.0, low, high, rounds)


def claim(found: Estimate, placebos: Sequence[Estimate], least: int = ROUNDS) -> str:
    """The estimate as text if its interval lies outside of what the placebos span; else why nothing is claimed."""
    span = hull(placebos)
    if min(found.rounds, span.rounds) < least:
        return TOO_FEW
    return str(found) if found.low > span.high or found.high < span.low else NO_DIFFERENCE


def holds(found: Estimate, limit: float, placebos: Sequence[Estimate]) -> bool:
    """Whether the upper end of a ratio of times is at most `limit`, or no higher than a placebo's."""
    return found.high <= max([limit, *([hull(placebos).high] if placebos else [])])


def tail(times: Sequence[float]) -> tuple[str, float]:
    """The 99th percentile where there are enough requests, else the slowest; with its name."""
    if len(times) >= TAIL:
        return "p99", float(np.percentile(times, 99))
    return f"slowest of {len(times)}", max(times)


def bound(share: float, kept: float) -> float:
    """The most that throughput can gain where `share` of the time is all-to-all and `kept` of its bytes remain."""
    return 1 / (1 - share + share * kept)


def order(names: Sequence[str], i: int) -> list[str]:
    """The order of configurations in round i: all rotations, then those of the reverse, so that places are balanced.

    Of three, six rounds have all six orders.
    """
    n = len(names)
    turned = [*names[i % n :], *names[: i % n]]
    return turned[::-1] if (i // n) % 2 else turned
