"""Traffic and load, against loops and closed forms."""

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.core import Placement
from semmoe.costs.metrics import (
    Traffic,
    layer_traffic,
    majority_rank,
    max_over_mean,
    max_over_median,
    uniform_remote_ranks,
)
from semmoe.tokens.copychoice import preferred_copies
from semmoe.topology import Topology


def place(*rows, ep_size: int) -> Placement:
    maps = np.array(rows, np.int32)
    return Placement(physical_to_logical_map=maps, num_experts=int(maps.max()) + 1, ep_size=ep_size)


def random_placement(rng, ep_size: int, per_rank: int, layers: int = 2) -> Placement:
    """As many experts as ranks or more, the other slots copies."""
    slots = ep_size * per_rank
    experts = int(rng.integers(slots // 2, slots + 1))
    maps = [rng.permutation(np.append(np.arange(experts), rng.integers(experts, size=slots - experts)))] * layers
    maps = np.array([rng.permutation(row) for row in maps], np.int32)
    return Placement(physical_to_logical_map=maps, num_experts=experts, ep_size=ep_size)


def test_traffic_of_three_tokens():
    choice = preferred_copies(place([0, 1, 2, 3], ep_size=2), Topology(ep_size=2))[0]
    experts = np.array([[0, 1], [2, 3], [1, 2]], np.uint8)
    traffic = layer_traffic(choice[np.array([0, 0, 1])[:, None], experts], np.array([0, 0, 1]), 2)
    assert (traffic.pairs, traffic.local_pairs, traffic.tokens) == (6, 3, 3)
    assert traffic.rows.tolist() == [[0, 1], [1, 0]]
    assert traffic.load.tolist() == [3, 3]
    assert traffic.lar == 0.5
    assert traffic.remote_ranks_per_token == pytest.approx(2 / 3)


@given(st.integers(0, 9999), st.sampled_from([(1, 1), (2, 1), (4, 2), (6, 3)]), st.integers(1, 3))
def test_traffic_agrees_with_loops_for_any_replication(seed, sizes, top_k):
    rng = np.random.default_rng(seed)
    ep_size, nodes = sizes
    placement = random_placement(rng, ep_size, per_rank=4)
    choice = preferred_copies(placement, Topology(ep_size=ep_size, num_nodes=nodes))[0]
    experts = np.array([rng.permutation(placement.num_experts)[:top_k] for _ in range(30)])
    home = rng.integers(ep_size, size=30)
    traffic = layer_traffic(choice[home[:, None], experts], home, ep_size)
    local, rows, load = oracles.traffic(experts, home, choice)
    assert traffic.local_pairs == local
    np.testing.assert_array_equal(traffic.rows, rows)
    np.testing.assert_array_equal(traffic.load, load)
    hosted = [rank in oracles.ranks_of_expert(placement, 0, e) for t, rank in enumerate(home) for e in experts[t]]
    assert traffic.lar == pytest.approx(np.mean(hosted))


def test_traffic_of_an_empty_batch_is_nothing():
    traffic = layer_traffic(np.zeros((0, 1), np.int16), np.zeros(0, np.int64), 2)
    assert (traffic.lar, traffic.remote_ranks_per_token, traffic.load.tolist()) == (0.0, 0.0, [0, 0])


@given(st.sampled_from([(1, 1), (4, 1), (4, 2), (6, 3), (4, 4)]), st.integers(0, 999))
def test_rows_per_rank_node_and_pair_agree_with_loops(sizes, seed):
    (ranks, nodes), rng = sizes, np.random.default_rng(seed)
    targets, home = rng.integers(ranks, size=(20, 3)), rng.integers(ranks, size=20)
    traffic, size = layer_traffic(targets, home, ranks, nodes), ranks // nodes
    rows, node_rows = np.zeros((ranks, ranks)), np.zeros((ranks, nodes))
    pair_rows = np.zeros((ranks, ranks))
    for to, at in zip(targets.tolist(), home.tolist(), strict=True):
        for rank in set(to) - {at}:
            rows[at, rank] += 1
        for node in {rank // size for rank in to} - {at // size}:
            node_rows[at, node] += 1
        for rank in to:
            pair_rows[at, rank] += rank != at
    np.testing.assert_array_equal(traffic.rows, rows)
    np.testing.assert_array_equal(traffic.node_rows, node_rows)
    np.testing.assert_array_equal(traffic.pair_rows, pair_rows)
    assert traffic.local_pairs == targets.size - pair_rows.sum()
    assert traffic.remote_nodes_per_token == node_rows.sum() / 20


def test_traffic_adds_up():
    nodes, pairs = np.array([[0, 1], [1, 0]]), np.array([[0, 1], [2, 0]])
    one = Traffic(4, 1, 2, np.array([[0, 1], [2, 0]]), np.array([3, 1]), nodes, pairs)
    both = one + Traffic(6, 5, 3, np.array([[0, 4], [0, 0]]), np.array([0, 6]), nodes, 3 * pairs)
    assert both.node_rows.tolist() == [[0, 2], [2, 0]]
    assert both.pair_rows.tolist() == [[0, 4], [8, 0]]
    assert (both.pairs, both.local_pairs, both.tokens) == (10, 6, 5)
    assert both.rows.tolist() == [[0, 5], [2, 0]]
    assert both.load.tolist() == [3, 7]


def test_an_own_copy_is_served_first_then_the_own_node():
    placement = place([0, 1, 0, 2], ep_size=4)
    choice = preferred_copies(placement, Topology(ep_size=4, num_nodes=2))[0]
    assert choice[:, 0].tolist() == [0, 0, 2, 2]
    assert choice[:, 1].tolist() == [1, 1, 1, 1]
    assert choice[:, 2].tolist() == [3, 3, 3, 3]


@given(st.integers(0, 9999), st.sampled_from([(2, 1), (4, 1), (4, 2), (8, 2)]))
def test_every_source_is_served_by_one_of_its_nearest_copies(seed, sizes):
    ep_size, nodes = sizes
    placement = random_placement(np.random.default_rng(seed), ep_size, per_rank=3)
    topology = Topology(ep_size=ep_size, num_nodes=nodes)
    choice = preferred_copies(placement, topology)
    assert choice.shape == (2, ep_size, placement.num_experts)
    for (l, g, e), rank in np.ndenumerate(choice):
        assert rank in oracles.nearest_ranks(placement, topology, l, g, e)
    for l in range(2):
        for e in range(placement.num_experts):
            assert choice[l, :, e].tolist() == oracles.copy_choice(placement, topology, l, e)


def test_sources_without_a_copy_take_turns():
    placement = place([0, 0, 1, 2, 3, 4], ep_size=6)
    choice = preferred_copies(placement, Topology(ep_size=6))[0]
    assert sorted(choice[2:, 0].tolist()) == [0, 0, 1, 1]
    assert choice[:2, 0].tolist() == [0, 1]


def test_sources_without_a_copy_take_turns_wherever_they_are():
    placement = place([1, 0, 2, 0], ep_size=4)
    choice = preferred_copies(placement, Topology(ep_size=4))[0]
    assert choice[:, 0].tolist() == [1, 1, 3, 3]


def test_turns_are_taken_on_each_node_that_has_copies_and_together_beyond():
    """Three nodes of four ranks; expert 0 on ranks 0, 1 and 4, expert 1 on ranks 2 and 3."""
    placement = place([0, 0, 1, 1, 0, *range(2, 9)], ep_size=12)
    choice = preferred_copies(placement, Topology(ep_size=12, num_nodes=3))[0]
    assert choice[:, 0].tolist() == [0, 1, 0, 1, 4, 4, 4, 4, 0, 1, 4, 0]
    assert choice[:, 1].tolist() == [2, 3, 2, 3, 2, 3, 2, 3, 2, 3, 2, 3]


@given(st.integers(0, 9999), st.sampled_from([2, 4, 8]))
def test_copies_serve_equally_many_of_the_sources_without_one(seed, ep_size):
    rng = np.random.default_rng(seed)
    copies = int(rng.integers(1, ep_size + 1))
    row = rng.permutation([0] * copies + list(range(1, ep_size - copies + 1)))
    choice = preferred_copies(place(row, ep_size=ep_size), Topology(ep_size=ep_size))[0, :, 0]
    served = np.bincount(choice[row != 0], minlength=ep_size)[row == 0]
    assert served.sum() == ep_size - copies
    assert served.max() - served.min() <= 1


@pytest.mark.parametrize(
    ("experts", "ranks", "expected"),
    [
        ([5, 2, 7, 3], {5: 1, 2: 0, 7: 0, 3: 1}, 1),
        ([2, 5, 7, 3], {5: 1, 2: 0, 7: 0, 3: 1}, 0),
        ([0, 1, 2], {0: 3, 1: 2, 2: 2}, 2),
        ([0, 1, 2], {0: -1, 1: -1, 2: 4}, 4),
        ([0, 1], {0: -1, 1: -1}, -1),
    ],
)
def test_a_token_s_device_hosts_most_of_its_experts_and_ties_go_to_the_first_choice(experts, ranks, expected):
    rank_of_expert = np.full(8, -1)
    rank_of_expert[list(ranks)] = list(ranks.values())
    assert majority_rank(np.array([experts]), rank_of_expert, 5).tolist() == [expected]


@given(st.integers(0, 9999), st.integers(1, 6))
def test_majority_agrees_with_loops(seed, top_k):
    rng = np.random.default_rng(seed)
    rank_of_expert = rng.integers(-1, 4, size=10)
    experts = np.array([rng.permutation(10)[:top_k] for _ in range(20)])
    expected = [oracles.majority_rank(row, rank_of_expert) for row in experts]
    assert majority_rank(experts, rank_of_expert, 4).tolist() == expected


def test_load_imbalance_of_a_hand_made_load():
    load = np.array([8, 2, 1, 1])
    assert max_over_mean(load) == pytest.approx(8 / 3)
    assert max_over_median(load) == pytest.approx(8 / 1.5)


def test_load_imbalance_without_load_is_one():
    assert max_over_mean(np.zeros(4)) == max_over_median(np.zeros(4)) == 1.0
    assert max_over_median(np.array([0, 0, 0, 6])) == 6.0


def test_uniform_remote_ranks_by_hand():
    assert uniform_remote_ranks(1, 8, 2) == 0
    assert uniform_remote_ranks(4, 4, 1) == pytest.approx(3 / 4)
    assert uniform_remote_ranks(2, 4, 2) == pytest.approx(1 - 1 / 6)


@pytest.mark.parametrize(("ep_size", "experts", "top_k"), [(4, 16, 2), (8, 32, 4), (4, 8, 8)])
def test_uniform_remote_ranks_agrees_with_simulation(ep_size, experts, top_k):
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((20_000, experts)), axis=1)[:, :top_k]
    traffic = layer_traffic(chosen // (experts // ep_size), rng.integers(ep_size, size=20_000), ep_size)
    assert traffic.remote_ranks_per_token == pytest.approx(uniform_remote_ranks(ep_size, experts, top_k), rel=0.02)
    assert traffic.lar == pytest.approx(1 / ep_size, rel=0.05)
