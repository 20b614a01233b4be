"""Where a plan would pay: its gain on slower and faster links, in smaller and larger batches."""

from fractions import Fraction

import numpy as np

from semmoe.cost import WORTH
from semmoe.report import figures, words
from semmoe.report.view import Figure, Panel, Scale, Table
from semmoe.results import Expected


def pays(expected: Expected | None) -> Figure | None:
    """None for a plan that was solved without links, or before this was predicted."""
    if expected is None or expected.elsewhere is None or expected.links is None:
        return None
    found = expected.elsewhere
    gains = 100 * np.array(found.gains)
    links, batches = list(map(_times, found.bandwidths)), list(map(words.whole, found.batch_tokens))
    high = max(float(gains.max()), 100 * WORTH)
    row = int(np.argmin(np.abs(np.array(found.batch_tokens) - expected.tokens_per_batch)))
    here = row, int(np.argmin(np.abs(np.array(found.bandwidths) - 1)))
    spec = figures.named_grid(gains, links, batches, "bandwidth of the links", "tokens per batch", high, here)
    says = (
        f"Less time for a MoE layer than the best alternative, predicted for {words.links(expected.links)} (the frame "
        "is the verdict's cell), and for links of another bandwidth and the same latency. A gain below "
        f"{WORTH:.0%} is no gain. Larger and smaller batches are taken to be routed and balanced as those that were "
        "replayed."
    )
    rows = [[batch, *(f"{gain:+.1f}" for gain in row)] for batch, row in zip(batches, gains, strict=True)]
    table = Table("Gain in per cent, by tokens per batch and bandwidth", ["tokens", *links], rows)
    label = f"Gain of the plan from {gains.min():+.0f} % to {gains.max():+.0f} % over links and batches"
    scale = Scale("0 % or less", f"{high:+.0f} %", "gain")
    return Figure(title="Where it pays", says=says, panels=[Panel("", spec, label)], tables=[table], scale=scale)


def _times(factor: float) -> str:
    return "these" if factor == 1 else f"{Fraction(factor).limit_denominator(64)} times"
