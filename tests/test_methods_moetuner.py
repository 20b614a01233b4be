"""MoETuner: its two programs against enumeration, its limits, its gap."""

import time
from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import random_trace

from lab.methods import moetuner
from lab.methods.grouping import link_costs, paths_of
from semmoe.numeric.assignment import balanced_packing
from semmoe.topology import Topology
from semmoe.traces.affinity import expert_load


def worst_links(counts, ranks, cost):
    """The second program's objective."""
    total = 0.0
    for count, before, after in zip(counts, ranks[:-1], ranks[1:], strict=True):
        traffic = np.zeros(cost.shape)
        np.add.at(traffic, (before[:, None], after), count)
        total += (traffic * cost).max()
    return total


def test_greedy_packing_is_improved_by_hand():
    """Heaviest first gives 8 + 6 + 2 against 7 + 5 + 5; 8 + 5 + 4... the even split is 8 + 5 + 4 and 7 + 6 + 4."""
    load = np.array([8.0, 7, 6, 5, 4, 4])
    labels, gap = moetuner.cluster_layer(load, 2, 10.0, tolerance=0)
    assert np.bincount(labels, load).tolist() == [17, 17]
    assert np.bincount(labels).tolist() == [3, 3]
    assert gap == pytest.approx(0, abs=1e-9)


@given(st.integers(0, 9999), st.sampled_from([(6, 2), (6, 3), (8, 2), (8, 4)]))
@settings(max_examples=25, deadline=None)
def test_clusters_are_optimal_given_time(seed, sizes):
    experts, clusters = sizes
    load = np.random.default_rng(seed).gamma(1.0, 100.0, experts)
    every = set(permutations(np.arange(experts) // (experts // clusters))) if experts < 8 else None
    if every is None:
        rng = np.random.default_rng(1)
        every = {tuple(rng.permutation(np.arange(experts) // (experts // clusters))) for _ in range(8000)}
    best = min(moetuner.deviation(load, np.array(labels), clusters) for labels in every)
    labels, gap = moetuner.cluster_layer(load, clusters, 10.0, tolerance=0)
    assert (np.bincount(labels, minlength=clusters) == experts // clusters).all()
    assert moetuner.deviation(load, labels, clusters) == pytest.approx(best, abs=1e-6)
    assert gap <= 1e-5


def test_without_time_the_greedy_packing_is_kept_and_the_gap_is_told():
    load = np.random.default_rng(0).gamma(1.0, 100.0, 32)
    labels, gap = moetuner.cluster_layer(load, 8, 0.0)
    greedy = balanced_packing(load[None], 8)[0][0]
    np.testing.assert_array_equal(labels, greedy)
    left = moetuner.deviation(load, greedy, 8)
    assert gap == pytest.approx(left / (1 + left))
    even, none = moetuner.cluster_layer(np.ones(8), 4, 0.0)
    assert moetuner.deviation(np.ones(8), even, 4) == none == 0
    assert moetuner.cluster_layer(np.zeros(8), 4, 1.0)[1] == 0  # no load at all


@given(st.integers(0, 9999), st.integers(1, 5))
@settings(max_examples=50, deadline=None)
def test_the_bottleneck_assignment_is_optimal(seed, size):
    rng = np.random.default_rng(seed)
    cost, tie = rng.integers(0, 6, (size, size)).astype(float), rng.integers(0, 9, (size, size)).astype(float)
    rows = np.arange(size)
    ranked = [(cost[rows, list(p)].max(), tie[rows, list(p)].sum()) for p in permutations(range(size))]
    found = moetuner.bottleneck_assignment(cost, tie)
    assert sorted(found) == list(range(size))
    assert (cost[rows, found].max(), tie[rows, found].sum()) == min(ranked)


@given(st.integers(0, 9999))
@settings(max_examples=15, deadline=None)
def test_on_one_node_all_layers_together_are_lined_up_best(seed):
    """Enumeration over the clusters' ranks at all three layers but the first."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(0, 30, (2, 6, 6)).astype(float)
    clusters = np.array([rng.permutation(np.arange(6) // 2) for _ in range(3)])
    cost = link_costs(Topology(ep_size=3))
    found = worst_links(counts, moetuner.line_up(counts, clusters, cost), cost)
    every = product(permutations(range(3)), repeat=3)
    best = min(worst_links(counts, np.take_along_axis(np.array(p), clusters, axis=1), cost) for p in every)
    assert found == pytest.approx(best)


def test_clusters_stay_whole_on_several_nodes():
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 30, (3, 8, 8)).astype(float)
    clusters = np.array([rng.permutation(np.arange(8) // 2) for _ in range(4)])
    topology = Topology(ep_size=4, num_nodes=2)
    ranks = moetuner.line_up(counts, clusters, link_costs(topology))
    for before, after in zip(clusters, ranks, strict=True):
        pairs = set(zip(before.tolist(), after.tolist(), strict=True))
        assert len(pairs) == 4  # one rank a cluster


def test_the_placement_is_valid_level_and_repeatable():
    trace = random_trace(3, requests=40, experts=16)
    arguments = (expert_load(trace), paths_of(trace), Topology(ep_size=4), 20.0)
    one, two = moetuner.place(*arguments), moetuner.place(*arguments)
    assert (one.placement.logical_replica_count == 1).all()
    np.testing.assert_array_equal(one.placement.physical_to_logical_map, two.placement.physical_to_logical_map)
    by_rank = np.take_along_axis(expert_load(trace), one.placement.physical_to_logical_map, axis=1)
    load = by_rank.reshape(3, 4, 4).sum(axis=2)
    assert (load.max(axis=1) / load.mean(axis=1)).max() < 1.05
    assert one.gap["clusters"] <= 2 * moetuner.TOLERANCE
    assert one.gap["ranks"] == 0
    assert moetuner.place(*arguments[:2], Topology(ep_size=4, num_nodes=2), 5.0).gap["ranks"] is None


def test_a_large_model_ends_within_its_limit():
    rng = np.random.default_rng(0)
    load, counts = rng.gamma(1.0, 1000.0, (6, 256)), rng.integers(0, 9, (5, 256, 256))
    started = time.perf_counter()
    found = moetuner.place(load, counts, Topology(ep_size=64), 3.0)
    assert time.perf_counter() - started < 10
    assert (found.placement.logical_replica_count == 1).all()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="ep_size 3 does not divide 8 experts"):
        moetuner.place(np.ones((1, 8)), np.zeros((0, 8, 8)), Topology(ep_size=3), 1.0)
