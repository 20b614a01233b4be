"""The search for layouts of one layer: roughly from several starts on a sample, then finer from the best of these.

Without copies, for uniform costs and several homes the moves are those of `swaps`, else those of `moves`. Over several
nodes, starts come from a search in which nodes are the ranks (`hierarchy`). A layout's load has a price, which all
layers share (`cocluster`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np

from semmoe.affinity import pair_count
from semmoe.placement import hierarchy
from semmoe.placement.homes import make_state
from semmoe.placement.loads import draw_mixes, make_prices
from semmoe.placement.moves import search_moves, sum_dues
from semmoe.placement.replicas import make_tables
from semmoe.placement.search import Effort
from semmoe.placement.swaps import make_gains, search_swaps
from semmoe.rowcosts import RowCosts
from semmoe.settings import CoclusterSettings
from semmoe.topology import Topology

ROUGH_TOKENS = 3072  # of a rough search
# A finer search uses so many tokens per expert, and at most so many, without and with redundant experts; of tokens that
# hardly repeat each other, at most so many distinct sets.
FINER_TOKENS, MOST_TOKENS, MOST_SETS = (2048, 128), (1 << 15, 6144), 1 << 14
FINER_STEPS = 0.8  # of the steps of a rough search
TENURE = 8  # experts that were moved stay for at least one step per so many experts


@dataclass(frozen=True)
class Tokens:
    """The routed tokens of one layer."""

    expert_ids: np.ndarray  # (T, K)
    group: np.ndarray  # (T,) attention group of each token's request
    request: np.ndarray  # (T,)
    phase: np.ndarray  # (T,) which of the costs each token is charged


@dataclass(frozen=True)
class Layout:
    """A layout of one layer: the expert in every slot (G, P / G) and the rank (E,) of each expert's primary copy.

    primary (G, E): that of each source rank, for layouts whose copy choice is made already.
    """

    slots: np.ndarray
    primary: np.ndarray
    cost: float  # per token, under true routing, without load
    load: float  # max/mean expected
    dues: float = 0.0  # per token, for experts that are not where they were

    def total(self, load_price: float) -> float:
        return self.cost + self.dues + load_price * self.load


class LayerSearch:
    """The samples and the layouts found so far of one layer."""

    def __init__(
        self,
        tokens: Tokens,
        num_experts: int,
        topology: Topology,
        redundant: int,
        settings: CoclusterSettings,
        seed: int,
        costs: tuple[RowCosts, ...],
        previous: np.ndarray | None = None,
        num_groups: int = 1,
    ) -> None:
        """costs: of each phase, or one for all. num_groups: gate groups.

        previous (G, P / G): the experts in the slots of the layout to begin from, which are costly to move; one rough
        search goes on from there.
        """
        self.rng = np.random.default_rng(seed)
        self.num_experts, self.topology, self.redundant, self.settings = num_experts, topology, redundant, settings
        self.costs = costs[:1] if all(one is costs[0] for one in costs) else costs
        if len(self.costs) == 1:
            tokens = replace(tokens, phase=np.zeros_like(tokens.phase))
        self.num_groups, self.nodes = num_groups, None
        if previous is None:
            self.fine = self._finer_sample(tokens)
            self.affinity = pair_count(self.fine[0], self.fine[0], num_experts, self.fine[1])
            np.fill_diagonal(self.affinity, 0)
            self.nodes = self._over_nodes(tokens)
        self.sample = _distinct(tokens, ROUGH_TOKENS, self.rng)
        ids, batch = tokens.expert_ids, settings.batch_tokens
        self.mixes = draw_mixes(ids, tokens.request, num_experts, topology.ep_size, batch, self.rng)
        self.found: list[Layout] = []
        self.previous, self.dues = previous, np.zeros((num_experts, topology.ep_size))
        if previous is not None:
            self.dues += settings.move_cost
            self.dues[previous, np.arange(topology.ep_size)[:, None]] = 0.0

    def _finer_sample(self, tokens: Tokens):
        copies = int(self.redundant > 0)
        most = min(FINER_TOKENS[copies] * self.num_experts, MOST_TOKENS[copies])
        found = _distinct(tokens, most, self.rng)
        return found if len(found[0]) <= MOST_SETS else _distinct(tokens, MOST_SETS, self.rng)

    def _over_nodes(self, tokens: Tokens) -> "LayerSearch | None":
        """The search in which nodes are the ranks; None if there is one, or rows between nodes cost no more."""
        nodes = hierarchy.node_topology(self.topology)
        if nodes is None or self.num_experts + self.redundant > nodes.ep_size * self.num_experts:
            return None  # a node has a place for every expert
        costs = hierarchy.node_costs(self.costs, self.topology, nodes)
        if not costs.rank.any() and not costs.pair.any() and not self._whole():
            return None
        group = tokens.group * nodes.dp_size // self.topology.dp_size
        seed, settings = int(self.rng.integers(2**31)), self.settings
        below = replace(tokens, group=group, phase=np.zeros_like(tokens.phase))
        return LayerSearch(
            below, self.num_experts, nodes, self.redundant, settings, seed, (costs,), num_groups=self.num_groups
        )

    def rough(
        self, load_prices: list[float], labels: np.ndarray | None = None, in_time: Callable[[], bool] = lambda: True
    ) -> list[Layout]:
        """The best layout found at each price: from all starts at the first, from the best of these at the others.

        labels (E,): rank labels of the first start. in_time: whether a further search may begin; the first always does.
        """
        first, steps, self.found = load_prices[0], self.settings.steps, []
        for layout in self._starts(labels, first, in_time):
            if not self.found or in_time():
                self.found.append(self._run(self.sample, *layout, first, steps))
        best = sorted(self.found, key=lambda one: one.total(first))[: self.settings.kept]
        for price, one in product(load_prices[1:], best):
            if in_time():
                self.found.append(self._run(self.sample, one.slots, one.primary, price, steps))
        return [min(self.found, key=lambda one: one.total(price)) for price in load_prices]

    def _starts(self, labels: np.ndarray | None, load_price: float, in_time) -> list[tuple[np.ndarray, np.ndarray]]:
        """Slots and primaries to begin from."""
        if self.previous is not None:
            return [(self.previous.astype(np.int64), _hosts(self.previous, self.num_experts))]
        number, ranks = self.settings.starts, self.topology.ep_size
        given = [] if labels is None or self._whole() else [labels]
        if self.nodes is not None and (in_time() or self._whole()):
            self.nodes.rough([load_price], None, in_time)
            found = sorted(self.nodes.found, key=lambda one: one.total(load_price))[: number - len(given)]
            at_rank = self._pairs_at(self.topology.attn_tp_size)
            over = [hierarchy.divide_nodes(x.slots, x.primary, self.affinity, at_rank, self.rng) for x in found]
            return over + [_start(self.affinity, ranks, self.redundant, one) for one in given]
        starts = (given + self._packings(number) + _first_labels(self.affinity, ranks, number, self.rng))[:number]
        return [_start(self.affinity, ranks, self.redundant, one) for one in starts]

    def unsearched(self) -> list[Layout]:
        """Layouts over nodes with copies that are measured as they are, where there is room for them; else none.

        The search takes each expert of a rank from one copy. So it cannot see that with copies of whole gate groups a
        token finds several of its groups on one node, nor that all copies of a hot expert share its load.
        """
        E, nodes, groups = self.num_experts, self.topology.num_nodes, self.num_groups
        places = (E + self.redundant) // nodes
        if nodes == 1 or not self.redundant or self.previous is not None:
            return []
        at_rank = self._pairs_at(self.topology.attn_tp_size)
        homes: list[np.ndarray | None] = [] if self._whole() else [None]
        if groups > 1 and groups % nodes == 0:
            at_node = at_rank.reshape(E, nodes, -1).sum(axis=2)
            homes.append(hierarchy.pack_groups(self.affinity, at_node, groups, False, self.rng))
        hot = [hierarchy.copy_hot(self.affinity, at_rank, nodes, places, self.rng, home) for home in homes]
        out = [Layout(slots, _hosts(slots, E), np.inf, np.inf) for slots in hot]
        blocks = hierarchy.count_blocks(E, groups, nodes, places)
        if blocks is not None:
            at_block = at_rank.reshape(E, blocks, -1).sum(axis=2)
            block = hierarchy.pack_groups(self.affinity, at_block, groups, False, self.rng)
            ways = [hierarchy.copy_groups(block, self.affinity, at_rank, nodes, places, r) for r in (None, self.rng)]
            out += [Layout(*way, np.inf, np.inf) for way in ways]
        return out

    def _whole(self) -> bool:
        """Whether each node must keep whole gate groups."""
        return self.settings.groups == "whole" and self.topology.num_nodes > 1

    def _packings(self, number: int) -> list[np.ndarray]:
        """Rank labels (E,) that keep gate groups whole, where ranks are nodes: `number` if they must, else one."""
        ranks = self.topology.ep_size
        if self.topology.num_nodes < ranks or self.num_groups % ranks or self.num_groups == 1:
            return []
        at_node = self._pairs_at(self.topology.attn_tp_size)
        drawn = range(number if self._whole() else 1)
        return [hierarchy.pack_groups(self.affinity, at_node, self.num_groups, i > 0, self.rng) for i in drawn]

    def _pairs_at(self, size: int) -> np.ndarray:
        """(E, G) pairs of each expert by the rank of their token, equal inside an attention group of `size` ranks."""
        sets, weight, group, _ = self.fine
        pairs = np.zeros((self.num_experts, self.topology.dp_size))
        np.add.at(pairs, (sets, group[:, None].astype(np.int64)), weight[:, None])
        return np.repeat(pairs / size, size, axis=1)

    def finer(self, load_prices: list[float], in_time: Callable[[], bool] = lambda: True) -> list[Layout]:
        """Layouts found on more tokens, at each price from the best rough ones; in_time: see `rough`."""
        steps, out = int(FINER_STEPS * self.settings.steps), []
        for price in load_prices:
            for one in sorted(self.found, key=lambda one: one.total(price))[: self.settings.kept]:
                if in_time():
                    out.append(self._run(self.fine, one.slots, one.primary, price, steps))
        return out

    def _run(self, sets, slots, primary, load_price: float, steps: int) -> Layout:
        settings, bound = self.settings, None
        if self._whole():
            bound = hierarchy.group_nodes(slots, self.num_experts, self.num_groups, self.topology.num_nodes)
        layout = slots.copy(), primary.copy()
        state, scratch = make_state(*sets, *layout, self.topology, self.costs, bound)  # type: ignore[call-arg]
        tenure, seed = max(self.num_experts // TENURE, 1), int(self.rng.integers(2**31))
        effort = Effort(settings.price_steps, settings.rounds, steps, settings.patience, tenure, seed)
        prices = make_prices(self.dues, self.mixes, load_price)
        search: Any = search_moves
        if not self.redundant and state.uniform and self.topology.attn_tp_size > 1:
            search = search_swaps  # the same moves, for many homes in less time
        tables: Any = make_gains(state) if search is search_swaps else make_tables(state)
        cost, load, _ = search(state, scratch, tables, prices, effort)
        return Layout(state.slots, state.primary, cost, load, float(sum_dues(state.slots, self.dues)))


def _distinct(tokens: Tokens, most: int, rng):
    """The distinct sets of experts by group and phase of at most `most` tokens, in random order: sets (U, K), their
    counts, groups and phases (U,)."""
    columns = np.sort(tokens.expert_ids, axis=1), tokens.group[:, None], tokens.phase[:, None]
    if len(tokens.group) > most:
        rows = rng.choice(len(tokens.group), most, replace=False)
        columns = np.sort(tokens.expert_ids[rows], axis=1), tokens.group[rows, None], tokens.phase[rows, None]
    keyed = np.concatenate([column.astype(np.int16) for column in columns], axis=1)
    _, first, counts = np.unique(_keys(keyed), return_index=True, return_counts=True)
    order = rng.permutation(len(first))
    distinct = keyed[first[order]]
    return np.ascontiguousarray(distinct[:, :-2]), counts[order].astype(np.float64), distinct[:, -2], distinct[:, -1]


def _keys(rows: np.ndarray) -> np.ndarray:
    """(N,) one number for each row (N, A) of numbers from 0 on: as many different ones as there are different rows."""
    keys = np.zeros(len(rows), np.int64)
    for column in rows.T:
        values = int(column.max(initial=0)) + 1
        if keys.max(initial=0) >= (1 << 62) // values:  # too many to count on: number those that occur
            keys = np.unique(keys, return_inverse=True)[1].reshape(-1)
        keys = keys * values + column
    return keys


def _hosts(slots: np.ndarray, num_experts: int) -> np.ndarray:
    """(E,) the lowest rank that holds each expert, from slots (G, P / G)."""
    out = np.zeros(num_experts, np.int64)
    for g in reversed(range(len(slots))):
        out[slots[g]] = g
    return out


def _first_labels(affinity: np.ndarray, ranks: int, starts: int, rng) -> list[np.ndarray]:
    """Rank labels (E,) of each start: the first by the affinity of expert pairs, the others at random."""
    if starts <= 0:
        return []
    E = len(affinity)
    pairs = hierarchy.spread(affinity, np.zeros((E, ranks)), rng)
    return [pairs, *(rng.permutation(np.arange(E) % ranks) for _ in range(starts - 1))]


def _start(affinity: np.ndarray, ranks: int, redundant: int, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Slots (G, P / G) and primaries (E,) from rank labels (E,); redundant slots get the experts of most affinity."""
    slots = np.empty((ranks, (len(labels) + redundant) // ranks), np.int64)
    for g in range(ranks):
        slots[g] = hierarchy.fill(np.flatnonzero(labels == g), affinity, slots.shape[1])
    return slots, labels.astype(np.int64)
