"""semmoe's own placement: put experts and their copies where the tokens that use them will be, under a load limit.

Every layer is searched on its own (`placement.search` states the objective, `placement.layers` how), at several prices
of load. What the layouts found cost and load is measured as they will be used: with tokens at their predicted homes.
Then one layout per layer is chosen, so that the mean load over layers in a batch of unseen requests stays within the
limit at the least traffic. All layers have one price of load, since their times add.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from os import cpu_count
from time import monotonic

import numpy as np

from semmoe.core import DECODE, PREFILL, Placement
from semmoe.costs.rows import mean_costs, pair_cost
from semmoe.placement.copies import hosting_ranks, level, near_copies, primary_copy_choice
from semmoe.placement.layers import LayerProblem, LayerSearch, Layout
from semmoe.placement.loads import expected_load, total_cost
from semmoe.placement.problem import Problem, Tokens, weighed_tokens
from semmoe.placement.search import InTime
from semmoe.settings import CoclusterSettings
from semmoe.tokens.copychoice import CopyChoice, preferred_copies
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.predictor import Predictor, predict
from semmoe.tokens.slices import ScoreEvidence, home_ranks
from semmoe.topology import Topology, physical_experts
from semmoe.traces.split import draw_requests

# Prices of load: of rough searches, relative to the highest price; of finer ones, relative to the price at which rough
# layouts meet the limit, or to the least of theirs where the cheapest of them meet it.
ROUGH_PRICES, FINER_PRICES, LOWER_PRICES = (0.6, 0.2, 1.0), (0.6, 1.0, 1.4), (0.05, 0.15, 0.5)
# Price of load when copies are chosen, relative to the search's, since it is summed over ranks in place of the highest.
LEVEL_SHARE = 0.5
WARM_PRICE = 0.7  # of the one search that begins from a plan, relative to the highest price
MEASURED_TOKENS, MEASURED_BATCHES = 1 << 16, 32
FOLLOWED = 2  # searches with tokens at their predicted homes, at each price
HELD_OUT = 0.25  # of the requests: where layouts that are fitted to requests compete with such as are not


@dataclass(frozen=True)
class Measured:
    """A layout with its copy choice, cost and load, measured on profiled tokens at their predicted homes."""

    slots: np.ndarray  # (G, P / G)
    preferred: np.ndarray  # (G, E) int16: the rank whose copy of each expert each source rank uses first
    fixed: np.ndarray  # (G, E) bool: experts of which each source rank uses that copy alone
    cost: float  # per token, moves included
    load: float  # max/mean expected for a batch of other requests
    primary: np.ndarray  # (E,), of the layout

    def total(self, load_price: float) -> float:
        return self.cost + load_price * self.load


@dataclass(frozen=True)
class Sample:
    """The profiled tokens of one layer on which its layouts are measured."""

    tokens: Tokens
    charged: np.ndarray  # (T,) bool: tokens whose cost counts; the load counts all
    expected: np.ndarray | None  # (T, E) int16 predicted activations, in units of 1 / SCALE; None without slices


class _Layers:
    """All layers of a problem: their searches, and what is measured of layouts."""

    def __init__(self, problem: Problem, predictor, request_groups, start=None, until=None) -> None:
        """Arguments as `place` takes them."""
        trace, settings, seed = problem.trace, problem.settings, problem.settings.seed
        self.problem, self.predictor, self.start = problem, predictor, start
        self.settings, self.costs = settings.cocluster, problem.charges
        self.previous = None if problem.previous is None else problem.previous.placement
        self.before: np.ndarray | None = None  # (L, G, P / G)
        if self.previous is not None:
            experts = self.previous.physical_to_logical_map
            self.before = experts.reshape(len(experts), problem.topology.ep_size, -1)
        over_nodes = settings.redundant_experts > 0 and problem.topology.num_nodes > 1
        held_out = np.random.default_rng((seed, 1)).random(trace.num_requests) < HELD_OUT * over_nodes
        # rows of the trace that are searched
        self.request = trace.request_of_token()
        self.group = request_groups[self.request]
        known = weighed_tokens(trace, settings.phase)
        searched = known & ~held_out[self.request]
        self.weighed = np.flatnonzero(searched if searched.any() else known)
        # rows of a part of it on which layouts are measured
        requests = draw_requests(np.diff(trace.request_offsets), MEASURED_TOKENS, seed)
        self.part = trace.select(requests)
        rows = np.random.default_rng(seed).permutation(self.part.num_tokens)
        weighed = weighed_tokens(self.part, settings.phase)[rows]
        most = MEASURED_BATCHES * settings.cocluster.batch_tokens
        self.rows = rows[weighed if weighed.any() else slice(None)][:most]
        self.part_request = self.part.request_of_token()[self.rows]
        self.part_group = request_groups[requests][self.part_request]
        charged = held_out[requests][self.part_request]
        self.charged = charged if charged.any() else ~charged
        self.open: dict[int, tuple[LayerSearch, Sample]] = {}  # by layer
        self.turn, self.begun, self.until = count(1), monotonic(), until

    def _in_time(self) -> InTime:
        """Whether a further search of one phase of a layer may begin: each phase has an equal share of the time."""
        if self.until is None:
            return lambda: True
        share = next(self.turn) / (2 * self.problem.trace.fingerprint.num_layers)
        end = self.begun + share * (self.until - self.begun)
        return lambda: monotonic() < end

    def _layer_problem(self, layer: int) -> LayerProblem:
        trace, settings, rows = self.problem.trace, self.problem.settings, self.weighed
        ids = trace.expert_ids[rows, layer]
        return LayerProblem(
            tokens=Tokens(ids, self.group[rows], self.request[rows], trace.phase[rows]),
            topology=self.problem.topology,
            settings=self.settings,
            costs=self.costs,
            num_experts=trace.fingerprint.num_experts,
            num_groups=trace.fingerprint.num_groups,
            redundant=settings.redundant_experts,
            seed=settings.seed * trace.fingerprint.num_layers + layer,
            previous=None if self.before is None else self.before[layer],
        )

    def _sample(self, layer: int) -> Sample:
        part, rows, expected = self.part, self.rows, None
        if self.predictor:
            activations = predict(self.predictor, self.problem.trace, part, layer, rows)
            expected = np.clip(np.rint(activations * SCALE), -32767, 32767).astype(np.int16)
        tokens = Tokens(part.expert_ids[rows, layer], self.part_group, self.part_request, part.phase[rows])
        return Sample(tokens, self.charged, expected)

    def rough(self, prices: list[float], layer: int) -> list[Measured]:
        """Begin the search of a layer."""
        search = LayerSearch(self._layer_problem(layer))
        self.open[layer] = search, self._sample(layer)
        labels = None if self.start is None else self.start[layer]
        found = search.rough(prices, labels, self._in_time())
        as_they_are = self._as_they_are(layer)
        measured = self._measure(layer, found + as_they_are, prices + prices[:1] * len(as_they_are))
        self.problem.progress(0.5 if self.before is None else 1.0)
        return measured

    def _as_they_are(self, layer: int) -> list[Layout]:
        """Layouts over nodes that no search has found: that of the plan to begin from, or what is made in its place."""
        if self.previous is None or self.before is None or self.problem.topology.num_nodes == 1:
            return self.open[layer][0].unsearched()
        choice = preferred_copies(self.previous, self.problem.topology)[layer].astype(np.int64)
        fixed = None if self.previous.fixed_copies is None else self.previous.fixed_copies[layer]
        return [Layout(self.before[layer].astype(np.int64), choice, np.inf, np.inf, fixed=fixed)]

    def finer(self, prices: list[float], layer: int) -> list[Measured]:
        """End the search of a layer."""
        search, sample = self.open[layer]
        follows, in_time = sample.expected is not None and search.problem.redundant > 0, self._in_time()
        found = self._measure(layer, search.finer(prices, in_time), prices)
        if follows and found:
            found += [one for price in prices for one in self._followed(layer, found, price, in_time)]
        del self.open[layer]
        self.problem.progress(0.5)
        return found

    def _followed(self, layer: int, found: list[Measured], price: float, in_time: InTime) -> list[Measured]:
        """Search on from the best layout with tokens at their predicted homes, which then change: while that gains."""
        search, sample = self.open[layer]
        best, out = min(found, key=lambda one: one.total(price)), []
        for _ in range(FOLLOWED):
            if not in_time():
                break
            home = _homes(best.slots, sample, self.problem.topology, self.settings.batch_tokens)
            layout = search.follow(best.slots, best.primary, replace(sample.tokens, group=home), price)
            out += self._measure(layer, [layout], [price])
            if out[-1].total(price) >= best.total(price):
                break
            best = out[-1]
        return out

    def _measure(self, layer: int, layouts: list[Layout], load_prices: list[float]) -> list[Measured]:
        """Measure layouts at the prices of load at which they were found; fewer layouts if the time has ended."""
        sample, copies = self.open[layer][1], self.problem.settings.redundant_experts > 0
        # one layout may be the best at several prices, at which it has other copy choices
        distinct = {(id(one), price * copies): (one, price) for one, price in zip(layouts, load_prices, strict=False)}
        topology, settings, costs = self.problem.topology, self.settings, self.costs
        return [_measure(one, sample, topology, settings, costs, price) for one, price in distinct.values()]


def place(
    problem: Problem,
    predictor: Predictor | None,
    request_groups: np.ndarray | None,
    start: np.ndarray | None = None,
    until: float | None = None,
) -> Placement:
    """The placement of every layer, with its static dispatch.

    predictor: assigns tokens to slices; None if a group is one rank. request_groups (R,): the attention group of each
    request, if there are several. start (L, E): rank labels of each layer's first start, if requests were clustered
    jointly; the next start uses only the affinity of experts, and the others are random. until: when the search should
    end, by `time.monotonic`; every layer is searched once in any case. An expert of a previous plan moves only if the
    gain exceeds the move's cost.
    """
    f, ranks = problem.trace.fingerprint, problem.topology.ep_size
    redundant = problem.settings.redundant_experts
    if physical_experts(f.num_experts, redundant, ranks) // ranks > f.num_experts:
        raise ValueError(f"{redundant} redundant experts are more than {ranks} ranks can use without repetition")
    groups = np.zeros(problem.trace.num_requests, np.int64) if request_groups is None else request_groups
    layers = _Layers(problem, predictor, groups, start, until)
    chosen = _search(layers, f.num_layers)
    slots = np.stack([layout.slots for layout in chosen])
    slots = slots if layers.before is None else keep_slots(slots, layers.before)
    fixed = np.stack([layout.fixed for layout in chosen])
    return Placement(
        physical_to_logical_map=slots.reshape(len(slots), -1).astype(np.int32),
        num_experts=f.num_experts,
        ep_size=ranks,
        static_dispatch=np.stack([layout.preferred for layout in chosen]),
        copy_choice=layers.settings.copy_choice if redundant > 0 else "static",
        fixed_copies=fixed if fixed.any() else None,
    )


def _search(layers: _Layers, num_layers: int) -> list[Measured]:
    """Search all layers, side by side, and choose a layout for each."""
    settings = layers.settings
    limit, highest = settings.load_limit, settings.load_price * pair_cost(layers.costs, layers.problem.topology)
    shares = ROUGH_PRICES if layers.before is None else (WARM_PRICE,)
    rough_prices = [highest * share for share in shares] if limit else [0.0]
    with ThreadPoolExecutor(cpu_count()) as pool:
        found = list(pool.map(partial(layers.rough, rough_prices), range(num_layers)))
        price, chosen = choose(found, limit, highest)
        if layers.before is None:
            shares, base = (FINER_PRICES, price) if price else (LOWER_PRICES, min(rough_prices))
            finer_prices = [base * share for share in shares] if limit else [0.0]
            finer = list(pool.map(partial(layers.finer, finer_prices), range(num_layers)))
            _, chosen = choose([a + b for a, b in zip(found, finer, strict=True)], limit, highest)
    return chosen


def keep_slots(slots: np.ndarray, previous: np.ndarray) -> np.ndarray:
    """(L, G, P / G): `slots` with every expert that stays on its rank in the slot that it had in `previous`."""
    stays = (slots[..., None, :] == previous[..., :, None]).any(axis=-1)  # by previous slot
    came = ~(slots[..., :, None] == previous[..., None, :]).any(axis=-1)  # by new slot
    out = previous.copy()
    out[~stays] = slots[came]
    return out


def _measure(
    layout: Layout, sample: Sample, topology: Topology, settings: CoclusterSettings, costs, load_price: float
) -> Measured:
    """Measure a layout: assign tokens to homes as online, level the load by the copy choice, and compute the cost."""
    tokens, phase = sample.tokens, sample.tokens.phase
    home = _homes(layout.slots, sample, topology, settings.batch_tokens)
    node_of, number = topology.node_of, layout.primary.shape[-1]
    copies = hosting_ranks(layout.slots, number)
    near, redundant = near_copies(copies, node_of), layout.slots.size > number
    rule = CopyChoice(primary_copy_choice(near, layout.primary))
    if redundant and settings.copy_choice == "cover":
        rule = CopyChoice(rule.preferred, copies, node_of, layout.fixed)
    if redundant and layout.primary.ndim == 1:
        rule = level(tokens, home, rule, near, node_of, mean_costs(costs, phase), LEVEL_SHARE * load_price)
    targets = rule.ranks(tokens.expert_ids, home)
    cost = 0.0
    for code, one in zip((PREFILL, DECODE), costs, strict=True):
        rows = sample.charged & (phase == code)
        cost += total_cost(one, targets[rows], home[rows], node_of)
    load = expected_load(tokens, home, targets, number, topology.ep_size, settings.batch_tokens)
    cost = cost / sample.charged.sum() + layout.move_cost
    fixed = np.zeros(rule.preferred.shape, bool) if rule.fixed is None else rule.fixed
    return Measured(layout.slots, rule.preferred, fixed, cost, load, layout.primary)


def _homes(slots: np.ndarray, sample: Sample, topology: Topology, batch_tokens: int) -> np.ndarray:
    """(T,) home ranks of the tokens: equal slices of each batch, by the expected activations."""
    group, S = sample.tokens.group, topology.attn_tp_size
    if sample.expected is None:
        return group * S
    hosted = np.zeros((topology.ep_size, sample.expected.shape[1]), np.float32)
    hosted[np.arange(topology.ep_size)[:, None], slots] = 1
    scores = (sample.expected.astype(np.float32) @ hosted.T).astype(np.int32)  # whole numbers below 2**24: exact
    evidence = ScoreEvidence(np.take_along_axis(scores, group[:, None] * S + np.arange(S), axis=1))
    batches = np.split(np.arange(len(group)), np.arange(batch_tokens, len(group), batch_tokens))
    return np.concatenate([home_ranks(evidence, group, batch, topology) for batch in batches])


def choose(candidates: list[list[Measured]], limit: float | None, max_price: float) -> tuple[float, list[Measured]]:
    """(price of load, one layout per layer): the least total cost whose mean load over layers is within the limit.

    candidates: layouts of each layer. One price of load is used for all layers; it rises until the limit holds or
    `max_price` is reached, at which the limit may remain exceeded. The expected load is only an estimate: lowering its
    last hundredth can cost as much locality as all the rest without lowering the load of other requests.
    """
    prices = [0.0] if limit is None else [0.0, *np.geomspace(0.01, max_price, 200)]
    for price in prices:
        chosen = [min(layer, key=lambda c: c.total(price)) for layer in candidates]
        if limit is None or np.mean([c.load for c in chosen]) <= limit:
            break
    return price, chosen
