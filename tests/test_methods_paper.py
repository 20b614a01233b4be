"""Algorithm 1: planted structure is found, constraints hold, and the objective is near the optimum."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from exact import solve_exactly
from hypothesis import given
from hypothesis import strategies as st
from synthetic import planted_trace, random_trace

from semmoe.paper import coclustering
from semmoe.settings import PaperSettings
from semmoe.topology import Topology

QUICK = PaperSettings(steps=3, swaps_per_expert=20)


def cluster(trace, topology, settings=QUICK, seed=0):
    return coclustering.cluster(trace, topology, settings, seed)


def ranks_of_experts(placement) -> np.ndarray:
    """(L, E), for placements with one copy of each expert."""
    return placement.logical_to_physical_map[..., 0] // placement.experts_per_rank


def best_lar(placement, trace, rank_of_token) -> float:
    """Share of (token, expert) pairs on the rank that a token is given: rank_of_token (T, L)."""
    ranks = ranks_of_experts(placement)
    layers = np.arange(trace.fingerprint.num_layers)[:, None]
    return float((ranks[layers, trace.expert_ids] == rank_of_token[..., None]).mean())


@given(st.integers(0, 99), st.sampled_from([(1, 4), (2, 2), (4, 1), (1, 8), (1, 1)]))
def test_each_rank_holds_equally_many_experts_in_every_layer(seed, sizes):
    groups, ranks = sizes
    trace = random_trace(seed, requests=8)
    clusters = cluster(trace, Topology(ep_size=groups * ranks, dp_size=groups))
    placement = clusters.placement
    assert (np.sort(placement.physical_to_logical_map) == np.arange(8)).all()
    assert (placement.hosts.sum(axis=2) == 8 // (groups * ranks)).all()


@pytest.mark.parametrize("ranks", [2, 4])
def test_planted_blocks_of_tokens_and_experts_are_recovered(ranks):
    trace, block_of_expert = planted_trace(1, ranks)
    clusters = cluster(trace, Topology(ep_size=ranks), PaperSettings())
    labels = clusters.token_ranks[:, 0, trace.token_ids].T
    assert best_lar(clusters.placement, trace, labels) == 1.0
    for found, planted in zip(ranks_of_experts(clusters.placement), block_of_expert, strict=True):
        assert len(set(zip(found, planted, strict=True))) == ranks


@pytest.mark.parametrize("groups", [2, 4])
def test_planted_requests_keep_one_label_across_layers(groups):
    trace, _ = planted_trace(groups, 1)
    clusters = cluster(trace, Topology(ep_size=groups, dp_size=groups), PaperSettings())
    by_request = clusters.request_groups[trace.request_of_token()]
    assert best_lar(clusters.placement, trace, np.tile(by_request[:, None], (1, 3))) == 1.0
    assert np.bincount(clusters.request_groups).tolist() == [6] * groups
    assert clusters.token_ranks is None


def test_planted_groups_and_ranks_are_recovered_in_turn():
    trace, _ = planted_trace(2, 2)
    clusters = cluster(trace, Topology(ep_size=4, dp_size=2), PaperSettings())
    group = clusters.request_groups[trace.request_of_token()]
    inside = clusters.token_ranks[:, group, trace.token_ids].T
    assert best_lar(clusters.placement, trace, 2 * group[:, None] + inside) == 1.0


def test_a_token_is_labelled_in_the_groups_whose_experts_it_used_and_nowhere_else():
    trace = random_trace(1)
    clusters = cluster(trace, Topology(ep_size=4, dp_size=2))
    group_of_expert = ranks_of_experts(clusters.placement) // 2
    used = np.zeros((3, 2, 20), bool)
    for t, d in enumerate(clusters.request_groups[trace.request_of_token()]):
        for l in range(3):
            used[l, d, trace.token_ids[t]] |= d in group_of_expert[l, trace.expert_ids[t, l]]
    np.testing.assert_array_equal(clusters.token_ranks >= 0, used)


@pytest.mark.parametrize("dp_size", [1, 2, 4])
def test_the_seed_decides_everything(dp_size):
    trace, topology = random_trace(3), Topology(ep_size=4, dp_size=dp_size)
    np.random.seed(1)
    first = cluster(trace, topology, seed=5)
    np.random.seed(2)
    again = cluster(trace, topology, seed=5)
    np.testing.assert_array_equal(first.placement.physical_to_logical_map, again.placement.physical_to_logical_map)
    np.testing.assert_array_equal(first.token_ranks, again.token_ranks)
    np.testing.assert_array_equal(first.request_groups, again.request_groups)


@pytest.mark.parametrize(("num_groups", "dp_size", "ranks"), [(4, 1, 4), (8, 1, 4), (8, 2, 2), (4, 4, 1), (8, 1, 2)])
def test_gate_groups_stay_whole_where_ranks_divide_them(num_groups, dp_size, ranks):
    trace = random_trace(0, experts=16, num_groups=num_groups)
    placement = cluster(trace, Topology(ep_size=dp_size * ranks, dp_size=dp_size)).placement
    by_group = ranks_of_experts(placement).reshape(3, num_groups, -1)
    assert (by_group == by_group[..., :1]).all()


@pytest.mark.parametrize(
    ("num_groups", "dp_size", "ranks"), [(2, 1, 4), (2, 1, 8), (4, 1, 8), (2, 4, 1), (2, 2, 2), (2, 4, 2)]
)
def test_experts_never_leave_their_gate_group_s_ranks(num_groups, dp_size, ranks):
    trace = random_trace(0, experts=16, num_groups=num_groups)
    placement = cluster(trace, Topology(ep_size=dp_size * ranks, dp_size=dp_size)).placement
    share = dp_size * ranks // num_groups
    owner = placement.physical_to_logical_map.reshape(3, dp_size * ranks, -1) // (16 // num_groups)
    assert (owner == owner[..., :1]).all()
    blocks = owner[..., 0].reshape(3, num_groups, share)
    assert (blocks == blocks[..., :1]).all()


def test_planted_blocks_inside_gate_groups_are_recovered():
    """Experts renumbered by block, so that gate group 0 is blocks 0 and 1: data are clustered by group, then inside."""
    trace, block_of_expert = planted_trace(1, 4)
    renumbered = np.argsort(np.argsort(block_of_expert, axis=1, kind="stable"), axis=1)
    trace = replace(
        trace,
        expert_ids=renumbered[np.arange(3)[:, None], trace.expert_ids],
        fingerprint=replace(trace.fingerprint, num_groups=2),
    )
    clusters = cluster(trace, Topology(ep_size=4), PaperSettings())
    assert best_lar(clusters.placement, trace, clusters.token_ranks[:, 0, trace.token_ids].T) == 1.0


def test_gate_groups_that_do_not_divide_over_ranks_are_refused():
    with pytest.raises(ValueError, match=r"3 gate groups and 2 ranks: .*\(nearest: 1 and 3\)"):
        cluster(random_trace(0, experts=12, num_groups=3), Topology(ep_size=2))


def test_gate_groups_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="3 gate groups do not divide 8 experts"):
        cluster(random_trace(0, num_groups=3), Topology(ep_size=2))


def test_no_gate_groups_at_all_are_refused():
    with pytest.raises(ValueError, match=r"num_groups must lie between 1 and .*, not 0"):
        cluster(random_trace(0, num_groups=0), Topology(ep_size=2))


def test_ranks_that_do_not_divide_the_experts_are_refused():
    with pytest.raises(ValueError, match="ep_size 3 does not divide 8 experts"):
        cluster(random_trace(0), Topology(ep_size=3))


def test_fewer_requests_than_groups_are_refused():
    with pytest.raises(ValueError, match="3 requests cannot be clustered into 4 groups"):
        cluster(random_trace(0, requests=3), Topology(ep_size=4, dp_size=4))


def random_items(seed, items, experts) -> np.ndarray:
    """(N, E) activations, items of unequal size with tastes of their own."""
    rng = np.random.default_rng(seed)
    taste = rng.dirichlet(np.full(experts, 0.4), size=items)
    tokens = rng.integers(10, 40, size=items)
    counts = np.array([rng.multinomial(n, p) for n, p in zip(tokens, taste, strict=True)])
    return counts.astype(np.float32)


def clustered_items(seed, items, experts, clusters) -> np.ndarray:
    """(N, E) activations, items of equal size, three quarters of each on the experts of its cluster."""
    rng = np.random.default_rng(seed)
    cluster_of_expert = rng.permutation(np.arange(experts) % clusters)
    counts = []
    for n in range(items):
        own = cluster_of_expert == n % clusters
        share = np.where(own, 0.75 * clusters / experts, 0.25 * clusters / (experts * (clusters - 1)))
        share *= rng.dirichlet(np.full(experts, 2.0))
        counts.append(rng.multinomial(24, share / share.sum()))
    return np.array(counts, np.float32)


def test_objective_by_hand():
    """Loads 7 and 3 of 10 tokens: imbalance 2 + 2; remote are item 0's one and item 1's one: 2."""
    pull = np.array([[6.0, 1.0], [1.0, 2.0]])
    assert coclustering.objective(pull, np.array([0, 1]), np.array([7.0, 3.0]), 0.25) == pytest.approx(
        (0.25 * 4 + 0.75 * 2) / 10
    )


@given(st.integers(0, 999), st.integers(2, 3), st.floats(0.05, 0.95))
def test_objective_agrees_with_loops(seed, clusters, theta):
    rng = np.random.default_rng(seed)
    activations = random_items(seed, 7, 2 * clusters)
    experts = rng.permutation(np.repeat(np.arange(clusters), 2))
    labels = rng.integers(clusters, size=7)
    pull = np.stack([activations[:, experts == c].sum(axis=1) for c in range(clusters)], axis=1)
    expected = oracles.objective(activations, labels, experts, theta)
    assert coclustering.objective(pull, labels, activations.sum(axis=1), theta) == pytest.approx(expected, rel=1e-5)


def times_optimum(activations, clusters, seeds=1) -> list[float]:
    """The objective that Algorithm 1 reaches from each of `seeds` starts, over the proven optimum."""
    settings, found = PaperSettings(), []
    for seed in range(seeds):
        expert_labels, labels = coclustering.cocluster(
            activations[:, None], activations.sum(axis=1), clusters, settings, np.random.default_rng(seed)
        )
        found.append(oracles.objective(activations, labels, expert_labels[0], settings.theta))
    optimum = solve_exactly(activations.astype(np.float64), clusters, settings.theta)[2]
    return [each / optimum for each in found]


@pytest.mark.parametrize(
    ("items", "experts", "clusters", "instances"), [(10, 6, 2, 8), (10, 6, 3, 2), (10, 8, 2, 8), (8, 8, 4, 2)]
)
def test_algorithm_1_is_never_better_than_the_optimum_and_near_it_on_average(items, experts, clusters, instances):
    """Of one instance it may miss more: from one start it ends in a local optimum."""
    items_of = [clustered_items(seed, items, experts, clusters) for seed in range(instances)]
    ratios = [times_optimum(each, clusters)[0] for each in items_of]
    assert min(ratios) >= 1 - 1e-6
    assert np.mean(ratios) <= 1.15


@pytest.mark.parametrize(("seed", "experts", "clusters"), [(0, 6, 2), (1, 6, 3), (2, 8, 2)])
def test_algorithm_1_stays_within_half_of_the_optimum_on_unclustered_items(seed, experts, clusters):
    """Without clusters in the data one start can end far off: here the best of 8 reaches 1.37, 1.37 and 1.42."""
    ratios = times_optimum(random_items(seed, 10, experts), clusters, seeds=8)
    assert min(ratios) >= 1 - 1e-6
    assert min(ratios) <= 1.5
    assert max(ratios) <= 2.0


def test_coactivation_of_two_items():
    """Item 0: 4 tokens, 3 and 1 activations; item 1: 2 tokens, both to expert 1."""
    together = coclustering.coactivation(np.array([[[3, 1]], [[0, 2]]], np.float32), np.array([4, 2], np.float32))
    np.testing.assert_allclose(together, [[[9 / 4, 3 / 4], [3 / 4, 1 / 4 + 2]]], rtol=1e-6)
    np.testing.assert_allclose(together[0].sum(axis=1), [3, 3], rtol=1e-6)


def merit(labels, together, data, settings) -> float:
    """What `expert_place` climbs: affinity of pairs on one cluster, data there, and the price of uneven load."""
    E, C = data.shape
    load = together.sum(axis=1)
    pairs = sum(together[a, b] for a in range(E) for b in range(a) if labels[a] == labels[b])
    near_data = sum(data[e, labels[e]] for e in range(E))
    uneven = sum(load[labels == c].sum() ** 2 for c in range(C)) * C / load.sum() / 2
    return settings.expert_affinity * pairs + settings.expert_data * near_data - settings.expert_load * uneven


@given(st.integers(0, 9999), st.sampled_from([2, 4]))
def test_no_swap_of_two_experts_improves_a_placed_layer(seed, clusters):
    rng = np.random.default_rng(seed)
    activations = random_items(seed, 6, 8)[:, None]
    together = coclustering.coactivation(activations, activations.sum(axis=(1, 2)))
    by_cluster = rng.random((clusters, 1, 8)) * activations.sum() / 8
    settings = PaperSettings(swaps_per_expert=400)
    labels = coclustering.expert_place(together, by_cluster, settings, rng)[0]
    reached = merit(labels, together[0], by_cluster[:, 0].T, settings)
    for a in range(8):
        for b in range(a):
            swapped = labels.copy()
            swapped[[a, b]] = labels[[b, a]]
            assert merit(swapped, together[0], by_cluster[:, 0].T, settings) <= reached + 1e-6 * abs(reached)


@given(st.integers(0, 9999), st.integers(1, 20), st.integers(1, 5))
def test_no_cluster_takes_more_than_its_share_and_one_item(seed, items, clusters):
    rng = np.random.default_rng(seed)
    activations = random_items(seed, items, 4 * clusters)[:, None]
    quota = activations.sum(axis=(1, 2))
    _, labels = coclustering.cocluster(activations, quota, clusters, QUICK, rng)
    filled = np.bincount(labels, weights=quota, minlength=clusters)
    assert filled.sum() == pytest.approx(quota.sum())
    assert filled.max() <= quota.sum() / clusters + quota.max() + 1e-3


def test_requests_of_one_quota_are_shared_out_equally():
    activations = random_items(0, 12, 8)[:, None]
    _, labels = coclustering.cocluster(activations, np.ones(12), 4, QUICK, np.random.default_rng(0))
    assert np.bincount(labels).tolist() == [3, 3, 3, 3]
