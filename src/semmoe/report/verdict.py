"""The verdict on each plan: what was predicted, for which links, and what was measured."""

from dataclasses import dataclass

from semmoe.report import words
from semmoe.report.gather import Inputs, Measured, PlanFile
from semmoe.report.view import Card, Number
from semmoe.results import Figures, GenerateFile

Either = Figures | GenerateFile


@dataclass(frozen=True)
class Pair:
    """A plan and vanilla that ran on the same tokens."""

    vanilla: GenerateFile
    plan: GenerateFile
    run: Measured  # the plan's

    @property
    def saved(self) -> float:
        """Share of vanilla's all-to-all bytes that the plan saves; negative if it sends more."""
        return 1 - self.plan.all_to_all_bytes / max(self.vanilla.all_to_all_bytes, 1e-9)


def measured_pair(inputs: Inputs, plan: PlanFile) -> Pair | None:
    """The run of `plan`, and vanilla's on the same tokens; None where one of them is missing.

    A run that names its plan by hash must name this plan. One without a hash counts if no other plan has the same
    attention.
    """
    prefix = f"attention-{plan.plan.topology.attention.upper()}, "
    alone = sum(p.plan.topology.attention == plan.plan.topology.attention for p in inputs.plans) == 1
    rows = [(row, run) for run in inputs.measured for row in run.rows if row.name.startswith(prefix)]
    for row, run in rows:
        if row.name != prefix + "on the plan" or not (row.plan_hash == plan.digest or (alone and not row.plan_hash)):
            continue
        for other, _ in rows:
            if other.name == prefix + "vanilla" and other.forward_tokens == row.forward_tokens:
                return Pair(other, row, run)
    return None


def _vanilla(figures: dict[str, Figures], method: str) -> Figures | None:
    """The figures of contiguous placement beside those of `method`, unless it is that method."""
    return figures.get("linear") if method != "linear" else None


@dataclass(frozen=True)
class Replayed:
    """Replayed figures of a plan and of vanilla, and a description of their source."""

    plan: Figures
    vanilla: Figures | None
    source: str
    load_limit: float | None = None  # on max / mean expert load, which the plan was solved for

    def sides(self) -> list[tuple[str, Figures]]:
        vanilla = [] if self.vanilla is None else [("vanilla", self.vanilla)]
        return [*vanilla, ("plan", self.plan)]


def replayed_of(inputs: Inputs, entry: PlanFile) -> Replayed | None:
    """Replayed figures of a plan, layer by layer: from requests held out while solving, else from a replay's file."""
    plan, expected, limit = entry.plan, entry.expected, _load_limit(entry)
    if expected is not None and expected.layers:
        where = f"{words.count(expected.requests, 'request')} held out while solving, {words.name(entry.path)}"
        return Replayed(expected, _vanilla(expected.others, plan.method), where, limit)
    t = plan.topology
    for path, replay in inputs.replays:
        same = all(replay.settings.get(k) == v for k, v in (("ep_size", t.ep_size), ("dp_size", t.dp_size)))
        own = replay.methods.get(plan.method)
        if same and own is not None and own.layers:
            vanilla = _vanilla(replay.methods, plan.method)
            seen = ", partly on requests that it was solved on" if replay.settings.get("profiled") else ""
            return Replayed(own, vanilla, f"method {words.name(plan.method)} in {words.name(path)}{seen}", limit)
    return None


def _load_limit(entry: PlanFile) -> float | None:
    """The load limit in a plan's settings, which are not trusted: None unless it is a sensible number."""
    settings = entry.plan.settings.get("cocluster")
    limit = settings.get("load_limit") if isinstance(settings, dict) else None
    return float(limit) if isinstance(limit, (int, float)) and 1 <= limit < 1e6 else None


def card(plan: PlanFile, pair: Pair | None, replayed: Replayed | None, target: str) -> Card:
    """The verdict on one plan; `target` is the id of its section."""
    sentences = [_predicted(plan)]
    if pair is not None:
        sentences.append(_measured(pair))
    sentences += _warnings(plan, replayed)
    numbers, source = _numbers(pair, replayed)
    title = f"{words.attention(plan.plan.topology)}, {plan.plan.topology.ep_size} ranks"
    return Card(title, _state(plan, pair), sentences, numbers, source, target)


def _state(plan: PlanFile, pair: Pair | None) -> str:
    if pair is not None and pair.plan.identical is False:
        return "wrong"
    verdict = plan.expected.verdict if plan.expected else None
    return "open" if verdict is None else "yes" if verdict.worth_it else "no"


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
    batch += f", {words.count(expected.running, 'request')} at a time on each rank" if expected.running else ""
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
    found = []
    load, limit = (replayed.plan.load_max_over_mean, replayed.load_limit) if replayed else (0.0, None)
    if limit and round(load, 2) > limit:
        found.append(
            f"Warning: expert load {load:.2f}, the mean over layers, is above the limit of {limit:g} that the plan was "
            "solved for: the mix of these requests differs from its profile."
        )
    if plan.expected is not None and plan.expected.scheduled_by_answers:
        requests = words.count(plan.expected.scheduled_by_answers, "request")
        found.append(f"Warning: {requests} had answers for prompts, so groups were chosen by what no server knows.")
    return found


def _numbers(pair: Pair | None, replayed: Replayed | None) -> tuple[list[Number], str]:
    """Means of the figures in the plan's section; those of a run only where nothing was replayed."""
    if replayed is not None:
        highest = f"highest layer {max(layer.load_max_over_mean for layer in replayed.plan.layers):.2f}"
        numbers = _four(replayed.plan, replayed.vanilla, "remote_ranks_per_token", highest)
        return numbers, f"Replayed: {replayed.source}; load is the mean over layers."
    if pair is not None:
        return _four(pair.plan, pair.vanilla, "all_to_all_bytes"), f"Measured while generating ({pair.run.path})."
    return [], ""


def _four(plan: Either, vanilla: Either | None, field: str, load_note: str = "") -> list[Number]:
    """The four key numbers beside vanilla's. field: of the bytes sent, or of rows, to which bytes are proportional."""
    sent, vanilla_sent = getattr(plan, field), getattr(vanilla, field, None)
    saved = words.percent(1 - sent / vanilla_sent) if sent is not None and vanilla_sent else "–"
    return [
        _number(words.LAR, plan, vanilla),
        _number(words.REMOTE, plan, vanilla),
        Number("All-to-all bytes saved", saved, "of vanilla's" if vanilla_sent else "no vanilla to compare with"),
        _number(words.LOAD, plan, vanilla, load_note),
    ]


def _number(column: words.Column, plan: Either, vanilla: Either | None, note: str = "") -> Number:
    title, field, write = column
    value, other = getattr(plan, field), getattr(vanilla, field, None)
    compared = ""
    if value is not None and other is not None:
        compared = f"vanilla {write(other)}" + (f" (× {value / other:.2f})" if other > 0 else "")
    return Number(title, write(value), "; ".join(filter(None, [compared, note])))


def lead(inputs: Inputs, pairs: list[Pair | None]) -> list[str]:
    """The first sentences of the page: what is predicted and, if anything was measured, what was measured."""
    return [sentence for sentence in (_lead_predicted(inputs), _lead_measured(inputs, pairs)) if sentence]


def _lead_predicted(inputs: Inputs) -> str:
    said: dict[tuple[str, bool], list[str]] = {}
    for plan in inputs.plans:
        verdict, links = (plan.expected.verdict, plan.expected.links) if plan.expected else (None, None)
        if verdict is not None and links is not None:
            said.setdefault((words.name(links.name), verdict.worth_it), []).append(_short(plan))
    parts = []
    for (links_name, worth), names in said.items():
        all_of_them = len(names) == len(inputs.plans)
        which = "" if all_of_them else f" for {words.listed(names)}"
        parts.append(f"{'worth it' if worth else 'not worth it'}{which} on {links_name}")
    return f"Predicted: {'; '.join(parts)}." if parts else "Whether this is worth it was not predicted."


def _lead_measured(inputs: Inputs, pairs: list[Pair | None]) -> str:
    known = [(plan, pair) for plan, pair in zip(inputs.plans, pairs, strict=True) if pair is not None]
    if not known:
        return ""
    one = len(inputs.plans) == 1
    saved = [words.fewer(pair.saved) + ("" if one else f" ({_short(plan)})") for plan, pair in known]
    same = [pair.plan.identical for _, pair in known]
    outputs = "outputs not all verified" if None in same else "outputs identical"
    if False in same:
        outputs = "OUTPUTS DIFFER"
    return f"Measured: {words.listed(saved)} all-to-all bytes than vanilla, {outputs}."


def _short(plan: PlanFile) -> str:
    return words.attention(plan.plan.topology).removeprefix("Attention ")
