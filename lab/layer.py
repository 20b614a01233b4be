"""Where the time of one layer goes, from runs of the shipped model on local processes."""

from collections.abc import Sequence
from statistics import median

from semmoe.engines.transformers.generate import GenerateResult

PARTS = {
    "attention": ("attention",),
    "reduce-scatter": ("reduce_scatter",),
    "all-gather": ("all_gather",),
    "all-reduce": ("all_reduce",),
    "dispatch": ("dispatch",),
    "experts": ("experts",),
    "combine": ("combine",),
    "other groups": ("control",),
}


def layer_parts(of: Sequence[GenerateResult], layers: int) -> dict[str, float]:
    """Milliseconds per layer and 1,000 tokens, of a mean rank, waiting for slower ranks included; median of rounds.

    `rest`: norms, routing, packing, the output layer.
    """
    unit = [1e6 / (layers * r.forward_tokens) for r in of]
    seconds = [{**r.collective_seconds, **r.compute_seconds} for r in of]
    out = {
        part: median(u * sum(s.get(k, 0.0) for k in kinds) for u, s in zip(unit, seconds, strict=True))
        for part, kinds in PARTS.items()
    }
    total = median(u * r.seconds for u, r in zip(unit, of, strict=True))
    return out | {"rest": total - sum(out.values()), "total": total}
