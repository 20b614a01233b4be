"""semmoe's own placement: experts and their copies where the tokens that use them will be, under a load limit.

Every layer is searched on its own (`placement.search` states the objective), from seeded starts and then by iterated
local search: kick the best layout by a few random swaps, search again, keep what is better. A few load caps are tried
a layer; of the layouts found, one a layer is chosen so that the mean load over layers, as a batch of unseen requests
would see it, stays within the limit at the least traffic (one shadow price for all layers: time is their sum).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from os import cpu_count

import numpy as np

from semmoe.core import Placement, RoutingTrace, Topology, require
from semmoe.metrics import layer_traffic
from semmoe.placement.search import improve, make_state
from semmoe.settings import CoclusterSettings

MAX_TOKENS = 1 << 16  # of a layer that a search looks at; more change little
NO_CAP = 1e9
MARGINS = (np.inf, 0.0, -0.04, -0.08, -0.12)  # load caps to try, relative to the limit


@dataclass(frozen=True)
class Layout:
    """One layer: the expert of every slot (G, S) and the rank (E,) of each expert's primary copy."""

    slots: np.ndarray
    primary: np.ndarray
    cost: float

    def serving(self, topology: Topology) -> np.ndarray:
        """(G, E) int16: the rank that serves each expert to each source rank: own, own node's, primary."""
        G, E = len(self.slots), len(self.primary)
        hosted = np.zeros((G, E), bool)
        hosted[np.arange(G)[:, None], self.slots] = True
        out = np.tile(self.primary, (G, 1))
        node = np.arange(G) // (G // topology.num_nodes)
        far = node[self.primary][None, :] != node[:, None]
        for g in range(G):
            near = hosted[node == node[g]]
            first = np.flatnonzero(node == node[g])[near.argmax(axis=0)]
            out[g] = np.where(far[g] & near.any(axis=0), first, out[g])
            out[g] = np.where(hosted[g], g, out[g])
        return out.astype(np.int16)


def search_layer(
    expert_ids: np.ndarray, group: np.ndarray, num_experts: int, topology: Topology, redundant: int, caps: list[float],
    settings: CoclusterSettings, seed: int, start: np.ndarray | None = None,
) -> list[Layout]:  # fmt: skip
    """The best layout found under each load cap, the loosest first.

    expert_ids (T, K), group (T,) attention group of each token's request; start (E,) rank labels to begin from.
    """
    rng = np.random.default_rng(seed)
    sets, weight, groups = _distinct(expert_ids, group, rng)
    weights = (settings.activation, settings.remote_rank, settings.remote_node)

    def run(slots: np.ndarray, primary: np.ndarray, cap: float) -> Layout:
        state, scratch = make_state(sets, weight, groups, slots.copy(), primary.copy(), topology, weights)
        cost, _ = improve(
            state, scratch, settings.load_price, cap, settings.price_steps, settings.sweeps, int(rng.integers(2**31))
        )
        return Layout(state.slots, state.primary, cost)

    affinity = _together(sets, weight, num_experts)
    out: list[Layout] = []
    for cap in caps:
        if out:
            best = run(out[-1].slots, out[-1].primary, cap)
        else:
            labels = [start] if start is not None else [None] * settings.starts
            best = min((run(*_start(affinity, topology.ep_size, redundant, l, rng), cap) for l in labels), key=_cost)
        for _ in range(settings.kicks if not out else settings.kicks // 2):
            best = min(best, run(*_kick(best, rng), cap), key=_cost)
        out.append(best)
    return out


def _cost(layout: Layout) -> float:
    return layout.cost


def _distinct(expert_ids, group, rng):
    """The distinct (set of experts, group) of at most MAX_TOKENS tokens in random order, with how often each occurs."""
    if len(expert_ids) > MAX_TOKENS:
        rows = rng.choice(len(expert_ids), MAX_TOKENS, replace=False)
        expert_ids, group = expert_ids[rows], group[rows]
    keyed = np.concatenate([np.sort(expert_ids, axis=1).astype(np.int16), group[:, None].astype(np.int16)], axis=1)
    distinct, counts = np.unique(keyed, axis=0, return_counts=True)
    order = rng.permutation(len(distinct))
    return np.ascontiguousarray(distinct[order, :-1]), counts[order].astype(np.float64), distinct[order, -1]


def _together(sets: np.ndarray, weight: np.ndarray, num_experts: int) -> np.ndarray:
    """(E, E): tokens that use both experts; the diagonal is zero."""
    out = np.zeros(num_experts * num_experts)
    K = sets.shape[1]
    for i in range(K):
        for j in range(K):
            if i != j:
                out += np.bincount(sets[:, i].astype(np.int64) * num_experts + sets[:, j], weight, len(out))
    return out.reshape(num_experts, num_experts)


def _start(affinity: np.ndarray, ranks: int, redundant: int, labels: np.ndarray | None, rng):
    """Slots (G, S) and primaries (E,): random or given labels, and on every rank the foreign experts most used there."""
    E = len(affinity)
    if labels is None:
        labels = rng.permutation(np.arange(E) % ranks)
    slots = np.empty((ranks, (E + redundant) // ranks), np.int64)
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
