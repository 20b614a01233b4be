"""The searches by tables: tables agree with loops, nothing is lost, and small instances reach the optimum."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement_search import WEIGHTS, neighbours, optimum, random_layout, random_sets, tokens_of

from semmoe.placement import moves, swaps
from semmoe.placement.homes import make_state
from semmoe.placement.loads import MIXES, draw_mixes, highest, highest_after, make_loads
from semmoe.placement.replicas import contribute, make_tables
from semmoe.placement.search import settle
from semmoe.topology import Topology

SINGLE = [
    Topology(ep_size=4),
    Topology(ep_size=4, num_nodes=2),
    Topology(ep_size=4, dp_size=2),
    Topology(ep_size=4, dp_size=2, num_nodes=2),
    Topology(ep_size=4, dp_size=4),
    Topology(ep_size=8, dp_size=4, num_nodes=2),
]
COPIES = [Topology(ep_size=4), Topology(ep_size=4, dp_size=2), Topology(ep_size=4, dp_size=4)]


def name(topology):
    return f"{topology.ep_size}ranks-{topology.dp_size}groups-{topology.num_nodes}nodes"


def value(instance, slots, primary, topology, price) -> float:
    """Sum of the sets' values under given prices, by loops."""
    cost = oracles.layout_cost(slots, primary.tolist(), tokens_of(*instance), topology, WEIGHTS, price)[0]
    return -cost * instance[1].sum()


@pytest.mark.parametrize("topology", SINGLE, ids=name)
@settings(max_examples=15)
@given(seed=st.integers(0, 9999), price_steps=st.sampled_from([0, 3]))
def test_the_table_s_gain_of_every_swap_is_what_loops_find(topology, seed, price_steps):
    G = topology.ep_size
    instance, (slots, primary) = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, G)
    state, _ = make_state(*instance, slots.copy(), primary.copy(), topology, WEIGHTS)
    gains = swaps.make_gains(state)
    swaps._settle(state, gains, price_steps, np.arange(len(instance[0])))
    before = value(instance, slots, primary, topology, state.price)
    for a, b in ((a, b) for a, b in product(range(8), repeat=2) if primary[a] != primary[b]):
        swapped = primary.copy()
        swapped[a], swapped[b] = primary[b], primary[a]
        other = np.argsort(swapped, kind="stable").reshape(G, -1)
        gain = gains.move[a, primary[b]] + gains.move[b, primary[a]] - gains.both[a, b] - gains.both[b, a]
        assert gain == pytest.approx(value(instance, other, swapped, topology, state.price) - before, abs=1e-6)


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 4, 8])
@settings(max_examples=10)
@given(seed=st.integers(0, 9999))
def test_the_tables_of_copies_are_exact_where_no_set_holds_both_experts(topology, redundant, seed):
    """Sets of one expert each hold no two: every swap, replacement and promotion is found as loops find it."""
    sets, weight, group = random_sets(seed, 8, topology.dp_size)
    sets = np.ascontiguousarray(sets[:, :1])
    instance, (slots, primary) = (sets, weight, group), random_layout(seed, 8, 4, redundant)
    state, _ = make_state(*instance, slots.copy(), primary.copy(), topology, WEIGHTS)
    tables = make_tables(state)
    moves._settle(state, tables, 2, np.arange(len(sets)))
    before, S = value(instance, slots, primary, topology, state.price), slots.shape[1]
    assert tables.value[0] == pytest.approx(before, abs=1e-6)
    for other, first in neighbours(slots, primary):
        if (other == slots).all() and (first == primary).all():
            continue
        (changed,) = np.nonzero((other != slots).ravel())
        if len(changed) == 2:
            p, q = changed
            found = tables.move[p, q // S] + tables.move[q, p // S]
        elif len(changed) == 1:
            p = changed[0]
            a, z = slots.ravel()[p], np.flatnonzero((other == slots.ravel()[p]).any(axis=1))[0]
            if primary[a] == p // S and first[a] != z:
                continue
            found = tables.drop[p] + tables.add[other.ravel()[p], p // S]
        else:
            (a,) = np.flatnonzero(first != primary)
            found = tables.promote[tables.slot_of[a, first[a]]]
        assert found == pytest.approx(value(instance, other, first, topology, state.price) - before, abs=1e-6)


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 4, 8])
@pytest.mark.parametrize("room", [True, False], ids=["kept", "computed again"])
@given(seed=st.integers(0, 9999))
def test_what_is_put_in_can_be_taken_out(topology, redundant, room, seed):
    instance, layout = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, 4, redundant)
    state, _ = make_state(*instance, *layout, topology, WEIGHTS)
    tables, every = make_tables(state), np.arange(len(instance[0]))
    if not room:
        tables = tables._replace(where=tables.where[:, :1].copy(), what=tables.what[:, :1].copy())
    moves._settle(state, tables, 2, every)
    assert (tables.kept >= 0).all() == room
    assert tables.served.sum() == pytest.approx(instance[1].sum() * 3)
    contribute(state, tables, every, len(every), -1.0)
    assert np.abs(tables.sums).max() < 1e-6


def search(instance, layout, topology, load_price=0.0, mixes=None, rounds=2, steps=40, seed=0, dues=None):
    slots, primary = layout
    state, scratch = make_state(*instance, slots.copy(), primary.copy(), topology, WEIGHTS)
    E = len(primary)
    mixes = np.full((E, 2), topology.ep_size / E) if mixes is None else mixes
    single = slots.size == E
    run = swaps.search_swaps if single else moves.search_moves
    tables = swaps.make_gains(state) if single else make_tables(state)
    dues = np.zeros((E, topology.ep_size)) if dues is None else dues
    loads = make_loads(topology.ep_size, mixes.shape[1])
    cost, load, made = run(state, scratch, tables, dues, mixes, loads, load_price, 0, rounds, steps, steps, 2, seed)
    return state, cost, load, made


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 4, 8])
@given(seed=st.integers(0, 9999))
def test_a_search_keeps_the_best_that_it_saw(topology, redundant, seed):
    instance, layout = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, 4, redundant)
    tokens = tokens_of(*instance)
    before = oracles.layout_cost(layout[0], layout[1].tolist(), tokens, topology, WEIGHTS)[0]
    state, cost, _, made = search(instance, layout, topology)
    assert made > 0
    assert cost <= before + 1e-9
    assert cost == pytest.approx(
        oracles.layout_cost(state.slots, state.primary.tolist(), tokens, topology, WEIGHTS)[0], abs=1e-6
    )
    assert all(e in state.slots[rank] for e, rank in enumerate(state.primary.tolist()))
    assert all(len(set(rank)) == len(rank) for rank in state.slots.tolist())
    again = search(instance, layout, topology)[0]
    np.testing.assert_array_equal(again.slots, state.slots)


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "topology"),
    [
        (6, 3, 0, Topology(ep_size=3)),
        (4, 2, 0, Topology(ep_size=2, dp_size=2)),
        (4, 2, 2, Topology(ep_size=2)),
        (4, 2, 2, Topology(ep_size=2, dp_size=2)),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_few_starts_is_the_optimum_of_a_small_instance(experts, ranks, redundant, topology, seed):
    instance = random_sets(seed, experts, topology.dp_size, count=12, top_k=2)
    found = [search(instance, random_layout(start, experts, ranks, redundant), topology)[1] for start in range(4)]
    best = optimum(instance, experts, ranks, (experts + redundant) // ranks, topology)
    assert min(found) == pytest.approx(best)


@pytest.mark.parametrize("redundant", [0, 2])
def test_load_that_costs_more_than_locality_gains_is_not_taken(redundant):
    """Experts 0 and 2, used together, carry three quarters of the load: 1.5 of the mean on one rank."""
    instance = np.array([[0, 2], [1, 3]], np.int16), np.array([3.0, 1.0]), np.zeros(2, np.int16)
    slots, primary = np.array([[0, 1], [2, 3]]), np.array([0, 0, 1, 1])
    if redundant:  # a further copy of an expert that no token uses
        slots, primary = np.array([[0, 1, 4], [2, 3, 4]]), np.array([0, 0, 1, 1, 0])
    mixes = np.array([[0.75], [0.25], [0.75], [0.25], [0.0]])[: len(primary)]
    together = search(instance, (slots, primary), Topology(ep_size=2), 2.0, mixes)
    assert together[1:3] == (-2.0, 1.5)
    apart = search(instance, (slots, primary), Topology(ep_size=2), 20.0, mixes)
    assert apart[2] == pytest.approx(1.0)
    assert apart[1] > -2.0


@pytest.mark.parametrize("redundant", [0, 4])
@given(seed=st.integers(0, 9999))
def test_no_expert_goes_where_it_costs_more_than_it_gains(redundant, seed):
    instance, layout = random_sets(seed, 8, 1), random_layout(seed, 8, 4, redundant)
    dues = np.full((8, 4), 1e3)
    dues[layout[0], np.arange(4)[:, None]] = 0.0
    state = search(instance, layout, Topology(ep_size=4), dues=dues)[0]
    np.testing.assert_array_equal(np.sort(state.slots, axis=1), np.sort(layout[0], axis=1))


@given(st.integers(0, 9999), st.integers(2, 6))
def test_the_highest_load_and_what_a_swap_makes_of_it_by_loops(seed, ranks):
    rng = np.random.default_rng(seed)
    mixes, rank_of = rng.random((12, 5)), rng.permutation(np.arange(12) % ranks)
    loads = make_loads(ranks, 5)
    load = loads.now
    load[:] = [mixes[rank_of == g].sum(axis=0) for g in range(ranks)]
    assert highest(loads) == pytest.approx(load.max(axis=0).mean())
    a, b = 0, next(e for e in range(12) if rank_of[e] != rank_of[0])
    x, y = rank_of[a], rank_of[b]
    swapped = rank_of.copy()
    swapped[a], swapped[b] = y, x
    after = np.stack([mixes[swapped == g].sum(axis=0) for g in range(ranks)]).max(axis=0).mean()
    others = loads.others[min(x, y), max(x, y)]
    assert loads.least[min(x, y), max(x, y)] == pytest.approx(max(others.mean(), 1.0))
    assert highest_after(mixes[a], 1.0, mixes[b], 1.0, load[x], load[y], others) == pytest.approx(after)


def test_mixes_are_loads_of_batches_of_other_requests():
    """A thousand requests of one expert each, and a great batch: an expert's load varies by sqrt(2 / its requests)."""
    request, experts = np.arange(4000), np.arange(4000)[:, None] % 4
    mixes = draw_mixes(experts, request, 4, 2, 1 << 24, np.random.default_rng(0))
    assert mixes.shape == (4, MIXES)
    np.testing.assert_allclose(mixes.sum(axis=0), 2, atol=0.01)
    assert mixes.std() == pytest.approx(0.5 * np.sqrt(2 / 1000 * 3 / 4), rel=0.2)


def test_prices_are_settled_between_rounds():
    """Without them all tokens would sit on the rank that hosts what they use most."""
    instance, layout = random_sets(0, 8, 1, count=400), random_layout(0, 8, 4)
    state, scratch = make_state(*instance, *layout, Topology(ep_size=4), WEIGHTS)
    dues, mixes = np.zeros((8, 4)), np.full((8, 2), 0.5)
    swaps.search_swaps(state, scratch, swaps.make_gains(state), dues, mixes, make_loads(4, 2), 0.0, 4, 3, 20, 20, 2, 0)
    assert state.price.any()
    settle(state, 0)
    full = np.bincount(state.home, state.weight, 4)
    assert full.max() < 1.5 * full.mean()
