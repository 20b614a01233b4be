"""Items that show routing as a map: requests by their experts, and tokens against experts."""

from typing import Any

import numpy as np
from scipy.stats import kurtosis
from sklearn.cluster import SpectralCoclustering
from sklearn.manifold import TSNE

from lab.concentration import quantiles, token_counts
from lab.inputs import Inputs, Source
from lab.item import OTHER, PLAN, Cell, Comparison, Item, Result, panel
from semmoe.core import RoutingTrace

NEIGHBOURS = 5
TYPES = 400  # token types shown, those that occur most
CLUSTERS = 8


def figure6a(inputs: Inputs) -> Result:
    """Requests by the experts that they use in a middle layer, in two dimensions."""
    sources = [source for source in inputs.sources if source.domains]
    figure, axes = panel(columns=len(sources), height=4.4)
    rows: list[list[Cell]] = []
    comparisons = []
    for source, axis in zip(sources, axes[0], strict=True):
        layer, domains = source.trace.fingerprint.num_layers // 2, np.array(source.domains)
        shares = request_shares(source.trace, layer)
        at = TSNE(perplexity=min(30.0, (len(shares) - 1) / 3), random_state=inputs.seed).fit_transform(shares)
        for domain in dict.fromkeys(source.domains or []):
            axis.scatter(*at[domains == domain].T, s=9, label=domain)
        axis.set(title=f"{source.name}, layer {layer}", xticks=[], yticks=[])
        axis.legend(fontsize=7)
        rows += [[source.name, domain, float(x), float(y)] for domain, (x, y) in zip(domains, at, strict=True)]
        comparisons.append(_neighbours_beside(source, shares, domains))
    stated = {"method": "t-SNE of each request's shares of experts (scikit-learn), perplexity 30"}
    return Result(
        columns=["source", "kind", "x", "y"], rows=rows, picture=figure, stated=stated, comparisons=comparisons
    )


def request_shares(trace: RoutingTrace, layer: int) -> np.ndarray:
    """(R, E) how a request's choices at `layer` spread over its experts: rows add up to 1, or 0 without tokens."""
    E = trace.fingerprint.num_experts
    cells = trace.request_of_token()[:, None] * E + trace.expert_ids[:, layer].astype(np.int64)
    counts = np.bincount(cells.ravel(), minlength=trace.num_requests * E).reshape(-1, E)
    return counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)


def like_neighbours(shares: np.ndarray, domains: np.ndarray) -> tuple[float, float]:
    """Share of each request's nearest neighbours that are of its kind, from shares (R, E) themselves and not from
    their picture; and what chance would give."""
    distance = ((shares[:, None] - shares[None]) ** 2).sum(axis=2)
    np.fill_diagonal(distance, np.inf)
    nearest = np.argsort(distance, axis=1, kind="stable")[:, :NEIGHBOURS]
    sizes = np.unique(domains, return_counts=True)[1]
    chance = float((sizes * (sizes - 1)).sum() / (len(domains) * (len(domains) - 1)))
    return float((domains[nearest] == domains[:, None]).mean()), chance


def _neighbours_beside(source: Source, shares: np.ndarray, domains: np.ndarray) -> Comparison:
    alike, chance = like_neighbours(shares, domains)
    return Comparison(
        what=f"{source.name}: requests of one topic use like experts",
        published="seen in the picture: subjects of mathematics together, far from philosophy and law",
        measured=f"{alike:.0%} of a request's {NEIGHBOURS} nearest by experts are of its kind, {chance:.0%} by chance",
        why="a number in place of a look; kinds of text are ours, and another model",
    )


def figure6b(inputs: Inputs) -> Result:
    """Tokens against experts of the first layer, both reordered by co-clusters; and how peaked their choices are."""
    figure, axes = panel(columns=2, rows=len(inputs.sources), height=3.6)
    rows: list[list[Cell]] = []
    comparisons = []
    for source, (left, right) in zip(inputs.sources, axes, strict=True):
        frequency, counts = first_layer(source.trace)
        shown = left.imshow(
            reordered(counts, inputs.seed), aspect="auto", cmap="magma_r", interpolation="nearest", rasterized=True
        )
        left.set(
            title=f"{source.name}: {min(TYPES, len(counts))} most frequent token types",
            xlabel="expert, reordered",
            ylabel="token type, reordered",
        )
        figure.colorbar(shown, ax=left, label="share of the token's choices")
        peaks = kurtosis(counts, axis=1, fisher=False)
        for name, weights, ink in (("by type", np.ones(len(peaks)), OTHER), ("by occurrence", frequency, PLAN)):
            right.hist(peaks, bins=30, weights=weights / weights.sum(), alpha=0.6, label=name, color=ink)
            above = float(weights[peaks > 8].sum() / weights.sum())
            rows.append([source.name, name, *quantiles(peaks, weights).values(), above])
        right.set(title="kurtosis of a token's experts", xlabel="kurtosis", ylabel="share of tokens")
        right.legend(fontsize=7)
        comparisons.append(_kurtosis_beside(source, rows[-2:]))
    stated = {"layer": "the first MoE layer", "clusters": f"{CLUSTERS}, spectral co-clustering (scikit-learn)"}
    columns = ["source", "weighted", "kurtosis p25", "p50", "p75", "share above 8"]
    return Result(columns=columns, rows=rows, picture=figure, stated=stated, comparisons=comparisons)


def first_layer(trace: RoutingTrace) -> tuple[np.ndarray, np.ndarray]:
    """(U,) how often each token type occurs, the most frequent first, and (U, E) what it activates in layer 0."""
    frequency = np.bincount(trace.token_ids, minlength=trace.fingerprint.vocab_size)
    types = np.argsort(-frequency, kind="stable")[: int((frequency > 0).sum())]
    return frequency[types], token_counts(trace)[0][types].toarray()


def reordered(counts: np.ndarray, seed: int) -> np.ndarray:
    """(min(U, TYPES), E) shares of each token type's choices, types and experts by co-cluster. counts: (U, E)."""
    shares = counts[:TYPES] / (counts[:TYPES].sum(axis=1, keepdims=True))
    used = np.flatnonzero(shares.sum(axis=0))  # the clustering divides by each expert's sum
    model = SpectralCoclustering(n_clusters=min(CLUSTERS, len(used), len(shares)), random_state=seed)
    model.fit(shares[:, used])
    rows, columns = (np.argsort(labels, kind="stable") for labels in (model.row_labels_, model.column_labels_))
    return shares[rows][:, used[columns]]


def _kurtosis_beside(source: Source, rows: list[list[Any]]) -> Comparison:
    f = source.trace.fingerprint
    chosen = f.top_k / f.num_experts
    even = 1 / (chosen * (1 - chosen)) - 3
    return Comparison(
        what=f"{source.name}: tokens whose experts have a kurtosis above 8",
        published="most",
        measured=f"{rows[0][-1]:.0%} of types, {rows[1][-1]:.0%} by occurrence; medians {rows[0][3]:.1f} and "
        f"{rows[1][3]:.1f}",
        why=f"a token that always takes the same {f.top_k} of {f.num_experts} experts has {even:.1f}, one that always "
        "takes the same 6 of 64 (DeepSeek-V2-Lite) 8.8",
    )


ITEMS = [
    Item(name="figure6a", title="Requests by the experts they use", needs="routing", seconds=15, make=figure6a),
    Item(name="figure6b", title="Tokens against experts", needs="routing", seconds=5, make=figure6b),
]
