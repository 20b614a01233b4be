"""The copy choice: copies serve from as near as can be, and leveling makes the best choices."""

from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.costs.rows import RowCosts, plain_costs
from semmoe.placement import copies as copies_module
from semmoe.placement.copies import hosting_ranks, near_copies, primary_copy_choice
from semmoe.placement.loads import total_cost
from semmoe.placement.problem import Tokens
from semmoe.tokens.copychoice import CopyChoice, cover
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


def level(expert_ids, home, request, start, near, node_of, weights):
    """`copies.level` of a static choice, with weights of a row to another rank, to another node, and of load."""
    per_rank, per_node, load_price = weights
    topology = Topology(ep_size=len(node_of), num_nodes=int(node_of.max()) + 1)
    costs = plain_costs(topology, 0.0, per_rank, per_node)
    tokens = Tokens(expert_ids, group=home, request=request, phase=request)
    return copies_module.level(tokens, home, CopyChoice(start), near, node_of, costs, load_price).preferred


def near_ones(slots, num_experts, node_of):
    return near_copies(hosting_ranks(slots, num_experts), node_of)


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
    one_node, two_nodes = (primary_copy_choice(near_ones(slots, 6, nodes(4, n)), primary) for n in (1, 2))
    assert one_node[:, 0].tolist() == [0, 3, 3, 3]
    assert two_nodes[:, 0].tolist() == [0, 0, 3, 3]
    assert one_node[:, 1].tolist() == [1, 1, 2, 1]
    assert two_nodes[:, 1].tolist() == [1, 1, 2, 2]
    assert two_nodes[:, 4].tolist() == one_node[:, 4].tolist() == [2, 2, 2, 2]


def test_leveling_by_hand():
    """Expert 0 on ranks 0 and 1; ranks 2 and 3 send it everything they have: to one each, not both to rank 0."""
    slots, primary = np.array([[0, 1], [0, 2], [3, 4], [5, 6]]), np.array([0, 0, 1, 2, 2, 3, 3])
    near = near_ones(slots, 7, nodes(4, 1))
    start = primary_copy_choice(near, primary)
    assert start[:, 0].tolist() == [0, 1, 0, 0]
    expert_ids, home = np.array([[0]] * 8), np.array([2] * 4 + [3] * 4)
    out = level(expert_ids, home, np.zeros(8, np.int64), start, near, nodes(4, 1), (1.0, 0.0, 5.0))
    assert sorted(out[2:, 0].tolist()) == [0, 1]
    np.testing.assert_array_equal(out[:2], start[:2])
    unpriced = level(expert_ids, home, np.zeros(8, np.int64), start, near, nodes(4, 1), (1.0, 0.0, 0.0))
    np.testing.assert_array_equal(unpriced, start)


def test_load_below_the_mean_is_not_moved():
    """Expert 0 has copies on rank 0, which has just the mean, and on rank 1, which has nothing; rank 2 has more."""
    slots, primary = np.array([[0, 2], [0, 3], [1, 4], [5, 6]]), np.array([0, 2, 0, 1, 2, 3, 3])
    near = near_ones(slots, 7, nodes(4, 1))
    start, experts = primary_copy_choice(near, primary), np.array([[0], [2], *[[1]] * 6])
    out = level(experts, np.full(8, 3), np.zeros(8, np.int64), start, near, nodes(4, 1), (1.0, 0.0, 5.0))
    np.testing.assert_array_equal(out, start)


def test_without_a_price_of_load_rows_are_merged():
    """Expert 0 has copies on ranks 1 and 2, expert 1 on rank 2 alone: tokens that use both then send one row."""
    slots, primary = np.array([[2, 3], [0, 4], [0, 1]]), np.array([1, 2, 0, 0, 1])
    near = near_ones(slots, 5, nodes(3, 1))
    start = primary_copy_choice(near, primary)
    expert_ids, home, request = np.array([[0, 1]] * 6), np.zeros(6, np.int64), np.zeros(6, np.int64)
    assert remote(expert_ids, home, start, nodes(3, 1))[0] == 2
    out = level(expert_ids, home, request, start, near, nodes(3, 1), (1.0, 0.0, 0.0))
    assert out[0, 0] == 2
    assert remote(expert_ids, home, out, nodes(3, 1))[0] == 1


@pytest.mark.parametrize(("weight", "served_by"), [(0.5, 4), (0.0, 2)])
def test_rows_to_one_node_are_merged(weight, served_by):
    """Six ranks on three nodes. Expert 0 has copies on nodes 1 and 2, expert 1 is on node 2: two ranks in any case."""
    slots, primary = np.array([[2], [3], [0], [4], [0], [1]]), np.array([2, 5, 0, 1, 3])
    near = near_ones(slots, 5, nodes(6, 3))
    start, home = primary_copy_choice(near, primary), np.zeros(6, np.int64)
    out = level(np.array([[0, 1]] * 6), home, home, start, near, nodes(6, 3), (1.0, weight, 0.0))
    assert start[0, 0] == 2
    assert out[0, 0] == served_by


def uneven_costs(rng, ranks: int, node_of) -> RowCosts:
    """Costs of which no two are alike, in both directions."""
    remote = 1.0 - np.eye(ranks)
    away = 1.0 * (node_of[:, None] != np.arange(node_of.max() + 1))
    sizes = (ranks, ranks), away.shape, (ranks, ranks)
    return RowCosts(
        *(rng.uniform(0.1, 2, size) * part for size, part in zip(sizes, (remote, away, remote), strict=True))
    )


def reached(expert_ids, home, used, preferred):
    """(T, K) ranks by the rule `cover`, where each source rank uses the copies `used` (G, E, X)."""
    out = np.empty(expert_ids.shape, np.int64)
    for g in range(len(used)):
        out[home == g] = cover(expert_ids[home == g], (used[g], used[g], preferred[g]), g, len(used))
    return out


def level_by_loops(expert_ids, home, near, preferred, node_of, costs, price, static):
    """What `level` does to copies (G, E, X) and preferred ones (G, E), by the cost and the load of all tokens."""
    used = np.where(near == preferred[..., None], near, -1) if static else near.copy()

    def state():
        targets = reached(expert_ids, home, used, preferred)
        load = np.bincount(targets.ravel(), minlength=len(near)) * len(near) / targets.size
        cost = total_cost(costs, targets, home, node_of) / len(home)
        return cost + price * np.maximum(load - 1, 0).sum(), load

    for h, e in product(range(len(near)), range(near.shape[1])):
        copies, (least, load) = near[h, e].copy(), state()
        ranks = copies[copies >= 0]
        if len(ranks) < 2 or not (expert_ids[home == h] == e).any():
            continue
        hottest = ranks[np.argmax(load[ranks])] if price > 0 else -1
        least, best, now = least - 1e-9, (used[h, e].copy(), preferred[h, e]), preferred[h, e]
        for rank, alone in product(ranks, (False, True)):
            if rank != hottest and (alone or (not static and rank != now)):
                used[h, e], preferred[h, e] = np.where(copies == rank, copies, -1) if alone else copies, rank
                if state()[0] < least:
                    least, best = state()[0], (used[h, e].copy(), rank)
        used[h, e], preferred[h, e] = best
    return used, preferred


@pytest.mark.parametrize(("price", "rank"), [(0.0, 0), (5.0, 1)])
def test_a_copy_is_fixed_where_tokens_come_to_a_hot_rank_anyway(price, rank):
    """Expert 0 has copies on ranks 0 and 1, expert 1 is on rank 0, and rank 2 has tokens that use both."""
    slots, node_of = np.array([[0, 1], [0, 2], [3, 4]]), nodes(3, 1)
    near, expert_ids, home = near_ones(slots, 5, node_of), np.array([[0, 1]] * 6), np.full(6, 2)
    rule = CopyChoice(primary_copy_choice(near, np.array([1, 0, 1, 2, 2])), hosting_ranks(slots, 5), node_of)
    assert rule.ranks(expert_ids, home).tolist() == [[0, 0]] * 6
    tokens = Tokens(expert_ids, group=home, request=home - 2, phase=home - 2)
    out = copies_module.level(tokens, home, rule, near, node_of, plain_costs(Topology(ep_size=3), 0, 1, 0), price)
    assert np.argwhere(out.fixed).tolist() == ([[2, 0]] if price else [])
    assert out.ranks(expert_ids, home).tolist() == [[rank, 0]] * 6


@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("price", [0.0, 0.7])
@pytest.mark.parametrize(("num_nodes", "seed"), product((1, 2, 3), range(5)))
def test_leveling_takes_the_best_of_all_choices_for_one_pair_after_the_other(num_nodes, seed, price, static):
    """One request, so that all mixes are the profile's own; costs differ by rank and node."""
    rng, node_of, request = np.random.default_rng(seed), nodes(6, num_nodes), np.zeros(60, np.int64)
    slots, primary = layout(seed, experts=12, ranks=6, redundant=12)
    costs, (expert_ids, home, _) = uneven_costs(rng, 6, node_of), tokens(seed, 60, experts=12, ranks=6)
    copies, near = hosting_ranks(slots, 12), near_ones(slots, 12, node_of).astype(np.int64)
    start = primary_copy_choice(near, primary)
    rule = CopyChoice(start) if static else CopyChoice(start, copies, node_of)
    routed = Tokens(expert_ids, group=home, request=request, phase=request)
    out = copies_module.level(routed, home, rule, near, node_of, costs, price)
    used, preferred = level_by_loops(expert_ids, home, near, start.copy(), node_of, costs, price, static)
    np.testing.assert_array_equal(out.preferred, preferred)
    if not static:
        np.testing.assert_array_equal(out.fixed, (used != near).any(axis=2))
    np.testing.assert_array_equal(out.ranks(expert_ids, home), reached(expert_ids, home, used, preferred))


@pytest.mark.parametrize("num_nodes", [1, 2])
@given(seed=st.integers(0, 9999))
def test_copies_serve_from_as_near_as_they_can_and_costs_fall(num_nodes, seed):
    slots, primary = layout(seed)
    node_of, weights = nodes(4, num_nodes), (1.0, 0.5, 0.0)
    near = near_ones(slots, 8, node_of)
    start = primary_copy_choice(near, primary)
    expert_ids, home, request = tokens(seed, 60)
    out = level(expert_ids, home, request, start, near, node_of, weights)
    hosts = [set(np.flatnonzero((slots == e).any(axis=1)).tolist()) for e in range(8)]
    for h, e in product(range(4), range(8)):
        same = {rank for rank in hosts[e] if node_of[rank] == node_of[h]}
        best = {h} if h in hosts[e] else same or hosts[e]
        assert set(near[h, e].tolist()) - {-1} == best
        assert start[h, e] in best
        assert out[h, e] in best
    before, after = (np.dot(weights[:2], remote(expert_ids, home, s, node_of)) for s in (start, out))
    assert after <= before + 1e-9
    np.testing.assert_array_equal(out, level(expert_ids, home, request, start, near, node_of, weights))


@given(seed=st.integers(0, 9999))
def test_load_falls_if_only_load_has_a_price(seed):
    """One request, so that all mixes are the profile's own and loops can count what is over the cap."""
    slots, primary = layout(seed)
    near = near_ones(slots, 8, nodes(4, 1))
    start = primary_copy_choice(near, primary)
    expert_ids, home, _ = tokens(seed, 60)
    out = level(expert_ids, home, np.zeros(60, np.int64), start, near, nodes(4, 1), (0.0, 0.0, 1.0))

    def excess(choice):
        load = oracles.traffic(expert_ids, home, choice)[2]
        return np.maximum(load / load.mean() - 1, 0).sum()

    assert excess(out) <= excess(start) + 1e-9


def test_one_copy_each_leaves_nothing_to_choose():
    slots, primary = layout(0, redundant=0)
    near = near_ones(slots, 8, nodes(4, 2))
    start = primary_copy_choice(near, primary)
    out = level(*tokens(0, 40), start, near, nodes(4, 2), (1.0, 1.0, 5.0))
    np.testing.assert_array_equal(out, start)
    np.testing.assert_array_equal(out, np.tile(primary, (4, 1)))
