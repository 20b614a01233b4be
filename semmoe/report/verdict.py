"""The verdict on each plan: what was predicted for which links, and what was measured."""

from dataclasses import dataclass

from semmoe.report import words
from semmoe.report.gather import Inputs, Measured, PlanFile
from semmoe.report.records import Expected, Figures, SetUp
from semmoe.report.view import Card, Number

BADGES = {"yes": "Worth it", "no": "Not worth it", "open": "No verdict", "wrong": "Outputs differ"}


@dataclass(frozen=True)
class Pair:
    """A plan and vanilla that ran on the same tokens."""

    vanilla: SetUp
    plan: SetUp
    run: Measured  # the plan's

    @property
    def saved(self) -> float:
        """Share of all-to-all bytes; negative: lost."""
        return 1 - self.plan.all_to_all_bytes / max(self.vanilla.all_to_all_bytes, 1e-9)


def measured_pair(inputs: Inputs, plan: PlanFile) -> Pair | None:
    """The run of `plan` and vanilla's on the same tokens; None where one of them is missing.

    A run that names its plan by hash must name this one; one that does not counts if no other plan has this attention.
    """
    prefix = f"attention-{plan.plan.topology.attention.upper()}, "
    alone = sum(p.plan.topology.attention == plan.plan.topology.attention for p in inputs.plans) == 1
    rows = [(row, run) for run in inputs.measured for row in run.set_ups if row.name.startswith(prefix)]
    for row, run in rows:
        if row.name != prefix + "on the plan" or not (row.plan_hash == plan.digest or (alone and not row.plan_hash)):
            continue
        for other, _ in rows:
            if other.name == prefix + "vanilla" and other.forward_tokens == row.forward_tokens:
                return Pair(other, row, run)
    return None


def vanilla_of(expected: Expected, method: str) -> Figures | None:
    """What contiguous placement was expected to do on the same requests."""
    return expected.others.get("linear") if method != "linear" else None


def card(plan: PlanFile, pair: Pair | None, target: str) -> Card:
    sentences = [_predicted(plan)]
    if pair is not None:
        sentences.append(measured_sentence(pair))
    state = _state(plan, pair)
    numbers, source = _numbers(plan, pair)
    title = words.attention(plan.plan.topology)
    return Card(
        title=f"{title}, {plan.plan.topology.ep_size} ranks", state=state, badge=BADGES[state], sentences=sentences,
        numbers=numbers, source=source, target=target,
    )  # fmt: skip


def _state(plan: PlanFile, pair: Pair | None) -> str:
    if pair is not None and pair.plan.identical is False:
        return "wrong"
    verdict = plan.expected.verdict if plan.expected else None
    return "open" if verdict is None else "yes" if verdict.worth_it else "no"


def _predicted(plan: PlanFile) -> str:
    expected = plan.expected
    if expected is None:
        return "Nothing was predicted: the plan holds no figures of held-out requests (semmoe solve writes them)."
    if expected.verdict is None or expected.links is None:
        return (
            "Whether it is worth it was not predicted: the width of the model was not known when the plan was solved "
            "(semmoe solve --hidden-size H --expert-size F)."
        )
    batch = f"{expected.tokens_per_batch:,.0f} tokens a batch"
    links = f"{words.name(expected.links.name)} ({words.name(expected.links.kind)})"
    return f"Predicted for {links}, {batch}: {expected.verdict.sentence}."


def measured_sentence(pair: Pair) -> str:
    outputs = {
        True: "outputs are identical to plain transformers", False: "OUTPUTS DIFFER from plain transformers",
        None: "outputs were not verified",
    }[pair.plan.identical]  # fmt: skip
    speed = pair.plan.tokens_per_second / max(pair.vanilla.tokens_per_second, 1e-9)
    return (
        f"Measured: {words.fewer(pair.saved)} all-to-all bytes than vanilla; {outputs}; tokens/s {words.ratio(speed)} "
        "times vanilla's, which over loopback on one machine says nothing about a cluster's links."
    )


def _numbers(plan: PlanFile, pair: Pair | None) -> tuple[list[Number], str]:
    if pair is not None:
        numbers = _four(
            pair.plan.lar, pair.plan.remote_ranks_per_token, pair.plan.load_max_over_mean, pair.plan.all_to_all_bytes,
            pair.vanilla.lar, pair.vanilla.remote_ranks_per_token, pair.vanilla.load_max_over_mean,
            pair.vanilla.all_to_all_bytes,
        )  # fmt: skip
        return numbers, f"Measured while generating ({pair.run.path})."
    expected = plan.expected
    if expected is None:
        return [], ""
    vanilla = vanilla_of(expected, plan.plan.method)
    numbers = _four(
        expected.lar, expected.remote_ranks_per_token, expected.load_max_over_mean, expected.remote_ranks_per_token,
        *(_merits(vanilla) if vanilla else (None,) * 4),
    )  # fmt: skip
    return numbers, f"Replayed on {words.count(expected.requests, 'request')} held out while solving ({plan.path})."


def _merits(figures: Figures) -> tuple[float | None, ...]:
    rows = figures.remote_ranks_per_token
    return figures.lar, rows, figures.load_max_over_mean, rows


def _four(
    lar: float | None, remote: float | None, load: float, sent: float,
    lar0: float | None = None, remote0: float | None = None, load0: float | None = None, sent0: float | None = None,
) -> list[Number]:  # fmt: skip
    """The four key numbers, the plan's before vanilla's; bytes follow rows where rows are what is known."""
    saved = "–" if not sent0 else words.percent(1 - sent / sent0)
    return [
        Number("Local activation rate", words.share(lar), _compared(lar, lar0, 3)),
        Number("Remote ranks per token", words.ratio(remote), _compared(remote, remote0, 2)),
        Number("All-to-all bytes saved", saved, "of vanilla's" if sent0 else "no vanilla to compare with"),
        Number("Expert load, max / mean", words.ratio(load), _compared(load, load0, 2)),
    ]


def _compared(value: float | None, vanilla: float | None, digits: int) -> str:
    if value is None or vanilla is None:
        return ""
    times = f" (× {value / vanilla:.2f})" if vanilla > 0 else ""
    return f"vanilla {vanilla:.{digits}f}{times}"


def lead(inputs: Inputs, pairs: list[Pair | None]) -> list[str]:
    """The first words of the page: what is predicted, then what was measured, if anything was."""
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
