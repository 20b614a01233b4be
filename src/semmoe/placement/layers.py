"""The search for layouts of one layer: roughly from several starts on a sample, then finer from the best of these.

Without copies the moves are those of `swaps`, with copies those of `moves`; copies on several nodes are judged move by
move (`search`). A layout's load has a price, which all layers share (`cocluster`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product

import numpy as np

from semmoe.affinity import pair_count
from semmoe.placement.greedy import place_layer
from semmoe.placement.homes import make_state
from semmoe.placement.loads import draw_mixes, make_loads
from semmoe.placement.moves import search_moves, sum_dues
from semmoe.placement.replicas import make_tables
from semmoe.placement.search import improve
from semmoe.placement.swaps import make_gains, search_swaps
from semmoe.settings import CoclusterSettings
from semmoe.topology import Topology

ROUGH_TOKENS = 3072  # of a rough search
# A finer search uses so many tokens per expert, and at most so many, without and with redundant experts; of tokens that
# hardly repeat each other, at most so many distinct sets.
FINER_TOKENS, MOST_TOKENS, MOST_SETS = (2048, 128), (1 << 15, 6144), 1 << 14
FINER_STEPS = 0.8  # of the steps of a rough search
TENURE = 8  # experts that were moved stay for at least one step per so many experts
EASY_SWAPS = 200  # random swaps per expert that form a start from the affinity of expert pairs alone
# One search on copies over several nodes; load caps are below the limit, since a batch's load is above the profile's.
JUDGED_MOVES, JUDGED_KICKS, JUDGED_SWEEPS, JUDGED_MARGIN = 20_000, 4, 12, 0.09
BITS = 64  # ranks that the tables of `replicas` can tell apart


@dataclass(frozen=True)
class Layout:
    """A layout of one layer: the expert in every slot (G, P / G) and the rank (E,) of each expert's primary copy."""

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
        expert_ids: np.ndarray,
        group: np.ndarray,
        request: np.ndarray,
        num_experts: int,
        topology: Topology,
        redundant: int,
        settings: CoclusterSettings,
        seed: int,
        previous: np.ndarray | None = None,
    ) -> None:
        """expert_ids (T, K), group (T,): attention group of each token's request, request (T,).

        previous (G, P / G): the experts in the slots of the layout to begin from, which are costly to move; one rough
        search goes on from there.
        """
        self.rng = np.random.default_rng(seed)
        self.num_experts, self.topology, self.redundant, self.settings = num_experts, topology, redundant, settings
        if previous is None:
            self.fine = self._finer_sample(expert_ids, group)
            self.affinity = pair_count(self.fine[0], self.fine[0], num_experts, self.fine[1])
            np.fill_diagonal(self.affinity, 0)
        self.sample = _distinct(expert_ids, group, ROUGH_TOKENS, self.rng)
        batch = settings.batch_tokens
        self.mixes = draw_mixes(expert_ids, request, num_experts, topology.ep_size, batch, self.rng)
        self.found: list[Layout] = []
        self.previous, self.dues = previous, np.zeros((num_experts, topology.ep_size))
        if previous is not None:
            self.dues += settings.move_cost
            self.dues[previous, np.arange(topology.ep_size)[:, None]] = 0.0

    def _finer_sample(self, expert_ids: np.ndarray, group: np.ndarray):
        copies = int(self.redundant > 0)
        most = min(FINER_TOKENS[copies] * self.num_experts, MOST_TOKENS[copies])
        found = _distinct(expert_ids, group, most, self.rng)
        return found if len(found[0]) <= MOST_SETS else _distinct(expert_ids, group, MOST_SETS, self.rng)

    def rough(
        self, load_prices: list[float], labels: np.ndarray | None = None, in_time: Callable[[], bool] = lambda: True
    ) -> list[Layout]:
        """The best layout found at each price: from all starts at the first, from the best of these at the others.

        labels (E,): rank labels of the first start. in_time: whether a further search may begin; the first always does.
        """
        first, steps, self.found = load_prices[0], self.settings.steps, []
        for layout in self._starts(labels):
            if not self.found or in_time():
                self.found.append(self._run(self.sample, *layout, first, steps))
        best = sorted(self.found, key=lambda one: one.total(first))[: self.settings.kept]
        for price, one in product(load_prices[1:], best):
            if in_time():
                self.found.append(self._run(self.sample, one.slots, one.primary, price, steps))
        return [min(self.found, key=lambda one: one.total(price)) for price in load_prices]

    def _starts(self, labels: np.ndarray | None) -> list[tuple[np.ndarray, np.ndarray]]:
        """Slots and primaries to begin from."""
        if self.previous is not None:
            return [(self.previous.astype(np.int64), _hosts(self.previous, self.num_experts))]
        given = [] if labels is None else [labels]
        more = self.settings.starts - len(given)
        starts = given + _first_labels(self.affinity, self.topology.ep_size, more, self.rng)
        return [_start(self.affinity, self.topology.ep_size, self.redundant, one) for one in starts]

    def finer(self, load_prices: list[float], in_time: Callable[[], bool] = lambda: True) -> list[Layout]:
        """Layouts found on more tokens, at each price from the best rough ones; in_time: see `rough`."""
        steps, out = int(FINER_STEPS * self.settings.steps), []
        for price in load_prices:
            for one in sorted(self.found, key=lambda one: one.total(price))[: self.settings.kept]:
                if in_time():
                    out.append(self._run(self.fine, one.slots, one.primary, price, steps))
        return out

    def _run(self, sets, slots, primary, load_price: float, steps: int) -> Layout:
        settings = self.settings
        weights = (settings.activation, settings.remote_rank, settings.remote_node)
        state, scratch = make_state(*sets, slots.copy(), primary.copy(), self.topology, weights)  # type: ignore
        tenure, seed = max(self.num_experts // TENURE, 1), int(self.rng.integers(2**31))
        effort = settings.price_steps, settings.rounds, steps, settings.patience, tenure, seed
        prices = self.dues, self.mixes, make_loads(self.topology.ep_size, self.mixes.shape[1]), load_price
        if not self.redundant:
            cost, load, _ = search_swaps(state, scratch, make_gains(state), *prices, *effort)
        elif self.topology.num_nodes == 1 and self.topology.ep_size <= BITS:
            cost, load, _ = search_moves(state, scratch, make_tables(state), *prices, *effort)
        else:
            return self._judged(sets, slots, primary, load_price, weights)
        return Layout(state.slots, state.primary, cost, load, float(sum_dues(state.slots, self.dues)))

    def _judged(self, sets, slots, primary, load_price: float, weights) -> Layout:
        """Iterated local search on copies over several nodes, under a load cap in place of the expected load."""
        settings, best = self.settings, None
        cap = max((settings.load_limit or np.inf) - JUDGED_MARGIN, 1.0)
        for most in (0, *[JUDGED_MOVES] * JUDGED_KICKS):  # the layout itself first
            state, scratch = make_state(*sets, slots.copy(), primary.copy(), self.topology, weights)  # type: ignore
            effort = settings.price_steps, JUDGED_SWEEPS, int(self.rng.integers(2**31)), most
            cost, _ = improve(state, scratch, load_price, cap, *effort)
            found = Layout(state.slots, state.primary, cost, 0.0, float(sum_dues(state.slots, self.dues)))
            if best is None or found.total(0.0) < best.total(0.0):
                best = found
            slots, primary = _kick(best, self.rng) if most else (best.slots, best.primary)
        assert best is not None
        return best


def _distinct(expert_ids, group, most, rng):
    """The distinct pairs (set of experts, group) of at most `most` tokens, in random order, with their counts."""
    if len(expert_ids) > most:
        rows = rng.choice(len(expert_ids), most, replace=False)
        expert_ids, group = expert_ids[rows], group[rows]
    keyed = np.concatenate([np.sort(expert_ids, axis=1).astype(np.int16), group[:, None].astype(np.int16)], axis=1)
    _, first, counts = np.unique(_keys(keyed), return_index=True, return_counts=True)
    order = rng.permutation(len(first))
    distinct = keyed[first[order]]
    return np.ascontiguousarray(distinct[:, :-1]), counts[order].astype(np.float64), distinct[:, -1]


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
