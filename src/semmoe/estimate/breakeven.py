"""Where a plan begins to pay: the speed of links and the batch at which its gain reaches `cost.WORTH`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from semmoe.cost import WORTH
from semmoe.estimate.forecast import Case, gain, run, with_bandwidth, with_batch
from semmoe.estimate.routing import PLAN, Routing
from semmoe.estimate.settings import MOST_BATCH

SPEEDS = np.geomspace(0.1, 10_000, 26)  # GB/s


@dataclass(frozen=True)
class BreakEven:
    """The value at which worth and not worth meet; None with `when` "always" or "never"."""

    when: str  # "below", "from", "always" or "never"
    value: float | None = None


def decode_gain(case: Case, routings: dict[str, Routing]) -> float:
    """The share of the time per output token that the plan saves against the best of the others."""
    passes = {name: run(case, routing, decode=True) for name, routing in routings.items()}
    plan = passes.pop(PLAN)
    return gain(plan, list(passes.values()))


def bandwidth(case: Case, routings: dict[str, Routing]) -> BreakEven:
    """The highest speed of links between nodes (inside, of one node), in GB/s, below which the plan pays."""

    def worth(speed: float) -> bool:
        return decode_gain(with_bandwidth(case, speed), routings) >= WORTH

    paying = [worth(float(speed)) for speed in SPEEDS]
    if not any(paying):
        return BreakEven("never")
    if paying[-1]:
        return BreakEven("always")
    last = max(i for i, pays in enumerate(paying) if pays)
    low, high = float(SPEEDS[last]), float(SPEEDS[last + 1])
    for _ in range(20):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if worth(middle) else (low, middle)
    return BreakEven("below", low)


def batch(case: Case, routings: dict[str, Routing], most: int) -> BreakEven:
    """The smallest batch, in requests per GPU and of at most `most`, from which on the plan pays."""

    def worth(size: int) -> bool:
        return decode_gain(with_batch(case, size), routings) >= WORTH

    sizes = _sizes(min(max(most, 1), MOST_BATCH))
    paying = [worth(size) for size in sizes]
    if not paying[-1]:
        return BreakEven("never")
    if all(paying):
        return BreakEven("always")
    last = max(i for i, pays in enumerate(paying) if not pays)
    return BreakEven("from", _first(worth, sizes[last], sizes[last + 1]))


def _sizes(most: int) -> list[int]:
    """Powers of two up to `most`, and `most`."""
    return [*(1 << i for i in range(most.bit_length()) if 1 << i < most), most]


def _first(worth: Callable[[int], bool], low: int, high: int) -> int:
    """The smallest size above `low`, which does not pay, and up to `high`, which does."""
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if worth(middle) else (middle, high)
    return high


def memory(case: Case, redundant_experts: int) -> dict[str, Any]:
    """What copies take from the KV cache of a GPU; tokens are those of all requests together."""
    model, topology, asked = case.model, case.topology, case.settings
    room = case.gpu.gigabytes * 1e9 * asked.memory_share
    weights = model.bytes_per_gpu(topology.attn_tp_size, model.num_experts / topology.ep_size)
    copies = redundant_experts / topology.ep_size * model.moe_layers * model.bytes_per_expert
    per_token = model.attention.kept_values(topology.attn_tp_size) * asked.kept_bytes * model.num_layers
    left = room - weights
    if left <= 0:
        raise ValueError(
            f"{model.name} does not fit: its weights take {weights / 1e9:,.0f} GB of each GPU, and there are "
            f"{room / 1e9:,.0f} GB for weights and KV cache: take more ranks"
        )
    return {
        "weights_gb": weights / 1e9,
        "copies_gb": copies / 1e9,
        "kv_tokens": max(left - copies, 0) / per_token,
        "kv_tokens_without_copies": left / per_token,
        "kv_lost": min(copies / left, 1.0),
    }
