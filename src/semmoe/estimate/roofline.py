"""Time of one pass of a model on one rank, without communication: the slower of operations and memory, per kernel.

A pass is a step of decoding or a prefill. A matrix product of n rows with (i, o) weights of w bytes takes the longer of

    2 n i o / (share of the peak rate)        and        (i o w + n (i w' + 2 o)) / (share of the memory's rate)

(w' = 1 byte for FP8 inputs, else 2), and a fixed time per kernel. Attention takes the longer of its operations on all
(query, key) pairs and of reading the KV cache. Routed experts take the longer of the operations of the busiest rank and
of reading the weights of those of its experts that any token chose. Shares and fixed times are those of `hardware.py`.
"""

from dataclasses import dataclass, replace

from semmoe.estimate.hardware import (
    CORE,
    DENSE,
    EXPERT,
    EXPERTS,
    KERNEL,
    LAUNCH,
    QUANTIZE,
    Gpu,
)
from semmoe.estimate.model import ModelSizes

PROJECTIONS, ATTENTION, SMALL, LAUNCHES = "attention projections", "attention core", "router and norms", "launches"
SHARED, DENSE_LAYERS, HEAD, ROUTED = "shared experts", "dense layers", "output head", "routed experts"
Parts = dict[str, float]  # seconds by part


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one rank does in a pass."""

    decode: bool
    rows: float  # tokens of its own, which it dispatches
    requests: float  # that end in a token, of its own
    context: float  # keys that a token sees, mean
    attn_ranks: int  # ranks of its attention group, which share the attention of all their rows
    ep_size: int
    local_experts: float  # physical experts of a layer on the rank
    kept_bytes: int  # per value of the KV cache

    @property
    def group_rows(self) -> float:
        return self.rows * self.attn_ranks

    def half(self) -> "Work":
        return replace(self, rows=self.rows / 2, requests=self.requests / 2)


def product(rows: float, inputs: float, outputs: float, stored: float, gpu: Gpu) -> float:
    """Seconds of a matrix product of `rows` with (inputs, outputs) weights of `stored` bytes each."""
    operations = 2 * rows * inputs * outputs / (DENSE * gpu.flops_per_second(stored))
    moved = inputs * outputs * stored + rows * (inputs * (1 if stored == 1 else 2) + 2 * outputs)
    return max(operations, moved / gpu.memory_rate) + KERNEL + (QUANTIZE if stored == 1 else 0)


def feed_forward(rows: float, hidden: int, width: float, stored: float, gpu: Gpu) -> float:
    """Seconds of a gated feed-forward network: gate and up in one product, the activation, down."""
    up, down = product(rows, hidden, 2 * width, stored, gpu), product(rows, width, hidden, stored, gpu)
    return up + KERNEL + down


def projections(model: ModelSizes, work: Work, gpu: Gpu) -> float:
    """Seconds of the projections of a layer's attention."""
    return sum(
        product(work.group_rows, one.inputs, one.outputs / (work.attn_ranks if one.split else 1), one.stored, gpu)
        for one in model.attention.projections(model.hidden_size, model.dense_bytes, work.decode)
    )


def core(model: ModelSizes, work: Work, gpu: Gpu) -> float:
    """Seconds of a layer's attention over the keys; its operations are in BF16."""
    keys = model.attention.keys_seen(work.context)
    pairs = work.group_rows * keys
    operations = pairs * model.attention.pair_flops(work.decode) / work.attn_ranks / (CORE * gpu.bf16_teraflops * 1e12)
    read = (pairs if work.decode else work.group_rows) * model.attention.kept_values(work.attn_ranks) * work.kept_bytes
    return max(operations, read / gpu.memory_rate) + KERNEL


def routed(model: ModelSizes, work: Work, load: float, gpu: Gpu) -> float:
    """Seconds of a layer's routed experts on the busiest rank; load: its pairs over the mean of ranks."""
    pairs = load * work.rows * model.top_k
    operations = pairs * model.layer_shape.flops_per_pair / (EXPERT * gpu.flops_per_second(model.expert_bytes))
    missed = (1 - model.top_k / model.num_experts) ** (work.rows * work.ep_size)  # by all tokens of the batch
    weights = work.local_experts * (1 - missed) * model.bytes_per_expert
    return max(operations, weights / gpu.memory_rate) + EXPERTS


def layer(model: ModelSizes, work: Work, moe: bool, gpu: Gpu) -> Parts:
    """Seconds of the parts of one layer, without routed experts."""
    hidden, stored = model.hidden_size, model.dense_bytes
    norms = 2 * (KERNEL + 4 * work.group_rows * hidden / gpu.memory_rate)  # each reads and writes BF16
    parts = {PROJECTIONS: projections(model, work, gpu), ATTENTION: core(model, work, gpu), SMALL: norms}
    if moe:
        parts[SMALL] += product(work.rows, hidden, model.num_experts, 2.0, gpu)
        if model.shared_size:
            parts[SHARED] = feed_forward(work.rows, hidden, model.shared_size, stored, gpu)
    else:
        width = model.dense_size / work.attn_ranks
        parts[DENSE_LAYERS] = feed_forward(work.group_rows, hidden, width, stored, gpu)
    if not work.decode:
        parts[LAUNCHES] = LAUNCH
    return parts


def head(model: ModelSizes, work: Work, gpu: Gpu) -> float:
    """Seconds of the output head, for the last token of every request; ranks of a group share the vocabulary."""
    requests = work.requests * work.attn_ranks
    return product(requests, model.hidden_size, model.vocab_size / work.attn_ranks, 2.0, gpu)
