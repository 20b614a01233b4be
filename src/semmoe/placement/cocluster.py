"""semmoe's own placement: put experts and their copies where the tokens that use them will be, under a load limit.

Every layer is searched on its own (`placement.search` states the objective), from seeded starts and then by iterated
local search: perturb the best layout by a few random swaps, search again, and keep the better layout. The search runs
under several load caps per layer. Then one layout per layer is chosen, so that the mean load over layers in a batch of
unseen requests stays within the limit at the least traffic. All layers have one shadow price, since their times add.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count

import numpy as np

from semmoe.affinity import pair_count
from semmoe.core import Placement, RoutingTrace
from semmoe.metrics import layer_traffic
from semmoe.placement.copies import LOAD_PRICE, level, nearest_copies, primary_copy_choice
from semmoe.placement.greedy import place_layer
from semmoe.placement.homes import make_state
from semmoe.placement.search import improve
from semmoe.settings import CoclusterSettings
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.predictor import Predictor, predict, sample_requests
from semmoe.tokens.slices import assign
from semmoe.topology import Topology, physical_experts

# A search uses this many tokens per expert, without and with redundant experts, and at most this many tokens. It judges
# MOVES moves for the first load cap and half as many for each other, which bounds its time for many experts.
SINGLE_TOKENS, COPIES_TOKENS, MAX_TOKENS = 2048, 128, 1 << 15
MOVES = 100_000
KEPT = 8  # layouts kept per load cap; the choice among them is by their cost under predicted instead of true routing
EASY_SWAPS = 200  # random swaps per expert that form a start from the affinity of expert pairs alone
# Load caps to try, relative to the limit: the load on the profile is lower than in a batch of other requests.
MARGINS = (-0.05, -0.09, -0.12)
MEASURED_TOKENS, MEASURED_BATCHES, RESAMPLES = 1 << 16, 32, 64


@dataclass(frozen=True)
class Layout:
    """A layout of one layer: the expert in every slot (G, P / G) and the rank (E,) of each expert's primary copy."""

    slots: np.ndarray
    primary: np.ndarray
    cost: float


@dataclass(frozen=True)
class Measured:
    """A layout with its copy choice, cost and load, measured on profiled tokens at their predicted homes."""

    slots: np.ndarray  # (G, P / G)
    choice: np.ndarray  # (G, E) int16: the rank whose copy of each expert each source rank uses
    cost: float  # per token
    load: float  # max/mean expected for a batch of other requests


def search_layer(
    expert_ids: np.ndarray,
    group: np.ndarray,
    num_experts: int,
    topology: Topology,
    redundant: int,
    caps: list[float],
    settings: CoclusterSettings,
    seed: int,
    start: np.ndarray | None = None,
) -> list[Layout]:
    """The best `KEPT` layouts under each load cap: the loosest cap first, and the best layout first.

    expert_ids (T, K); group (T,): attention group of each token's request; start (E,): rank labels to begin from.
    """
    rng = np.random.default_rng(seed)
    most = min((COPIES_TOKENS if redundant else SINGLE_TOKENS) * num_experts, MAX_TOKENS)
    sets, weight, groups = _distinct(expert_ids, group, most, rng)
    weights, judged, limit = (settings.activation, settings.remote_rank, settings.remote_node), 0, 0

    def run(start: tuple[np.ndarray, np.ndarray], cap: float) -> Layout:
        nonlocal judged
        state, scratch = make_state(sets, weight, groups, *start, topology, weights)
        effort = settings.price_steps, settings.sweeps, int(rng.integers(2**31)), max(limit - judged, 1)
        cost, moves = improve(state, scratch, settings.load_price, cap, *effort)
        judged += moves
        return Layout(state.slots, state.primary, cost)

    affinity = pair_count(sets, sets, num_experts, weight)
    np.fill_diagonal(affinity, 0)
    out: list[Layout] = []
    found: list[Layout] = []
    for i, cap in enumerate(caps):
        limit = MOVES + i * MOVES // 2  # later caps begin from the layout found for the previous cap
        if found:
            best = min(found, key=_cost)
            found = [run((best.slots.copy(), best.primary.copy()), cap)]
        else:
            labels = [start] if start is not None else _first_labels(affinity, topology.ep_size, settings.starts, rng)
            found = [run(_start(affinity, topology.ep_size, redundant, l), cap) for l in labels]
        for _ in range(settings.kicks // 2 if out else settings.kicks):
            if judged < limit:
                found.append(run(_kick(min(found, key=_cost), rng), cap))
        out += sorted(found, key=_cost)[:KEPT]
    return out


def _cost(layout: Layout) -> float:
    return layout.cost


def _distinct(expert_ids, group, most, rng):
    """The distinct pairs (set of experts, group) of at most `most` tokens, in random order, with their counts."""
    if len(expert_ids) > most:
        rows = rng.choice(len(expert_ids), most, replace=False)
        expert_ids, group = expert_ids[rows], group[rows]
    keyed = np.concatenate([np.sort(expert_ids, axis=1).astype(np.int16), group[:, None].astype(np.int16)], axis=1)
    distinct, counts = np.unique(keyed, axis=0, return_counts=True)
    order = rng.permutation(len(distinct))
    return np.ascontiguousarray(distinct[order, :-1]), counts[order].astype(np.float64), distinct[order, -1]


def _first_labels(affinity: np.ndarray, ranks: int, starts: int, rng) -> list[np.ndarray]:
    """Rank labels (E,) of each start: the first by the affinity of expert pairs, the others at random."""
    E = len(affinity)
    swaps = rng.integers(E, size=(EASY_SWAPS * E, 2))
    loads = affinity + np.diag(affinity.sum(axis=1))
    pairs = place_layer(loads, np.zeros((E, ranks)), swaps, 1.0, 0.0, 0.5)
    return [pairs, *(rng.permutation(np.arange(E) % ranks) for _ in range(starts - 1))]


def _start(affinity: np.ndarray, ranks: int, redundant: int, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots (G, P / G) and primaries (E,) from rank labels (E,); redundant slots get the experts of most affinity."""
    slots = np.empty((ranks, (len(labels) + redundant) // ranks), np.int64)
    for g in range(ranks):
        own = np.flatnonzero(labels == g)
        pull = affinity[own].sum(axis=0)
        pull[own] = -1
        slots[g] = np.concatenate([own, np.argsort(-pull, kind="stable")[: slots.shape[1] - len(own)]])
    return slots, labels.astype(np.int64)


def _kick(layout: Layout, rng) -> tuple[np.ndarray, np.ndarray]:
    """Two to five random swaps of slots on different ranks."""
    slots, primary = layout.slots.copy(), layout.primary.copy()
    ranks, size = slots.shape
    for _ in range(rng.integers(2, 6) if ranks > 1 else 0):
        x, y = rng.choice(ranks, 2, replace=False)
        i, j = rng.integers(size, size=2)
        a, b = slots[x, i], slots[y, j]
        if a in slots[y] or b in slots[x]:
            continue
        slots[x, i], slots[y, j] = b, a
        primary[a], primary[b] = y if primary[a] == x else primary[a], x if primary[b] == y else primary[b]
    return slots, primary


def place(
    trace: RoutingTrace,
    topology: Topology,
    predictor: Predictor | None,
    redundant: int,
    settings: CoclusterSettings,
    seed: int,
    request_groups: np.ndarray | None = None,
    start: np.ndarray | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> Placement:
    """The placement of every layer, with its static dispatch.

    predictor: assigns tokens to slices; None if a group is one rank. request_groups (R,): the attention group of each
    request, if there are several. start (L, E): rank labels to begin from, if requests were clustered jointly.
    """
    f = trace.fingerprint
    if physical_experts(f.num_experts, redundant, topology.ep_size) // topology.ep_size > f.num_experts:
        raise ValueError(
            f"{redundant} redundant experts are more than {topology.ep_size} ranks can use without repetition"
        )
    if request_groups is None:
        request_groups = np.zeros(trace.num_requests, np.int64)
    group = request_groups[trace.request_of_token()]
    caps = [max(settings.load_limit + margin, 1.0) for margin in MARGINS] if settings.load_limit else [np.inf]
    requests = sample_requests(trace, MEASURED_TOKENS, seed)
    part = trace.select(requests)
    part_group = request_groups[requests][part.request_of_token()]
    rows = np.random.default_rng(seed).permutation(part.num_tokens)[: MEASURED_BATCHES * settings.batch_tokens]

    def one(layer: int) -> list[Measured]:
        found = search_layer(
            trace.expert_ids[:, layer],
            group,
            f.num_experts,
            topology,
            redundant,
            caps,
            settings,
            seed * f.num_layers + layer,
            None if start is None else start[layer],
        )
        expected = predict(predictor, trace, part, layer, rows) if predictor else None
        measured = [_measure(layout, part, layer, rows, part_group, expected, topology, settings) for layout in found]
        progress(1)
        return measured

    with ThreadPoolExecutor(cpu_count()) as pool:
        candidates = list(pool.map(one, range(f.num_layers)))
    return _placement(choose(candidates, settings.load_limit, settings.load_price), f.num_experts, topology.ep_size)


def _placement(layouts: list[Measured], num_experts: int, ep_size: int) -> Placement:
    return Placement(
        physical_to_logical_map=np.stack([layout.slots.reshape(-1) for layout in layouts]).astype(np.int32),
        num_experts=num_experts,
        ep_size=ep_size,
        static_dispatch=np.stack([layout.choice for layout in layouts]),
    )


def _measure(layout, trace, layer, rows, group, expected, topology, settings) -> Measured:
    """Measure a layout: assign tokens to homes as online, level the load by the copy choice, and compute the cost."""
    experts, request = trace.expert_ids[rows, layer], trace.request_of_token()[rows]
    home = _homes(layout, rows, group, expected, topology, settings)
    node_of = topology.node_of
    copies = nearest_copies(layout.slots, len(layout.primary), node_of)
    choice = primary_copy_choice(copies, layout.primary)
    if layout.slots.size > len(layout.primary):
        weights = settings.remote_rank, settings.remote_node, LOAD_PRICE if settings.load_limit else 0.0
        choice = level(experts, home, request, choice, copies, node_of, weights)
    traffic = layer_traffic(experts, home, choice)
    cost = settings.remote_rank * traffic.rows.sum() - settings.activation * traffic.local_pairs
    cost += settings.remote_node * _node_rows(experts, home, choice, node_of)
    load = expected_load(choice[home[:, None], experts], request, topology, settings)
    return Measured(layout.slots, choice.astype(np.int16), float(cost) / len(rows), load)


def _homes(layout, rows, group, expected, topology, settings) -> np.ndarray:
    """(T,) home ranks of the tokens at `rows`: equal slices in batches, by the `expected` activations (T, E)."""
    S = topology.attn_tp_size
    home = group[rows] * S
    if expected is None:
        return home
    hosted = np.zeros((topology.ep_size, expected.shape[1]))
    hosted[np.arange(topology.ep_size)[:, None], layout.slots] = 1
    scores = np.rint(expected @ hosted.T * SCALE).astype(np.int32)
    for first in range(0, len(rows), settings.batch_tokens):
        batch = np.arange(first, min(first + settings.batch_tokens, len(rows)))
        for d in range(topology.dp_size):
            own = batch[group[rows[batch]] == d]
            home[own] += assign(scores[own, d * S : (d + 1) * S])
    return home


def _node_rows(experts, home, choice, node) -> int:
    """The number of distinct remote nodes that a token reaches, summed over tokens."""
    reached = np.zeros((len(home), node.max() + 1), bool)
    reached[np.arange(len(home))[:, None], node[choice[home[:, None], experts]]] = True
    reached[np.arange(len(home)), node[home]] = False
    return int(reached.sum())


def expected_load(served_by: np.ndarray, request: np.ndarray, topology: Topology, settings: CoclusterSettings) -> float:
    """Expected load max/mean in a batch of other requests.

    Requests are resampled by a Poisson bootstrap, since profile and traffic differ in their mix of requests. They are
    resampled twice, because both the profile and the traffic are random draws. Drawing a batch's tokens adds noise of
    its own. served_by (T, K): ranks; request (T,).
    """
    G, rng = topology.ep_size, np.random.default_rng(0)
    flat = np.repeat(request, served_by.shape[1]) * G + served_by.reshape(-1)
    by_request = np.bincount(flat, minlength=(request.max() + 1) * G).reshape(-1, G)
    share = rng.poisson(rng.poisson(1, (RESAMPLES, len(by_request)))) @ by_request + 1e-9
    share /= share.sum(axis=1, keepdims=True)
    pairs = settings.batch_tokens * served_by.shape[1]
    batch = share + rng.normal(size=share.shape) * np.sqrt(share * (1 - share) / pairs)
    return float((batch.max(axis=1) * G).mean())


def choose(candidates: list[list[Measured]], limit: float | None, max_price: float) -> list[Measured]:
    """Choose one layout per layer: the least total cost whose mean load over layers is within the limit.

    candidates: layouts of each layer. One price of load is used for all layers; it rises until the limit holds or
    `max_price` is reached, at which the limit may remain exceeded. The expected load is only an estimate: lowering its
    last hundredth can cost as much locality as all the rest without lowering the load of other requests.
    """
    prices = [0.0] if limit is None else [0.0, *np.geomspace(0.01, max_price, 200)]
    for price in prices:
        chosen = [min(layer, key=lambda c: c.cost + price * c.load) for layer in candidates]
        if limit is None or np.mean([c.load for c in chosen]) <= limit:
            break
    return chosen
