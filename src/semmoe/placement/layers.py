"""The search for layouts of one layer: roughly from several starts on a sample, then finer from the best of these.

Over several nodes, starts come from a search in which nodes are the ranks (`hierarchy`). A layout's load has a price,
which all layers share (`cocluster`).
"""

from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from semmoe.costs.rows import RowCosts, pair_cost
from semmoe.placement import hierarchy
from semmoe.placement.copies import hosting_ranks
from semmoe.placement.homes import Sets, make_state
from semmoe.placement.loads import draw_mixes, make_prices
from semmoe.placement.moves import search_moves, sum_move_costs
from semmoe.placement.problem import Tokens
from semmoe.placement.search import Effort, InTime
from semmoe.settings import CoclusterSettings
from semmoe.topology import Topology
from semmoe.traces.affinity import pair_count

ROUGH_TOKENS = 3072  # of a rough search
# A finer search uses so many tokens per expert, and at most so many, without and with redundant experts; of tokens that
# hardly repeat each other, at most so many distinct sets.
FINER_TOKENS, MOST_TOKENS, MOST_SETS = (2048, 128), (1 << 15, 6144), 1 << 14
FINER_STEPS = 0.8  # of the steps of a rough search
LOST = 1.01  # of the best start's total: a start that ends higher is the last
# On one node with copies a search charges a remote pair so much more: it takes each expert from its primary copy, while
# tokens take copies that need few rows. So the rows that it counts say less of a layout than its pairs.
PAIR_BESIDE = 0.875
TENURE = 8  # experts that were moved stay for at least one step per so many experts


@dataclass(frozen=True, kw_only=True)
class LayerProblem:
    """The tokens of one layer, and the ranks on which its experts are placed."""

    tokens: Tokens
    topology: Topology
    settings: CoclusterSettings
    costs: tuple[RowCosts, ...]  # of each phase, or one for all
    num_experts: int
    num_groups: int = 1  # gate groups
    redundant: int = 0
    seed: int = 0
    previous: np.ndarray | None = None  # (G, P / G) the experts of the layout to begin from, which are costly to move

    def with_one_kind(self) -> "LayerProblem":
        """Return the same problem; where both phases have the same costs, tokens have the same kind."""
        if any(one is not self.costs[0] for one in self.costs):
            return self
        phase = np.zeros_like(self.tokens.phase)
        return replace(self, costs=self.costs[:1], tokens=replace(self.tokens, phase=phase))

    def move_costs(self) -> np.ndarray:
        """Return what an expert on each rank costs per token (E, G): nothing where it was before."""
        out = np.zeros((self.num_experts, self.topology.ep_size))
        if self.previous is not None:
            out += self.settings.move_cost
            out[self.previous, np.arange(self.topology.ep_size)[:, None]] = 0.0
        return out


@dataclass(frozen=True)
class Layout:
    """A layout of one layer: the expert in every slot (G, P / G) and the rank (E,) of each expert's primary copy.

    primary (G, E): that of each source rank, for layouts whose copy choice is made already, with its `fixed` copies.
    """

    slots: np.ndarray
    primary: np.ndarray
    cost: float  # per token, under true routing, without load
    load: float  # max/mean expected
    move_cost: float = 0.0  # per token, for experts that are not where they were
    fixed: np.ndarray | None = None  # (G, E) bool: of a plan to begin from

    def total(self, load_price: float) -> float:
        return self.cost + self.move_cost + load_price * self.load


class LayerSearch:
    """The samples and the layouts found so far of one layer."""

    def __init__(self, problem: LayerProblem) -> None:
        self.problem = problem = problem.with_one_kind()
        self.rng = np.random.default_rng(problem.seed)
        self.found: list[Layout] = []
        self.nodes: LayerSearch | None = None
        if problem.previous is None:
            self.fine = self._finer_sample()
            self.affinity = pair_count(self.fine.experts, self.fine.experts, problem.num_experts, self.fine.weight)
            np.fill_diagonal(self.affinity, 0)
            self.nodes = self._over_nodes()
        self.sample = _distinct(problem.tokens, ROUGH_TOKENS, self.rng)
        ranks, batch = problem.topology.ep_size, problem.settings.batch_tokens
        self.mixes = draw_mixes(problem.tokens, problem.num_experts, ranks, batch, self.rng)
        self.move_costs = problem.move_costs()
        more = PAIR_BESIDE if problem.redundant > 0 and problem.topology.num_nodes == 1 else 0.0
        self.costs = tuple(replace(one, pair=one.pair + more * (1.0 - np.eye(ranks))) for one in problem.costs)
        self.price_scale = pair_cost(self.costs, problem.topology) / pair_cost(problem.costs, problem.topology)

    def _finer_sample(self) -> Sets:
        tokens, copies = self.problem.tokens, int(self.problem.redundant > 0)
        most = min(FINER_TOKENS[copies] * self.problem.num_experts, MOST_TOKENS[copies])
        found = _distinct(tokens, most, self.rng)
        return found if len(found.experts) <= MOST_SETS else _distinct(tokens, MOST_SETS, self.rng)

    def _over_nodes(self) -> "LayerSearch | None":
        """Return the search in which nodes are the ranks; None for one node, or if rows between nodes cost no more."""
        problem = self.problem
        nodes = hierarchy.node_topology(problem.topology)
        if nodes is None or problem.num_experts + problem.redundant > nodes.ep_size * problem.num_experts:
            return None  # a node has a place for every expert
        costs = hierarchy.node_costs(problem.costs, problem.topology, nodes)
        if not costs.rank.any() and not costs.pair.any():
            return None
        group = problem.tokens.group * nodes.dp_size // problem.topology.dp_size
        tokens = replace(problem.tokens, group=group)
        seed = int(self.rng.integers(2**31))
        return LayerSearch(replace(problem, tokens=tokens, topology=nodes, costs=(costs,), seed=seed))

    def rough(
        self, load_prices: list[float], labels: np.ndarray | None = None, in_time: InTime = lambda: True
    ) -> list[Layout]:
        """Return the best layout for each price of load: all starts are searched at the first, the best ones at others.

        labels (E,): rank labels of the first start. in_time: whether a further search may begin; the first always does.
        """
        first, steps = load_prices[0], self.problem.settings.steps
        self.found = []
        for layout in self._starts(labels, first, in_time):
            if not self.found or (in_time() and not self._has_lost(first)):
                self.found.append(self._run(self.sample, *layout, first, steps, in_time))
        best = sorted(self.found, key=lambda one: one.total(first * self.price_scale))[: self.problem.settings.kept]
        for price, one in product(load_prices[1:], best):
            if in_time():
                self.found.append(self._run(self.sample, one.slots, one.primary, price, steps, in_time))
        return [self._best(price) for price in load_prices]

    def _best(self, load_price: float) -> Layout:
        """Return the layout of least total at a price of load that a rough search found."""
        return min(self.found, key=lambda one: one.total(load_price * self.price_scale))

    def _has_lost(self, load_price: float) -> bool:
        """Return whether the last start ended so high that random ones will, too, which holds without copies alone."""
        totals = [one.total(load_price * self.price_scale) for one in self.found]
        return self.problem.redundant == 0 and totals[-1] > LOST * min(totals)

    def _starts(self, labels: np.ndarray | None, load_price: float, in_time) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return slots and primaries to begin from."""
        problem, number, ranks = self.problem, self.problem.settings.starts, self.problem.topology.ep_size
        if problem.previous is not None:
            lowest = hosting_ranks(problem.previous, problem.num_experts)[:, 0]
            return [(problem.previous.astype(np.int64), lowest.astype(np.int64))]
        labelled = [] if labels is None else [labels]
        if self.nodes is not None and in_time():
            self.nodes.rough([load_price], None, in_time)
            best = sorted(self.nodes.found, key=lambda one: one.total(load_price))[: number - len(labelled)]
            at_rank = self._pairs_at_ranks()
            over = [hierarchy.divide_nodes(x.slots, x.primary, self.affinity, at_rank, self.rng) for x in best]
            return over + [_start(self.affinity, ranks, problem.redundant, one) for one in labelled]
        labelled += self._packed_groups()
        labelled += _first_labels(self.affinity, ranks, number, self.rng)
        return [_start(self.affinity, ranks, problem.redundant, one) for one in labelled[:number]]

    def unsearched(self) -> list[Layout]:
        """Return layouts over nodes with copies that are measured as they are, where there is room for them; else none.

        The search takes each expert of a rank from one copy. So it cannot see that with copies of whole gate groups a
        token finds several of its groups on one node, nor that all copies of a hot expert share its load.
        """
        problem = self.problem
        E, nodes, groups = problem.num_experts, problem.topology.num_nodes, problem.num_groups
        if nodes == 1 or not problem.redundant or problem.previous is not None:
            return []
        places = (E + problem.redundant) // nodes
        at_rank = self._pairs_at_ranks()
        homes: list[np.ndarray | None] = [None]
        if groups > 1 and groups % nodes == 0:
            homes.append(self._packing(at_rank, nodes))
        hot = [hierarchy.copy_hot(self.affinity, at_rank, nodes, places, self.rng, home) for home in homes]
        ways = [(slots, hosting_ranks(slots, E)[:, 0].astype(np.int64)) for slots in hot]
        blocks = hierarchy.count_blocks(E, groups, nodes, places)
        if blocks is not None:
            block = self._packing(at_rank, blocks)
            ways += [hierarchy.copy_groups(block, self.affinity, at_rank, nodes, places, r) for r in (None, self.rng)]
        return [Layout(*way, np.inf, np.inf) for way in ways]

    def _packing(self, at_rank: np.ndarray, parts: int) -> np.ndarray:
        """Return which of `parts` equal parts of the ranks each expert (E,) is on, with gate groups whole."""
        at_part = at_rank.reshape(len(at_rank), parts, -1).sum(axis=2)
        return hierarchy.pack_groups(self.affinity, at_part, self.problem.num_groups, self.rng)

    def _packed_groups(self) -> list[np.ndarray]:
        """Return rank labels (E,) with whole gate groups, if ranks are nodes over which groups divide; else nothing."""
        ranks, groups = self.problem.topology.ep_size, self.problem.num_groups
        if self.problem.topology.num_nodes < ranks or groups % ranks or groups == 1:
            return []
        return [self._packing(self._pairs_at_ranks(), ranks)]

    def _pairs_at_ranks(self) -> np.ndarray:
        """Return the pairs (E, G) of each expert by the rank of their token, equal inside an attention group."""
        sets, size = self.fine, self.problem.topology.attn_tp_size
        pairs = np.zeros((self.problem.num_experts, self.problem.topology.dp_size))
        np.add.at(pairs, (sets.experts, sets.group[:, None].astype(np.int64)), sets.weight[:, None])
        return np.repeat(pairs / size, size, axis=1)

    def finer(self, load_prices: list[float], in_time: InTime = lambda: True) -> list[Layout]:
        """Return layouts found on more tokens, at each price from the best rough one; in_time: see `rough`."""
        steps = int(FINER_STEPS * self.problem.settings.steps)
        begun = ((price, self._best(price)) for price in load_prices if in_time())  # asked before each search
        return [self._run(self.fine, one.slots, one.primary, price, steps, in_time) for price, one in begun]

    def follow(self, slots: np.ndarray, primary: np.ndarray, tokens: Tokens, load_price: float) -> Layout:
        """Search on from a layout with tokens where they are predicted to be: each on its group, which is a rank."""
        problem = replace(self.problem, tokens=tokens).with_one_kind()
        ranks, nodes = problem.topology.ep_size, problem.topology.num_nodes
        sets = _distinct(problem.tokens, MOST_SETS, self.rng)
        on_ranks = Topology(ep_size=ranks, dp_size=ranks, num_nodes=nodes)
        state, scratch = make_state(sets, slots.copy(), primary.copy(), on_ranks, problem.costs)
        effort = self._effort(problem.settings.steps)._replace(rounds=1)
        return self._end(state, scratch, load_price, effort, lambda: True)

    def _run(
        self, sets: Sets, slots: np.ndarray, primary: np.ndarray, load_price: float, steps: int, in_time: InTime
    ) -> Layout:
        """Search from a layout at a price of load, and return the best layout found; in_time: of further rounds."""
        state, scratch = make_state(sets, slots.copy(), primary.copy(), self.problem.topology, self.costs)
        return self._end(state, scratch, load_price * self.price_scale, self._effort(steps), in_time)

    def _effort(self, steps: int) -> Effort:
        settings = self.problem.settings
        return Effort(
            price_steps=settings.price_steps,
            rounds=settings.rounds,
            steps=steps,
            patience=settings.patience,
            tenure=max(self.problem.num_experts // TENURE, 1),
            seed=int(self.rng.integers(2**31)),
        )

    def _end(self, state, scratch, load_price: float, effort: Effort, in_time: InTime) -> Layout:
        """Search from a state, and return the best layout found."""
        prices = make_prices(self.move_costs, self.mixes, load_price)
        cost, load, _ = search_moves(state, scratch, prices, effort, in_time)
        return Layout(state.slots, state.primary, cost, load, float(sum_move_costs(state.slots, self.move_costs)))


def _distinct(tokens: Tokens, most: int, rng) -> Sets:
    """Return the distinct sets of experts, by group and phase, of at most `most` tokens, in random order."""
    rows = np.arange(len(tokens.group))
    if len(rows) > most:
        rows = rng.choice(len(rows), most, replace=False)
    columns = np.sort(tokens.expert_ids[rows], axis=1), tokens.group[rows, None], tokens.phase[rows, None]
    keyed = np.concatenate([column.astype(np.int16) for column in columns], axis=1)
    _, first, counts = np.unique(_keys(keyed), return_index=True, return_counts=True)
    order = rng.permutation(len(first))
    distinct = keyed[first[order]]
    experts = np.ascontiguousarray(distinct[:, :-2])
    return Sets(experts, counts[order].astype(np.float64), distinct[:, -2], distinct[:, -1])


def _keys(rows: np.ndarray) -> np.ndarray:
    """(N,) one number for each row (N, A) of numbers from 0 on: as many different ones as there are different rows."""
    keys = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values = int(column.max(initial=0)) + 1
        if keys.max(initial=0) >= (1 << 62) // values:  # too many to count on: number those that occur
            keys = np.unique(keys, return_inverse=True)[1].reshape(-1)
        keys = keys * values + column
    return keys


def _first_labels(affinity: np.ndarray, ranks: int, starts: int, rng) -> list[np.ndarray]:
    """Rank labels (E,) of each start: the first by the affinity of expert pairs, the others at random."""
    E = len(affinity)
    pairs = hierarchy.spread(affinity, np.zeros((E, ranks)), rng)
    return [pairs, *(rng.permutation(np.arange(E) % ranks) for _ in range(starts - 1))]


def _start(affinity: np.ndarray, ranks: int, redundant: int, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots (G, P / G) and primaries (E,) from rank labels (E,); redundant slots get the experts of most affinity."""
    slots = np.empty((ranks, (len(labels) + redundant) // ranks), np.int64)
    for g in range(ranks):
        slots[g] = hierarchy.fill(np.flatnonzero(labels == g), affinity, slots.shape[1])
    return slots, labels.astype(np.int64)
