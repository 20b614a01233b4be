"""The verdict on each plan: the prediction with its links, and the measurement."""

from dataclasses import dataclass

from semmoe.evaluation.results import Figures, GenerateFile
from semmoe.report import words
from semmoe.report.gather import Inputs, PlanFile
from semmoe.report.view import Card, Number


@dataclass(frozen=True)
class Pair:
    """A plan and vanilla that ran on the same tokens."""

    vanilla: GenerateFile
    plan: GenerateFile

    @property
    def saved(self) -> float:
        """Share of vanilla's all-to-all bytes that the plan saves; negative if it sends more."""
        return 1 - self.plan.all_to_all_bytes / max(self.vanilla.all_to_all_bytes, 1e-9)


def measured_pair(inputs: Inputs, plan: PlanFile) -> Pair | None:
    """Return the runs of `plan` and of vanilla on the same tokens; None if either run is missing.

    A run that names its plan by hash must name this plan. One without a hash counts if no other plan has the same
    attention.
    """
    attention = plan.plan.topology.attention
    prefix = f"attention-{attention.upper()}, "
    alone = sum(other.plan.topology.attention == attention for other in inputs.plans) == 1
    rows = [row for _, run in inputs.runs for row in run]
    for row in rows:
        is_ours = row.plan_hash == plan.digest or (alone and not row.plan_hash)
        if row.name != prefix + "on the plan" or not is_ours:
            continue
        for other in rows:
            if other.name == prefix + "vanilla" and other.forward_tokens == row.forward_tokens:
                return Pair(other, row)
    return None


@dataclass(frozen=True)
class Replayed:
    """Replayed figures of a plan and of vanilla, and a description of their source."""

    plan: Figures
    vanilla: Figures | None
    source: str
    load_limit: float | None = None  # on max / mean expert load, which the plan was solved for


def replayed_of(entry: PlanFile) -> Replayed | None:
    """The figures of a plan on requests that were held out while it was solved, layer by layer, if it has them."""
    expected = entry.expected
    if expected is None or not expected.layers:
        return None
    source = f"{words.count(expected.requests, 'request')} held out while solving, {words.name(entry.path)}"
    vanilla = expected.others.get("linear")  # none beside a plan of that method
    return Replayed(expected, vanilla, source, _load_limit(entry))


def _load_limit(entry: PlanFile) -> float | None:
    """The load limit in a plan's settings, which are not trusted: None unless it is a sensible number."""
    settings = entry.plan.settings.get("cocluster")
    limit = settings.get("load_limit") if isinstance(settings, dict) else None
    return float(limit) if isinstance(limit, (int, float)) and 1 <= limit < 1e6 else None


def card(plan: PlanFile, pair: Pair | None, replayed: Replayed | None) -> Card:
    """The verdict on one plan."""
    topology = plan.plan.topology
    measured = [] if pair is None else [_measured(pair)]
    return Card(
        title=f"{words.attention(topology)}, {topology.ep_size} ranks",
        state=_state(plan, pair),
        sentences=[_predicted(plan), *measured, *_warnings(plan, replayed)],
        numbers=_numbers(replayed) if replayed else [],
        source=f"Replayed: {replayed.source}; load is the mean over layers." if replayed else "",
    )


def _state(plan: PlanFile, pair: Pair | None) -> str:
    if pair is not None and pair.plan.identical is False:
        return "wrong"
    verdict = plan.expected.verdict if plan.expected else None
    if verdict is None:
        return "open"
    return "yes" if verdict.worth_it else "no"


def _predicted(plan: PlanFile) -> str:
    expected = plan.expected
    if expected is None:
        return "Nothing was predicted: the plan holds no figures for held-out requests (semmoe solve writes them)."
    if expected.verdict is None or expected.links is None:
        return (
            "Whether it is worth it was not predicted: the width of the model was not known when the plan was solved "
            "(semmoe solve --hidden-size H --expert-size F)."
        )
    batch = f"{expected.tokens_per_batch:,.0f} tokens per batch"
    if expected.running:
        batch += f", {words.count(expected.running, 'request')} at a time on each rank"
    sentence = f"Predicted for {words.links(expected.links)}, {batch}: {expected.verdict.sentence}."
    decode = expected.decode
    if decode is not None and decode.verdict is not None and decode.links is not None:
        sentence += f" For decoding on {words.links(decode.links)}: {decode.verdict.sentence}."
    return sentence


def _measured(pair: Pair) -> str:
    outputs = {
        True: "outputs are identical to plain transformers",
        False: "OUTPUTS DIFFER from plain transformers",
        None: "outputs were not verified",
    }[pair.plan.identical]
    speed = pair.plan.tokens_per_second / max(pair.vanilla.tokens_per_second, 1e-9)
    return (
        f"Measured: {words.fewer(pair.saved)} all-to-all bytes than vanilla; {outputs}; tokens/s {words.ratio(speed)} "
        "times vanilla's, which over loopback on one machine says nothing about a cluster's links."
    )


def _warnings(plan: PlanFile, replayed: Replayed | None) -> list[str]:
    warnings = []
    limit = replayed.load_limit if replayed else None
    if replayed and limit and round(replayed.plan.load_max_over_mean, 2) > limit:
        warnings.append(
            f"Warning: expert load {replayed.plan.load_max_over_mean:.2f}, the mean over layers, is above the limit of "
            f"{limit:g} that the plan was solved for: the requests' mix differs from its profile."
        )
    if plan.expected is not None and plan.expected.scheduled_by_answers:
        requests = words.count(plan.expected.scheduled_by_answers, "request")
        warnings.append(f"Warning: {requests} had answers for prompts, so groups were chosen by what no server knows.")
    return warnings


def _numbers(replayed: Replayed) -> list[Number]:
    """The four key numbers of a plan, means over its layers, beside vanilla's. Bytes are proportional to rows."""
    plan, vanilla = replayed.plan, replayed.vanilla
    highest = max(layer.load_max_over_mean for layer in plan.layers)
    rows = vanilla.remote_ranks_per_token if vanilla else 0
    saved = words.percent(1 - plan.remote_ranks_per_token / rows) if rows else words.NONE
    return [
        _number(words.LAR, plan, vanilla),
        _number(words.REMOTE, plan, vanilla),
        Number("All-to-all bytes saved", saved, "of vanilla's" if rows else "no vanilla to compare with"),
        _number(words.LOAD, plan, vanilla, f"highest layer {highest:.2f}"),
    ]


def _number(column: words.Column, plan: Figures, vanilla: Figures | None, note: str = "") -> Number:
    title, field, write = column
    value, compared = getattr(plan, field), []
    if vanilla is not None:
        other = getattr(vanilla, field)
        compared = [f"vanilla {write(other)}" + (f" (× {value / other:.2f})" if other > 0 else "")]
    return Number(title, write(value), "; ".join([*compared, note] if note else compared))
