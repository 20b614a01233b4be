"""Items that look at routing alone: how concentrated it is, and how one layer foretells the next."""

import numpy as np

from lab.concentration import concentration
from lab.inputs import Inputs, Source
from lab.item import MODEL_DIFFERS, Cell, Comparison, Item, Result, panel, span
from lab.prediction import next_layer_hit_rate
from lab.readings import readings
from semmoe.traces.affinity import pair_count
from semmoe.traces.split import split

STATISTICS = ("f1", "cumulative_hotness", "max_other_hotness")
QUANTILES = ("p25", "p50", "p75")


def table1(inputs: Inputs) -> Result:
    """Concentration of each token's experts, per token type as published, and weighted by occurrence."""
    rows: list[list[Cell]] = []
    comparisons: list[Comparison] = []
    figure, axes = panel(columns=len(inputs.sources))
    for source, axis in zip(inputs.sources, axes[0], strict=True):
        layers = concentration(source.trace)
        for form in ("by_type", "by_occurrence"):
            rows += [
                [
                    source.name,
                    one["layer"],
                    form.replace("_", " "),
                    *(one[form][s][q] for s in STATISTICS for q in QUANTILES),
                ]
                for one in layers
            ]
            axis.plot([one[form]["f1"]["p50"] for one in layers], label=f"F1, {form.replace('_', ' ')}")
            axis.plot(
                [one[form]["cumulative_hotness"]["p50"] for one in layers],
                "--",
                label=f"hotness of the top k, {form.replace('_', ' ')}",
            )
        axis.set(title=source.name, xlabel="MoE layer", ylabel="median", ylim=(0, 1.02))
        axis.legend(fontsize=7)
        comparisons += _concentration_beside(source, layers, inputs.seed)
    columns = ["source", "layer", "weighted", *(f"{s} {q}" for s in STATISTICS for q in QUANTILES)]
    stated = {
        "split": "none: the same requests profile and are predicted, as published; precision and F1 of A.2: 25 % "
        "of the requests profile, near-duplicates on one side"
    }
    return Result(columns=columns, rows=rows, picture=figure, stated=stated, comparisons=comparisons)


def _concentration_beside(source: Source, layers: list[dict], seed: int) -> list[Comparison]:
    f1 = [one["by_type"]["f1"]["p50"] for one in layers]
    weighted = [one["by_occurrence"]["f1"]["p50"] for one in layers]
    hotness = [one["by_type"]["cumulative_hotness"]["p50"] for one in layers]
    rare = "per type it is flattered by rare tokens: one seen once has 1 by construction"
    return [
        Comparison(
            what=f"{source.name}: median F1 of a token's hottest k, by layer",
            published="0.833 to 1.000",
            measured=f"{span(f1)} per type, {span(weighted)} by occurrence",
            why=f"{MODEL_DIFFERS}; {rare}",
        ),
        Comparison(
            what=f"{source.name}: their share of its activations",
            published="0.833 to 1.000",
            measured=span(hotness),
            why=MODEL_DIFFERS,
        ),
        *_readings_beside(source, seed),
    ]


def _readings_beside(source: Source, seed: int) -> list[Comparison]:
    """A.2's precision and F1 by every reading, on requests that were not profiled and on the profiled ones."""
    out = []
    whole = source.trace, source.trace
    for requests, traces in (("not profiled", split(source.trace, 0.25, seed)), ("profiled too", whole)):
        for name, (precision, _, f1) in readings(*traces).items():
            out.append(
                Comparison(
                    what=f"{source.name}: precision and F1, requests {requests}, reading: {name}",
                    published="0.963 and 0.788",
                    measured=f"{precision:.3f} and {f1:.3f}",
                    why=f"{MODEL_DIFFERS}, and a smaller profile; the paper does not say what it counts",
                )
            )
    return out


def figure6c(inputs: Inputs) -> Result:
    """Correlation of the experts of two neighbouring layers, and prediction of a layer from those before it."""
    figure, axes = panel(height=4.0, columns=len(inputs.sources) + 1)
    rows: list[list[Cell]] = []
    comparisons: list[Comparison] = []
    axes = axes[0]
    for source, axis in zip(inputs.sources, axes[:-1], strict=True):
        correlation = layer_correlation(source, layer := min(3, source.trace.fingerprint.num_layers - 2))
        shown = axis.imshow(correlation[:, np.argsort(correlation.argmax(axis=0), kind="stable")], cmap="magma")
        axis.set(
            title=f"{source.name}: layers {layer} and {layer + 1}",
            xlabel="expert of the later layer, reordered",
            ylabel="expert of the earlier layer",
        )
        figure.colorbar(shown, ax=axis, label="correlation")
        curve = next_layer_hit_rate(source.trace, 5, 0.25, inputs.seed)
        axes[-1].plot([p["lookback"] for p in curve], [p["hit_rate"] for p in curve], "o-", label=source.name)
        rows += [[source.name, point["lookback"], point["hit_rate"]] for point in curve]
        last = curve[-1]
        comparisons.append(
            Comparison(
                what=f"{source.name}: share of the next layer's experts found, looking back up to five layers",
                published="about 0.70 at five",
                measured=f"{last['hit_rate']:.3f} at {last['lookback']}",
                why="the paper has Mixtral-8x7B (2 of 8) and does not say how it predicts; here a linear fit",
            )
        )
    axes[-1].set(title="looking back", xlabel="layers before", ylabel="share found", ylim=(0, 1))
    axes[-1].legend(fontsize=7)
    stated = {"split": "25 % of the requests fit, the rest are predicted, near-duplicates on one side"}
    return Result(
        columns=["source", "lookback", "hit rate"], rows=rows, picture=figure, stated=stated, comparisons=comparisons
    )


def layer_correlation(source: Source, layer: int) -> np.ndarray:
    """(E, E) correlation of "chose expert i at `layer`" and "chose expert j at the next", over tokens."""
    trace, E = source.trace, source.trace.fingerprint.num_experts
    both = np.asarray(pair_count(trace.expert_ids[:, layer], trace.expert_ids[:, layer + 1], E)) / trace.num_tokens
    first, second = (
        np.bincount(trace.expert_ids[:, l].ravel(), minlength=E) / trace.num_tokens for l in (layer, layer + 1)
    )
    spread = np.sqrt(np.outer(first * (1 - first), second * (1 - second)))
    return np.divide(both - np.outer(first, second), spread, out=np.zeros((E, E)), where=spread > 0)


ITEMS = [
    Item(name="table1", title="Concentration of a token's experts", needs="routing", seconds=20, make=table1),
    Item(name="figure6c", title="Experts of neighbouring layers", needs="routing", seconds=30, make=figure6c),
]
