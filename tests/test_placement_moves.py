"""The searches by tables: tables agree with loops, nothing is lost, and small instances reach the optimum."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_placement_search import (
    TOPOLOGIES,
    name,
    neighbours,
    random_costs,
    random_layout,
    random_sets,
    tokens_of,
    uniform_costs,
)

from semmoe.costs.rows import plain_costs
from semmoe.placement import moves
from semmoe.placement.homes import index, make_state
from semmoe.placement.loads import MIXES, draw_mixes, highest, load_gain, make_prices
from semmoe.placement.moves import PROMOTE, REPLACE, SWAP
from semmoe.placement.problem import Tokens
from semmoe.placement.replicas import make_tables
from semmoe.placement.search import Effort, Turn, collect, settle
from semmoe.topology import Topology

SINGLE = [
    Topology(ep_size=4),
    Topology(ep_size=4, num_nodes=2),
    Topology(ep_size=4, dp_size=2),
    Topology(ep_size=4, dp_size=2, num_nodes=2),
    Topology(ep_size=4, dp_size=4),
    Topology(ep_size=8, dp_size=4, num_nodes=2),
    Topology(ep_size=8, dp_size=8, num_nodes=2),
]
COPIES = [Topology(ep_size=4), Topology(ep_size=4, dp_size=2), *TOPOLOGIES[3:]]


def value(instance, slots, primary, topology, price, costs=None, hosting=False) -> float:
    """Sum of the sets' values under given prices, by loops."""
    costs = costs or uniform_costs(topology)
    tokens = tokens_of(*instance)
    return -oracles.layout_cost(slots, primary.tolist(), tokens, topology, costs, price, hosting)[0] * instance[1].sum()


@pytest.mark.parametrize("topology", SINGLE, ids=name)
@settings(max_examples=15)
@given(seed=st.integers(0, 9999), price_steps=st.sampled_from([0, 3]))
def test_the_table_s_gain_of_every_swap_is_what_loops_find(topology, seed, price_steps):
    G = topology.ep_size
    instance, (slots, primary) = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, G)
    state, _ = make_state(instance, slots.copy(), primary.copy(), topology, uniform_costs(topology))
    tables, place = make_tables(state), np.argsort(slots, axis=None)
    moves._settle(state, tables, price_steps, moves.SWAPS)
    before = value(instance, slots, primary, topology, state.price, hosting=True)
    assert tables.value[0] == pytest.approx(before, abs=1e-6)
    for a, b in ((a, b) for a, b in product(range(8), repeat=2) if primary[a] != primary[b]):
        swapped = primary.copy()
        swapped[a], swapped[b] = primary[b], primary[a]
        other = np.argsort(swapped, kind="stable").reshape(G, -1)
        p, q = place[a], place[b]
        gain = tables.move[p, primary[b]] + tables.move[q, primary[a]] - tables.twice[p, q] - tables.twice[q, p]
        after = value(instance, other, swapped, topology, state.price, hosting=True)
        assert gain == pytest.approx(after - before, abs=1e-6)


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize(("redundant", "top_k"), [(0, 1), (0, 3), (8, 1), (16, 1)])
@settings(max_examples=4)
@given(seed=st.integers(0, 9999))
def test_the_tables_are_exact_for_any_costs(topology, redundant, top_k, seed):
    """Every swap, replacement and promotion is found as loops find it, but where a set holds two experts of a move and
    there are copies: hence sets of one expert there."""
    sets, *about = random_sets(seed, 8, topology.dp_size, kinds=2)
    instance, costs = (np.ascontiguousarray(sets[:, :top_k]), *about), random_costs(seed, topology)
    slots, primary = random_layout(seed, 8, topology.ep_size, redundant)
    state, _ = make_state(instance, slots.copy(), primary.copy(), topology, costs)
    tables = make_tables(state)
    moves._settle(state, tables, 2, moves.REPLICAS)
    before = value(instance, slots, primary, topology, state.price, costs)
    assert tables.value[0] == pytest.approx(before, abs=1e-6)
    for other, first in neighbours(slots, primary):
        found = gain(state, tables, slots, primary, other, first)
        if found is not None:
            assert found == pytest.approx(
                value(instance, other, first, topology, state.price, costs) - before, abs=1e-6
            )


def gain(state, tables, slots, primary, other, first):
    """What the tables say of the move to a layout; None if nothing moves, or if a lower copy becomes primary."""
    S, (changed,) = slots.shape[1], np.nonzero((other != slots).ravel())
    if len(changed) == 2:
        p, q = changed
        return tables.move[p, q // S] + tables.move[q, p // S] - tables.twice[p, q] - tables.twice[q, p]
    if len(changed) == 1:
        p, a, b = changed[0], slots.ravel()[changed[0]], other.ravel()[changed[0]]
        z = np.flatnonzero((other == a).any(axis=1))[0]
        led = primary[a] == p // S and first[a] != z
        return None if led else tables.drop[p] + tables.add[b, p // S] - tables.instead[p, b]
    if (first == primary).all():
        return None
    (a,) = np.flatnonzero(first != primary)
    return tables.promote[state.slot_of[a, first[a]]]


def as_move(slots, primary, other, first):
    """The move from a layout to another, as `best_move` returns it."""
    S, (changed,) = slots.shape[1], np.nonzero((other != slots).ravel())
    if len(changed) == 2:
        return SWAP, *changed
    if len(changed) == 1:
        return REPLACE, changed[0], other.ravel()[changed[0]]
    (a,) = np.flatnonzero(first != primary)
    return PROMOTE, first[a] * S + np.flatnonzero(slots[first[a]] == a)[0], a


@pytest.mark.parametrize("topology", [Topology(ep_size=6, num_nodes=2), Topology(ep_size=8, num_nodes=2)], ids=name)
@settings(max_examples=15)
@given(seed=st.integers(0, 9999))
def test_every_move_leaves_the_state_that_its_layout_has(topology, seed):
    """On nodes of three and four ranks, each with several copies of most experts."""
    G, rng = topology.ep_size, np.random.default_rng(seed)
    slots, primary = random_layout(seed, G, G, 2 * G)
    instance = random_sets(seed, G, 1, count=G)
    state, _ = make_state(instance, slots.copy(), primary.copy(), topology, uniform_costs(topology))
    for _ in range(10):
        options = [to for to in neighbours(slots, primary) if (to[0] != slots).any() or (to[1] != primary).any()]
        other, first = options[rng.integers(len(options))]
        moves.make_move(state, *as_move(slots, primary, other, first))
        slots, primary = other, first
        np.testing.assert_array_equal(state.slots, slots)
        np.testing.assert_array_equal(state.primary, primary)
        anew = state._replace(**{name: getattr(state, name).copy() for name in ("slot_of", "near", "copies")})
        index(anew)
        for table in ("slot_of", "near", "copies"):
            np.testing.assert_array_equal(getattr(state, table), getattr(anew, table), table)


@pytest.mark.parametrize(("redundant", "top_k"), [(0, 3), (8, 1)])
def test_a_group_of_more_homes_than_are_looked_at_is_told_no_gain_that_is_not_there(redundant, top_k):
    """The tables look at the best four of eight homes and at the rank that a copy comes to: few gains are missed."""
    topology, (sets, *about) = Topology(ep_size=8, num_nodes=2), random_sets(5, 16, 1, count=100)
    instance, (slots, primary) = (np.ascontiguousarray(sets[:, :top_k]), *about), random_layout(5, 16, 8, redundant)
    costs = random_costs(5, topology)
    state, _ = make_state(instance, slots.copy(), primary.copy(), topology, costs)
    tables = make_tables(state)
    moves._settle(state, tables, 2, moves.REPLICAS)
    before, found = value(instance, slots, primary, topology, state.price, costs), []
    for other, first in neighbours(slots, primary):
        told = gain(state, tables, slots, primary, other, first)
        if told is not None:
            found.append((told, value(instance, other, first, topology, state.price, costs) - before))
    told, true = np.array(found).T
    assert (told <= true + 1e-6).all()
    assert (true - told).mean() < 0.03 * np.abs(true).mean()


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 8, 16])
@pytest.mark.parametrize("room", [True, False], ids=["kept", "computed again"])
@given(seed=st.integers(0, 9999))
def test_what_is_put_in_can_be_taken_out(topology, redundant, room, seed):
    instance, layout = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, topology.ep_size, redundant)
    state, _ = make_state(instance, *layout, topology, uniform_costs(topology))
    tables, every = make_tables(state), np.arange(len(instance[0]))
    if not room:
        tables = tables._replace(where=tables.where[:, :1].copy(), what=tables.what[:, :1].copy())
    moves._settle(state, tables, 2, moves.REPLICAS)
    assert (tables.kept >= 0).all() == room
    assert tables.served.sum() == pytest.approx(instance[1].sum() * 3)
    moves.contribute(state, tables, every, len(every), -1.0, moves.REPLICAS)
    assert np.abs(tables.sums).max() < 1e-6


ONE_NODE = [Topology(ep_size=4), Topology(ep_size=4, dp_size=2), Topology(ep_size=4, dp_size=4), Topology(ep_size=8)]


def filled(tables):
    """The tables by name, but for entries of `instead` that put an expert in its own place, which no move is."""
    return {name: getattr(tables, name) for name in tables._fields[: tables._fields.index("sums")] if name != "instead"}


@pytest.mark.parametrize("topology", ONE_NODE, ids=name)
@settings(max_examples=8)
@given(seed=st.integers(0, 9999), activation=st.sampled_from([1.0, 0.125]))
def test_one_node_has_the_tables_that_any_costs_have(topology, seed, activation):
    instance, costs = random_sets(seed, 8, topology.dp_size), (plain_costs(topology, activation, 1.0, 1.0),)
    (slots, primary), both = random_layout(seed, 8, topology.ep_size, 8), []
    for fill in (moves.REPLICAS, moves.ONE_NODE):
        state, _ = make_state(instance, slots.copy(), primary.copy(), topology, costs)
        both.append(make_tables(state))
        moves._settle(state, both[-1], 2, fill)
    assert moves.choose_fill(state) == moves.ONE_NODE
    for table, general in filled(both[0]).items():
        np.testing.assert_allclose(getattr(both[1], table), general, atol=1e-9, err_msg=table)
    other = np.arange(8) != slots.ravel()[:, None]  # an expert does not take its own place
    np.testing.assert_allclose(both[1].instead[other], both[0].instead[other], atol=1e-9)


@pytest.mark.parametrize("fill", [moves.REPLICAS, moves.ONE_NODE])
@settings(max_examples=8)
@given(seed=st.integers(0, 9999))
def test_tables_follow_every_move(fill, seed):
    """Sets of the experts of a move are taken out before it and put in after it: so the tables are those of a fill."""
    topology, rng = Topology(ep_size=4), np.random.default_rng(seed)
    (slots, primary), mark = random_layout(seed, 4, 4, 4), 0
    state, scratch = make_state(
        random_sets(seed, 4, 1, count=20), slots.copy(), primary.copy(), topology, uniform_costs(topology)
    )
    tables, fresh, every = make_tables(state), make_tables(state), np.arange(len(state.sets))
    moves._settle(state, tables, 2, fill)
    scratch.stamp[:] = -1
    for mark in range(10):
        options = [to for to in neighbours(slots, primary) if (to[0] != slots).any() or (to[1] != primary).any()]
        to = options[rng.integers(len(options))]
        kind, p, other = as_move(slots, primary, *to)
        b = slots.ravel()[other] if kind == SWAP else other
        count = collect(state, scratch, slots.ravel()[p], b, mark)
        moves.contribute(state, tables, scratch.touched, count, -1.0, fill)
        moves.make_move(state, kind, p, other)
        moves.contribute(state, tables, scratch.touched, count, 1.0, fill)
        slots, primary = to
        fresh.sums[:] = 0.0
        moves.contribute(state, fresh, every, len(every), 1.0, fill)
        np.testing.assert_allclose(tables.sums, fresh.sums, atol=1e-9)


def search(
    instance,
    layout,
    topology,
    load_price=0.0,
    mixes=None,
    rounds=2,
    steps=40,
    seed=0,
    move_cost=None,
    costs=None,
):
    (slots, primary), costs = layout, costs or uniform_costs(topology)
    state, scratch = make_state(instance, slots.copy(), primary.copy(), topology, costs)
    E = len(primary)
    mixes = np.full((E, 2), topology.ep_size / E) if mixes is None else mixes
    move_cost = np.zeros((E, topology.ep_size)) if move_cost is None else move_cost
    prices, effort = make_prices(move_cost, mixes, load_price), Effort(0, rounds, steps, steps, 2, seed)
    cost, load, made = moves.search_moves(state, scratch, prices, effort)
    return state, cost, load, made


@pytest.mark.parametrize("topology", COPIES, ids=name)
@pytest.mark.parametrize("redundant", [0, 8, 16])
@pytest.mark.parametrize("uniform", [True, False])
@settings(max_examples=8)
@given(seed=st.integers(0, 9999))
def test_a_search_keeps_the_best_that_it_saw(topology, redundant, uniform, seed):
    instance, layout = random_sets(seed, 8, topology.dp_size), random_layout(seed, 8, topology.ep_size, redundant)
    tokens, costs = tokens_of(*instance), uniform_costs(topology) if uniform else random_costs(seed, topology)
    hosting = uniform and not redundant
    before = oracles.layout_cost(layout[0], layout[1].tolist(), tokens, topology, costs, hosting=hosting)[0]
    state, cost, _, made = search(instance, layout, topology, costs=costs)
    assert made > 0
    assert cost <= before + 1e-9
    after = oracles.layout_cost(state.slots, state.primary.tolist(), tokens, topology, costs, hosting=hosting)[0]
    assert cost == pytest.approx(after, abs=1e-6)
    assert all(e in state.slots[rank] for e, rank in enumerate(state.primary.tolist()))
    assert all(len(set(rank)) == len(rank) for rank in state.slots.tolist())
    again = search(instance, layout, topology, costs=costs)[0]
    np.testing.assert_array_equal(again.slots, state.slots)


def optimum(instance, experts, ranks, slots_per_rank, topology, costs) -> float:
    return min(
        oracles.layout_cost(slots, primary.tolist(), tokens_of(*instance), topology, costs)[0]
        for slots, primary in oracles.all_layouts(experts, ranks, slots_per_rank)
    )


@pytest.mark.parametrize(
    ("experts", "ranks", "redundant", "topology"),
    [
        (6, 3, 0, Topology(ep_size=3)),
        (4, 2, 0, Topology(ep_size=2, dp_size=2)),
        (4, 2, 2, Topology(ep_size=2)),
        (4, 2, 2, Topology(ep_size=2, num_nodes=2)),
        (4, 2, 2, Topology(ep_size=2, dp_size=2)),
        (4, 4, 0, Topology(ep_size=4, dp_size=4, num_nodes=2)),
        (4, 4, 0, Topology(ep_size=4, dp_size=2, num_nodes=2)),
    ],
    ids=str,
)
@pytest.mark.parametrize("uniform", [True, False])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_a_few_starts_is_the_optimum_of_a_small_instance(
    experts, ranks, redundant, topology, uniform, seed
):
    instance = random_sets(seed, experts, topology.dp_size, count=12, top_k=2)
    costs = uniform_costs(topology) if uniform else random_costs(seed, topology)
    found = [
        search(instance, random_layout(start, experts, ranks, redundant), topology, costs=costs)[1]
        for start in range(6)
    ]
    best = optimum(instance, experts, ranks, (experts + redundant) // ranks, topology, costs)
    assert min(found) == pytest.approx(best)


@pytest.mark.parametrize("redundant", [0, 2])
def test_load_that_costs_more_than_locality_gains_is_not_taken(redundant):
    """Experts 0 and 2, used together, carry three quarters of the load: 1.5 of the mean on one rank."""
    instance = np.array([[0, 2], [1, 3]], np.int16), np.array([3.0, 1.0]), np.zeros(2, int), np.zeros(2, int)
    slots, primary = np.array([[0, 1], [2, 3]]), np.array([0, 0, 1, 1])
    if redundant:  # a further copy of an expert that no token uses
        slots, primary = np.array([[0, 1, 4], [2, 3, 4]]), np.array([0, 0, 1, 1, 0])
    mixes = np.array([[0.75], [0.25], [0.75], [0.25], [0.0]])[: len(primary)]
    together = search(instance, (slots, primary), Topology(ep_size=2), 2.0, mixes)
    assert together[1:3] == (0.0, 1.5)
    apart = search(instance, (slots, primary), Topology(ep_size=2), 20.0, mixes)
    assert apart[2] == pytest.approx(1.0)
    assert apart[1] > 0.0


@pytest.mark.parametrize("redundant", [0, 4])
@given(seed=st.integers(0, 9999))
def test_no_expert_goes_where_it_costs_more_than_it_gains(redundant, seed):
    instance, layout = random_sets(seed, 8, 1), random_layout(seed, 8, 4, redundant)
    move_cost = np.full((8, 4), 1e3)
    move_cost[layout[0], np.arange(4)[:, None]] = 0.0
    state = search(instance, layout, Topology(ep_size=4), move_cost=move_cost)[0]
    np.testing.assert_array_equal(np.sort(state.slots, axis=1), np.sort(layout[0], axis=1))


@given(st.integers(0, 9999), st.integers(2, 6))
def test_the_highest_load_and_what_a_swap_makes_of_it_by_loops(seed, ranks):
    rng = np.random.default_rng(seed)
    mixes, rank_of = rng.random((12, 5)), rng.permutation(np.arange(12) % ranks)
    prices = make_prices(np.zeros((12, ranks)), mixes, 2.0)
    slope, load = prices.loads.slope, prices.loads.now
    load[:] = [mixes[rank_of == g].sum(axis=0) for g in range(ranks)]
    top = highest(prices)
    assert top == pytest.approx(load.max(axis=0).mean())
    a, b = 0, next(e for e in range(12) if rank_of[e] != rank_of[0])
    x, y = rank_of[a], rank_of[b]
    swapped = rank_of.copy()
    swapped[a], swapped[b] = y, x
    after = np.stack([mixes[swapped == g].sum(axis=0) for g in range(ranks)]).max(axis=0).mean()
    gain = load_gain(prices, top, x, y, (a, 1.0), (b, 1.0, 1.0))
    assert gain == pytest.approx(2 * (top - after))
    for g in range(ranks):
        np.testing.assert_allclose(slope[:, g], mixes[:, load.argmax(axis=0) == g].sum(axis=1) / 5)
    assert gain <= 2 * (slope[a, x] - slope[a, y] + slope[b, y] - slope[b, x]) + 1e-9
    assert load_gain(prices._replace(load_price=0.0), top, x, y, (a, 1.0), (b, 1.0, 1.0)) == 0


def test_mixes_are_loads_of_batches_of_other_requests():
    """A thousand requests of one expert each, and a great batch: an expert's load varies by sqrt(2 / its requests)."""
    request, experts = np.arange(4000), np.arange(4000)[:, None] % 4
    tokens = Tokens(experts, group=request, request=request, phase=request)
    mixes = draw_mixes(tokens, 4, 2, 1 << 24, np.random.default_rng(0))
    assert mixes.shape == (4, MIXES)
    np.testing.assert_allclose(mixes.sum(axis=0), 2, atol=0.01)
    assert mixes.std() == pytest.approx(0.5 * np.sqrt(2 / 1000 * 3 / 4), rel=0.2)


def test_prices_are_settled_between_rounds():
    """Without them all tokens would sit on the rank that hosts what they use most."""
    instance, layout = random_sets(0, 8, 1, count=400), random_layout(0, 8, 4)
    state, scratch = make_state(instance, *layout, Topology(ep_size=4), uniform_costs(Topology(ep_size=4)))
    move_cost, mixes = np.zeros((8, 4)), np.full((8, 2), 0.5)
    prices, effort = make_prices(move_cost, mixes, 0.0), Effort(4, 3, 20, 20, 2, 0)
    moves.search_moves(state, scratch, prices, effort)
    assert state.price.any()
    settle(state, 0)
    full = np.bincount(state.home, state.weight, 4)
    assert full.max() < 1.5 * full.mean()


@pytest.mark.parametrize(("in_time", "rounds"), [(False, 1), (True, 5)])
def test_a_search_begins_no_further_round_when_its_time_is_over(monkeypatch, in_time, rounds):
    topology, made, make_moves = Topology(ep_size=4), [], moves._make_moves
    state, scratch = make_state(random_sets(0, 8, 1), *random_layout(0, 8, 4), topology, uniform_costs(topology))
    prices = make_prices(np.zeros((8, 4)), np.full((8, 2), 0.5), 0.0)
    monkeypatch.setattr(moves, "_make_moves", lambda *given: made.append(given) or make_moves(*given))
    moves.search_moves(state, scratch, prices, Effort(4, 5, 20, 20, 2, 0), lambda: in_time)
    assert len(made) == rounds


@settings(max_examples=20)
@given(seed=st.integers(0, 9999), load_price=st.sampled_from([0.0, 1.0, 20.0]))
def test_no_move_that_is_dismissed_by_its_bound_is_better(seed, load_price):
    topology, rng = Topology(ep_size=4), np.random.default_rng(seed)
    slots, primary = random_layout(seed, 8, 4)
    state, _ = make_state(random_sets(seed, 8, 1), slots.copy(), primary.copy(), topology, uniform_costs(topology))
    prices, tables = make_prices(rng.random((8, 4)), rng.random((8, 3)), load_price), make_tables(state)
    moves._settle(state, tables, 2, moves.REPLICAS)
    moves._spread(state, tables.served, prices)
    top = highest(prices)

    def gain(p, q):
        (a, b), (x, y) = slots.ravel()[[p, q]], (p // 2, q // 2)
        rows = tables.move[p, y] + tables.move[q, x] - tables.twice[p, q]
        moved = prices.move_cost[[a, b], [x, y]].sum() - prices.move_cost[[a, b], [y, x]].sum()
        return rows / state.total_weight + moved + load_gain(prices, top, x, y, (a, 1.0), (b, 1.0, 1.0))

    kind, p, q = moves.best_move(state, tables, prices, Turn(top, np.zeros(8, np.int64), 0, np.inf))
    assert kind == SWAP
    assert gain(p, q) == pytest.approx(max(gain(p, q) for p in range(8) for q in range(p + 1, 8) if p // 2 != q // 2))
