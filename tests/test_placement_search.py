"""What all searches share: homes and prices agree with loops, for any costs and any number of nodes and copies."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.costs.rows import KINDS, kind_costs, plain_costs
from semmoe.placement.homes import index, make_state, server, uniform_weights
from semmoe.placement.search import PRICE_UNITS, settle
from semmoe.topology import Topology

TOPOLOGIES = [
    Topology(ep_size=4),
    Topology(ep_size=4, num_nodes=2),
    Topology(ep_size=4, dp_size=2),
    Topology(ep_size=4, dp_size=2, num_nodes=2),
    Topology(ep_size=4, dp_size=4, num_nodes=2),
    Topology(ep_size=4, dp_size=4, num_nodes=4),
    Topology(ep_size=8, dp_size=2, num_nodes=4),
    Topology(ep_size=8, dp_size=8, num_nodes=2),
]
WEIGHTS = (1.0, 1.0, 0.5)


def name(topology):
    return f"{topology.ep_size}ranks-{topology.dp_size}groups-{topology.num_nodes}nodes"


def random_sets(seed, experts, groups, count=40, top_k=3, kinds=1):
    """Sets (U, K), weights, attention groups and kinds (U,), as the search takes them.

    Sets have a few favourite experts, but each expert is in at least one.
    """
    rng = np.random.default_rng(seed)
    taste = rng.normal(size=(4, experts))[rng.integers(4, size=count)] * 2 + rng.gumbel(size=(count, experts))
    taste[np.arange(experts), np.arange(experts)] += 100
    sets = rng.permutation(np.sort(np.argsort(-taste, axis=1)[:, :top_k], axis=1)).astype(np.int16)
    weight, group = rng.integers(1, 6, count).astype(np.float64), rng.integers(groups, size=count).astype(np.int16)
    return sets, weight, group, rng.integers(kinds, size=count)


def uniform_costs(topology, weights=WEIGHTS):
    return (plain_costs(topology, *weights),)


def random_costs(seed, topology):
    """Costs of two phases, each by a kind of all-to-all over links whose times are multiples of a quarter."""
    rng = np.random.default_rng(seed)
    return tuple(
        kind_costs(KINDS[rng.integers(3)], topology, rng.integers(1, 20, (topology.ep_size,) * 2) / 4.0, 1.0, 0.5)
        for _ in range(2)
    )


def random_layout(seed, experts, ranks, redundant=0):
    """Slots (G, S) without repetition on a rank, and the primaries (E,): each expert's first rank in the draw."""
    rng = np.random.default_rng(seed)
    own = rng.permutation(experts).reshape(ranks, -1)
    primary = np.empty(experts, np.int64)
    primary[own] = np.arange(ranks)[:, None]
    further = [rng.permutation(np.setdiff1d(np.arange(experts), row))[: redundant // ranks] for row in own]
    return np.concatenate([own, np.array(further, np.int64).reshape(ranks, -1)], axis=1), primary


def tokens_of(sets, weight, group, kind):
    return list(zip(sets.tolist(), weight.tolist(), group.tolist(), kind.tolist(), strict=True))


def neighbours(slots, primary):
    """Every layout that one move leads to: swaps, further copies in place of others, other primary copies."""
    G, S = slots.shape
    for x, i, y, j in product(range(G), range(S), range(G), range(S)):
        a, b = slots[x, i], slots[y, j]
        if x < y and a not in slots[y] and b not in slots[x]:
            other, first = slots.copy(), primary.copy()
            other[x, i], other[y, j] = b, a
            first[a], first[b] = y if primary[a] == x else primary[a], x if primary[b] == y else primary[b]
            yield other, first
    for x, i, b in product(range(G), range(S), range(len(primary))):
        a = slots[x, i]
        ranks = [rank for rank in range(G) if a in slots[rank] and rank != x]
        if ranks and b not in slots[x]:
            other, first = slots.copy(), primary.copy()
            other[x, i], first[a] = b, ranks[0] if primary[a] == x else primary[a]
            yield other, first
        for rank in ranks:
            yield slots, np.where(np.arange(len(primary)) == a, rank, primary)


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 8])
@pytest.mark.parametrize("uniform", [True, False])
@given(seed=st.integers(0, 9999))
def test_every_set_has_the_home_that_loops_find(topology, redundant, uniform, seed):
    instance, (slots, primary) = (
        random_sets(seed, 8, topology.dp_size, kinds=2 - uniform),
        random_layout(seed, 8, topology.ep_size, redundant),
    )
    costs = uniform_costs(topology) if uniform else random_costs(seed, topology)
    state, _ = make_state(instance, slots.copy(), primary.copy(), topology, costs)
    settle(state, 2)
    hosting = uniform and not redundant
    _, values, homes = oracles.layout_cost(
        slots, primary.tolist(), tokens_of(*instance), topology, costs, state.price, hosting
    )
    np.testing.assert_allclose(state.value, values)
    assert state.home.tolist() == homes


@pytest.mark.parametrize("topology", TOPOLOGIES, ids=name)
def test_prices_rise_where_homes_are_full_by_loops(topology):
    """By 0.3, 0.15, 0.1 and so on of what a home holds beyond its group's mean, at most as for twice the mean."""
    instance, G = random_sets(8, 8, topology.dp_size, count=60), topology.ep_size
    slots, primary = random_layout(8, 8, G)
    price, size, costs = np.zeros(G), topology.attn_tp_size, uniform_costs(topology)
    for step in range(3):
        state, _ = make_state(instance, slots, primary, topology, costs)
        settle(state, step)
        np.testing.assert_allclose(state.price, price, atol=2 / PRICE_UNITS)
        homes = oracles.layout_cost(slots, primary.tolist(), tokens_of(*instance), topology, costs, state.price, True)[
            2
        ]
        full = np.bincount(homes, instance[1], G).reshape(-1, size)
        rise = np.minimum(full / full.mean(axis=1, keepdims=True) - 1, 1)
        price = state.price.reshape(-1, size) + 0.3 / (1 + step) * rise
        price = (price - price.mean(axis=1, keepdims=True)).ravel()


def test_prices_even_out_homes():
    """Every expert is everywhere, so that only prices tell homes apart: all at rank 0 without, spread out with."""
    rng, topology = np.random.default_rng(0), Topology(ep_size=4)
    instance = random_sets(0, 8, 1, count=400)
    slots, primary = np.tile(np.arange(8), (4, 1)), rng.integers(4, size=8)
    state, _ = make_state(instance, slots, primary, topology, uniform_costs(topology))
    settle(state, 0)
    assert not state.home.any()
    settle(state, 4)
    assert state.price.argmax() == 0
    assert state.price.sum() == pytest.approx(0, abs=4 / PRICE_UNITS)


@pytest.mark.parametrize("topology", [Topology(ep_size=70), Topology(ep_size=70, dp_size=2, num_nodes=2)], ids=name)
@pytest.mark.parametrize("redundant", [0, 70])
def test_copies_serve_from_as_near_as_they_are(topology, redundant):
    instance, (slots, primary) = random_sets(1, 140, topology.dp_size, count=300), random_layout(1, 140, 70, redundant)
    state, _ = make_state(instance, slots, primary, topology, uniform_costs(topology))
    index(state)
    hosts, node_of = [set(rank) for rank in slots.tolist()], topology.node_of.tolist()
    for expert, home in product(range(0, 140, 7), range(70)):
        assert server(state, expert, home) == oracles.serves(hosts, node_of, primary.tolist(), expert, home)
    assert state.copies.sum() == slots.size


def test_costs_are_uniform_where_every_rank_charges_the_same():
    topology = Topology(ep_size=4, num_nodes=2)
    even, node_of = plain_costs(topology, 1.0, 2.0, 3.0), topology.node_of
    assert uniform_weights((even,), node_of) == (1.0, 2.0, 3.0)
    assert uniform_weights((even, even), node_of) == (1.0, 2.0, 3.0)
    assert uniform_weights((even, plain_costs(topology, 1.0, 2.0, 4.0)), node_of) is None
    links = np.where(node_of[:, None] == node_of, 1.0, 5.0)
    assert uniform_weights((kind_costs("per-rank", topology, links),), node_of) is None
    single = Topology(ep_size=4)
    per_pair = kind_costs("per-pair", single, np.ones((4, 4)), activation=1.0)
    assert uniform_weights((per_pair,), single.node_of) == (2.0, 0.0, 0.0)
