"""The answer of `semmoe estimate`: figures of every method with their labels, the verdict and where it turns."""

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from semmoe.calibration import Links, tier_of
from semmoe.cost import WORTH
from semmoe.estimate import breakeven, outside
from semmoe.estimate.forecast import HOOKS, Case, Pass, gain, label, run
from semmoe.estimate.routing import PLAN, Routing

TITLES = {
    "vanilla": "vanilla",
    "eplb": "EPLB",
    "plan": "the plan",
    "all-reduce": "expert parallelism without all-to-all",
}
DECODE, PREFILL = "decode", "prefill"
LABELS = ("measured", "fitted", "nominal", "extrapolated")  # from the best to the weakest


def other_model(case: Case, model: Path) -> tuple[dict[bool, outside.Outside] | None, str | None]:
    """What aiconfigurator says of a case as the settings ask, or why it says nothing.

    Raises ValueError if it must be used and cannot.
    """
    asked = case.settings.performance
    if asked == "roofline":
        return None, None
    reason = outside.obstacle(case)
    if reason is None:
        try:
            return outside.ask(case, model), None
        except ValueError as error:
            reason = str(error)
    if asked == "aiconfigurator":
        raise ValueError(f"aiconfigurator cannot be used: {reason}; take --performance roofline")
    return None, reason


def estimate(case: Case, routings: dict[str, Routing], reason: str | None = None) -> dict[str, Any]:
    """Figures of each method, as `results.EstimateFile`. reason: why no other performance model was used."""
    passes = {name: {decode: run(case, routing, decode) for decode in (True, False)}
              for name, routing in routings.items()}  # fmt: skip
    copies = max(routing.redundant_experts for routing in routings.values())
    memory = breakeven.memory(case, copies)
    return {
        "model": case.model.name,
        "gpu": case.gpu.name,
        "settings": {**asdict(case.settings), **asdict(case.topology), "redundant_experts": copies},
        "links": {PREFILL: _note(case.links), DECODE: _note(case.decode_links)},
        "performance": {"source": "aiconfigurator" if case.outside else "roofline", "reason": reason},
        "methods": {name: _figures(case, routings[name], both) for name, both in passes.items()},
        "labels": {
            name: {part: label(case, part, decode) for part in _parts(passes, decode)}
            for name, decode in ((DECODE, True), (PREFILL, False))
        },
        "memory": memory,
        "verdict": _verdict(case, passes) if PLAN in passes else None,
        "break_even": _break_even(case, routings, memory) if PLAN in passes else None,
    }


def _note(links: Links) -> dict[str, Any]:
    return {"name": links.name, "kind": links.kind, "source": links.source, "all_to_all": links.all_to_all}


def weakest(labels: Iterable[str]) -> str:
    """The label that says least for the sum of figures with these labels."""
    return max(labels, key=LABELS.index)


def _parts(passes: dict[str, dict[bool, Pass]], decode: bool) -> list[str]:
    return list(dict.fromkeys(part for both in passes.values() for part in both[decode].parts))


def _figures(case: Case, routing: Routing, both: dict[bool, Pass]) -> dict[str, Any]:
    decode, prefill, asked = both[True], both[False], case.settings
    per_request = prefill.total / asked.prompts + asked.output_length * decode.total / asked.batch
    return {
        "label": routing.label,
        "load": routing.load,
        "ttft_ms": prefill.total * 1e3,
        "tpot_ms": decode.total * 1e3,
        "tokens_per_second_per_gpu": asked.batch / decode.total,
        "with_prefill_tokens_per_second_per_gpu": asked.output_length / per_request,
        "communication_share": decode.exposed,
        "decode_ms": {part: seconds * 1e3 for part, seconds in decode.parts.items()},
        "prefill_ms": {part: seconds * 1e3 for part, seconds in prefill.parts.items()},
        "decode_hidden_ms": decode.hidden * 1e3,
        "prefill_hidden_ms": prefill.hidden * 1e3,
    }


def _verdict(case: Case, passes: dict[str, dict[bool, Pass]]) -> dict[str, Any]:
    """On the time per output token; the sentence also says what the time to the first token gains."""
    others = {name: both[True] for name, both in passes.items() if name != PLAN}
    against = min(others, key=lambda name: others[name].total)
    plan, best = passes[PLAN][True], others[against]
    saved = gain(plan, [best])
    first = gain(passes[PLAN][False], [both[False] for name, both in passes.items() if name != PLAN])
    words = _reason(case, plan, best, saved)
    sentence = f"{words} (against {TITLES[against]}; to the first token {_change(first)})"
    return {"worth_it": saved >= WORTH, "gain": saved, "against": against, "sentence": sentence}


def _reason(case: Case, plan: Pass, best: Pass, saved: float) -> str:
    if saved >= WORTH:
        return f"worth it: {saved:.1%} less time per output token"
    if best.communication == 0:
        return "not worth it: nothing travels between ranks"
    if plan.communication >= best.communication:
        return "not worth it: these links carry the plan's traffic no faster"
    if case.settings.overlap and best.hidden >= 0.99 * best.communication:
        return f"not worth it: communication is hidden behind compute, so that a token takes {_change(saved)}"
    if saved <= 0:
        if plan.parts.get(HOOKS, 0.0) >= plan.total - best.total:
            return "not worth it: what locality saves, semmoe's own kernels cost"
        return "not worth it: what locality saves, its imbalance of expert load costs"
    return f"not worth it: it saves {saved:.1%} of the time per output token, less than {WORTH:.0%}"


def _change(saved: float) -> str:
    return f"{abs(saved):.1%} {'less' if saved >= 0 else 'more'}"


def _break_even(case: Case, routings: dict[str, Routing], memory: dict[str, Any]) -> dict[str, Any]:
    """Where the verdict turns; batches up to those whose requests the KV cache holds."""
    longest = case.settings.input_length + case.settings.output_length
    most = max(int(memory["kv_tokens"] / longest / case.topology.attn_tp_size), case.settings.batch)
    return {
        "bandwidth": asdict(breakeven.bandwidth(case, routings)),
        "batch": asdict(breakeven.batch(case, routings, most)),
    }


def bandwidth_of(case: Case) -> float:
    """GB/s of the links that the break-even is about: between nodes, or inside if there is one node."""
    return tier_of(case.decode_links, case.topology.num_nodes > 1).gigabytes_per_second
