"""The static dispatch: copies serve from as near as can be, and leveling lowers exactly what it says it lowers."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.costs.rows import RowCosts, plain_costs
from semmoe.placement import copies as copies_module
from semmoe.placement.copies import nearest_copies, primary_copy_choice
from semmoe.placement.loads import total_cost
from semmoe.placement.problem import Tokens
from semmoe.topology import Topology


def layout(seed, experts=8, ranks=4, redundant=8):
    """Slots (G, S) without repetition on a rank, and a primary (E,) among each expert's ranks."""
    rng = np.random.default_rng(seed)
    own = rng.permutation(experts).reshape(ranks, -1)
    further = [rng.permutation(np.setdiff1d(np.arange(experts), row))[: redundant // ranks] for row in own]
    primary = np.empty(experts, np.int64)
    primary[own] = np.arange(ranks)[:, None]
    return np.concatenate([own, np.array(further, np.int64).reshape(ranks, -1)], axis=1), primary


def tokens(seed, count, experts=8, ranks=4, top_k=3):
    """experts (T, K), home (T,), request (T,)."""
    rng = np.random.default_rng(seed)
    chosen = np.argsort(rng.random((count, experts)) ** 2, axis=1)[:, :top_k]
    return chosen, rng.integers(ranks, size=count), np.sort(rng.integers(5, size=count))


def level(expert_ids, home, request, choice, copies, node_of, weights):
    """`copies.level` with weights of a row to another rank, of a row to another node, and of load."""
    per_rank, per_node, load_price = weights
    topology = Topology(ep_size=len(node_of), num_nodes=int(node_of.max()) + 1)
    costs = plain_costs(topology, 0.0, per_rank, per_node)
    tokens = Tokens(expert_ids, group=home, request=request, phase=request)
    return copies_module.level(tokens, home, choice, copies, node_of, costs, load_price)


def nodes(ranks, count):
    return np.arange(ranks) // (ranks // count)


def remote(expert_ids, home, choice, node_of) -> tuple[float, float]:
    """(rows to other ranks, rows to other nodes) per token, by loops."""
    rows = node_rows = 0
    for experts, h in zip(expert_ids.tolist(), home.tolist(), strict=True):
        reached = {int(choice[h, e]) for e in experts} - {h}
        rows += len(reached)
        node_rows += len({int(node_of[rank]) for rank in reached} - {int(node_of[h])})
    return rows / len(home), node_rows / len(home)


def test_copy_choice_by_hand():
    """Four ranks on two nodes. Expert 0 on ranks 0 and 3, primary 3; expert 1 on ranks 1 and 2, primary 1."""
    slots, primary = np.array([[0, 2], [1, 3], [1, 4], [0, 5]]), np.array([3, 1, 0, 1, 2, 3])
    one_node, two_nodes = (primary_copy_choice(nearest_copies(slots, 6, nodes(4, n)), primary) for n in (1, 2))
    assert one_node[:, 0].tolist() == [0, 3, 3, 3]
    assert two_nodes[:, 0].tolist() == [0, 0, 3, 3]
    assert one_node[:, 1].tolist() == [1, 1, 2, 1]
    assert two_nodes[:, 1].tolist() == [1, 1, 2, 2]
    assert two_nodes[:, 4].tolist() == one_node[:, 4].tolist() == [2, 2, 2, 2]


def test_leveling_by_hand():
    """Expert 0 on ranks 0 and 1; ranks 2 and 3 send it everything they have: to one each, not both to rank 0."""
    slots, primary = np.array([[0, 1], [0, 2], [3, 4], [5, 6]]), np.array([0, 0, 1, 2, 2, 3, 3])
    copies = nearest_copies(slots, 7, nodes(4, 1))
    start = primary_copy_choice(copies, primary)
    assert start[:, 0].tolist() == [0, 1, 0, 0]
    expert_ids, home = np.array([[0]] * 8), np.array([2] * 4 + [3] * 4)
    out = level(expert_ids, home, np.zeros(8, np.int64), start, copies, nodes(4, 1), (1.0, 0.0, 5.0))
    assert sorted(out[2:, 0].tolist()) == [0, 1]
    np.testing.assert_array_equal(out[:2], start[:2])
    unpriced = level(expert_ids, home, np.zeros(8, np.int64), start, copies, nodes(4, 1), (1.0, 0.0, 0.0))
    np.testing.assert_array_equal(unpriced, start)


def test_load_below_the_mean_is_not_moved():
    """Expert 0 has copies on rank 0, which has just the mean, and on rank 1, which has nothing; rank 2 has more."""
    slots, primary = np.array([[0, 2], [0, 3], [1, 4], [5, 6]]), np.array([0, 2, 0, 1, 2, 3, 3])
    copies = nearest_copies(slots, 7, nodes(4, 1))
    start, experts = primary_copy_choice(copies, primary), np.array([[0], [2], *[[1]] * 6])
    out = level(experts, np.full(8, 3), np.zeros(8, np.int64), start, copies, nodes(4, 1), (1.0, 0.0, 5.0))
    np.testing.assert_array_equal(out, start)


def test_without_a_price_of_load_rows_are_merged():
    """Expert 0 has copies on ranks 1 and 2, expert 1 on rank 2 alone: tokens that use both then send one row."""
    slots, primary = np.array([[2, 3], [0, 4], [0, 1]]), np.array([1, 2, 0, 0, 1])
    copies = nearest_copies(slots, 5, nodes(3, 1))
    start = primary_copy_choice(copies, primary)
    expert_ids, home, request = np.array([[0, 1]] * 6), np.zeros(6, np.int64), np.zeros(6, np.int64)
    assert remote(expert_ids, home, start, nodes(3, 1))[0] == 2
    out = level(expert_ids, home, request, start, copies, nodes(3, 1), (1.0, 0.0, 0.0))
    assert out[0, 0] == 2
    assert remote(expert_ids, home, out, nodes(3, 1))[0] == 1


@pytest.mark.parametrize(("weight", "served_by"), [(0.5, 4), (0.0, 2)])
def test_rows_to_one_node_are_merged(weight, served_by):
    """Six ranks on three nodes. Expert 0 has copies on nodes 1 and 2, expert 1 is on node 2: two ranks in any case."""
    slots, primary = np.array([[2], [3], [0], [4], [0], [1]]), np.array([2, 5, 0, 1, 3])
    copies = nearest_copies(slots, 5, nodes(6, 3))
    start, home = primary_copy_choice(copies, primary), np.zeros(6, np.int64)
    out = level(np.array([[0, 1]] * 6), home, home, start, copies, nodes(6, 3), (1.0, weight, 0.0))
    assert start[0, 0] == 2
    assert out[0, 0] == served_by


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
@given(seed=st.integers(0, 9999))
def test_no_other_copy_would_lower_the_rows(num_nodes, seed):
    slots, primary = layout(seed, experts=12, ranks=6, redundant=12)
    node_of, weights = nodes(6, num_nodes), (1.0, 0.75, 0.0)
    copies = nearest_copies(slots, 12, node_of)
    expert_ids, home, request = tokens(seed, 60, experts=12, ranks=6)
    out = level(expert_ids, home, request, primary_copy_choice(copies, primary), copies, node_of, weights)

    def cost(choice):
        return np.dot(weights[:2], remote(expert_ids, home, choice, node_of))

    least = cost(out) - 1e-9
    for h, e in product(range(6), range(12)):
        for other in np.flatnonzero(copies[h, e]):
            step = out.copy()
            step[h, e] = other
            assert cost(step) >= least


def charged(expert_ids, home, choice, node_of, costs) -> float:
    """What tokens cost on average, by loops."""
    total = 0.0
    for experts, h in zip(expert_ids.tolist(), home.tolist(), strict=True):
        ranks = [int(choice[h, e]) for e in experts]
        total += sum(costs.pair[h, y] for y in ranks) + sum(costs.rank[h, y] for y in set(ranks))
        total += sum(costs.node[h, m] for m in {int(node_of[y]) for y in ranks})
    return total / len(home)


def uneven_costs(rng, ranks: int, node_of) -> RowCosts:
    """Costs of which no two are alike, in both directions."""
    remote = 1.0 - np.eye(ranks)
    away = 1.0 * (node_of[:, None] != np.arange(node_of.max() + 1))
    sizes = (ranks, ranks), away.shape, (ranks, ranks)
    return RowCosts(
        *(rng.uniform(0.1, 2, size) * part for size, part in zip(sizes, (remote, away, remote), strict=True))
    )


@pytest.mark.parametrize("num_nodes", [2, 3])
@given(seed=st.integers(0, 9999))
def test_no_other_copy_costs_less_where_every_rank_and_node_has_a_cost_of_its_own(num_nodes, seed):
    rng, node_of, request = np.random.default_rng(seed), nodes(6, num_nodes), np.zeros(60, np.int64)
    slots, primary = layout(seed, experts=12, ranks=6, redundant=12)
    costs, (expert_ids, home, _) = uneven_costs(rng, 6, node_of), tokens(seed, 60, experts=12, ranks=6)
    copies = nearest_copies(slots, 12, node_of)
    start = primary_copy_choice(copies, primary)
    routed = Tokens(expert_ids, group=home, request=request, phase=request)
    out = copies_module.level(routed, home, start, copies, node_of, costs, 0.0)
    least = charged(expert_ids, home, out, node_of, costs)
    targets = out[home[:, None], expert_ids]
    assert total_cost(costs, targets, home, node_of) == pytest.approx(60 * least)
    for h, e in product(range(6), range(12)):
        for other in np.flatnonzero(copies[h, e]):
            step = out.copy()
            step[h, e] = other
            assert charged(expert_ids, home, step, node_of, costs) >= least - 1e-9


@pytest.mark.parametrize("num_nodes", [1, 2])
@given(seed=st.integers(0, 9999))
def test_copies_serve_from_as_near_as_they_can_and_costs_fall(num_nodes, seed):
    slots, primary = layout(seed)
    node_of, weights = nodes(4, num_nodes), (1.0, 0.5, 0.0)
    copies = nearest_copies(slots, 8, node_of)
    start = primary_copy_choice(copies, primary)
    expert_ids, home, request = tokens(seed, 60)
    out = level(expert_ids, home, request, start, copies, node_of, weights)
    hosts = [set(np.flatnonzero((slots == e).any(axis=1)).tolist()) for e in range(8)]
    for h, e in product(range(4), range(8)):
        near = {rank for rank in hosts[e] if node_of[rank] == node_of[h]}
        best = {h} if h in hosts[e] else near or hosts[e]
        assert set(np.flatnonzero(copies[h, e]).tolist()) == best
        assert start[h, e] in best
        assert out[h, e] in best
    before, after = (np.dot(weights[:2], remote(expert_ids, home, s, node_of)) for s in (start, out))
    assert after <= before + 1e-9
    np.testing.assert_array_equal(out, level(expert_ids, home, request, start, copies, node_of, weights))


@given(seed=st.integers(0, 9999))
def test_load_falls_if_only_load_has_a_price(seed):
    """One request, so that all mixes are the profile's own and loops can count what is over the cap."""
    slots, primary = layout(seed)
    copies = nearest_copies(slots, 8, nodes(4, 1))
    start = primary_copy_choice(copies, primary)
    expert_ids, home, _ = tokens(seed, 60)
    out = level(expert_ids, home, np.zeros(60, np.int64), start, copies, nodes(4, 1), (0.0, 0.0, 1.0))

    def excess(choice):
        load = oracles.traffic(expert_ids, home, choice)[2]
        return np.maximum(load / load.mean() - 1, 0).sum()

    assert excess(out) <= excess(start) + 1e-9
    for h, e in product(range(4), range(8)):  # no single further step would lower it
        for other in np.flatnonzero(copies[h, e]):
            step = out.copy()
            step[h, e] = other
            assert excess(step) >= excess(out) - 1e-6


def test_one_copy_each_leaves_nothing_to_choose():
    slots, primary = layout(0, redundant=0)
    copies = nearest_copies(slots, 8, nodes(4, 2))
    start = primary_copy_choice(copies, primary)
    out = level(*tokens(0, 40), start, copies, nodes(4, 2), (1.0, 1.0, 5.0))
    np.testing.assert_array_equal(out, start)
    np.testing.assert_array_equal(out, np.tile(primary, (4, 1)))
