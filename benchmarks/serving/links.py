"""Which links make vanilla spend a given share of its time in the all-to-all: a search over rates."""

from collections.abc import Callable, Sequence
from math import sqrt

FASTEST, SLOWEST = 10_000.0, 50.0  # Mbit/s


def search(share_at: Callable[[float], float], targets: Sequence[float], steps: int) -> dict[float, float]:
    """Shares by the links tried (Mbit/s): the ends, then for each target `steps` halvings of what lies around it.

    The share falls as links get faster; it is measured, so that a step may mislead: the nearest that was seen counts.
    """
    seen = {rate: share_at(rate) for rate in (SLOWEST, FASTEST)}
    for target in targets:
        low, high = around(seen, target)
        for _ in range(steps):
            if abs(seen[nearest(seen, target)] - target) <= 0.01 or not seen[high] < target < seen[low]:
                break
            middle = float(f"{sqrt(low * high):.3g}")
            seen[middle] = share_at(middle)
            low, high = (middle, high) if seen[middle] > target else (low, middle)
    return seen


def around(seen: dict[float, float], target: float) -> tuple[float, float]:
    """The fastest link whose share is above the target, and the slowest below it that is faster."""
    low = max((rate for rate, share in seen.items() if share > target), default=min(seen))
    high = min((rate for rate, share in seen.items() if rate > low), default=low)
    return low, high


def nearest(seen: dict[float, float], target: float) -> float:
    """The link whose share came nearest; of equals the fastest."""
    return min(seen, key=lambda rate: (abs(seen[rate] - target), -rate))


def as_tc(rate: float) -> str:
    """Mbit/s in tc's words."""
    return f"{round(1000 * rate)}kbit"
