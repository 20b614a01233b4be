"""GRACE-MoE: groups by co-activation, copies of what overloads a rank."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_trace, planted_trace, random_trace, with_noise

from lab.methods import grace, grouping
from lab.methods.grouping import group_hierarchically
from semmoe.topology import Topology


def inside(together, groups):
    return together[groups[:, None] == groups].sum()


def together_of(seed, experts):
    drawn = np.random.default_rng(seed).integers(0, 20, (experts, experts)).astype(float)
    drawn += drawn.T
    np.fill_diagonal(drawn, 0)
    return drawn


def test_pairs_that_are_chosen_together_share_a_rank():
    trace = make_trace([[0] * 8], [[[0, 3]], [[1, 2]]] * 4)
    found = grace.place(trace, Topology(ep_size=2), 0, 0).physical_to_logical_map
    assert {frozenset(pair) for pair in found.reshape(2, 2).tolist()} == {frozenset({0, 3}), frozenset({1, 2})}


def test_the_surplus_of_a_cluster_goes_where_it_has_most_in_common():
    """0, 1, 2 belong together and 3, 4, 5, 6, 7 too: of these the loosest, 3, must join the first three."""
    together = np.zeros((8, 8))
    together[:3, :3], together[3:, 3:] = 9, 9
    together[3, 4:] = together[4:, 3] = 5
    np.fill_diagonal(together, 0)
    groups = grouping.group(together, 2, np.random.default_rng(0))
    assert len(set(groups[:4].tolist())) == len(set(groups[4:].tolist())) == 1
    assert groups[0] != groups[4]


@given(st.integers(0, 9999))
@settings(max_examples=30, deadline=None)
def test_groups_come_close_to_the_best_of_all(seed):
    together = together_of(seed, 6)
    groups = grouping.group(together, 2, np.random.default_rng(seed))
    assert np.bincount(groups).tolist() == [3, 3]
    best = max(inside(together, np.array(p)) for p in set(permutations([0, 0, 0, 1, 1, 1])))
    assert inside(together, groups) >= 0.6 * best


@given(st.integers(0, 9999), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_groups_are_equal_whatever_the_clusters_are(seed, number):
    together = together_of(seed, 12)
    groups = grouping.group(together, number, np.random.default_rng(seed))
    assert np.bincount(groups, minlength=number).tolist() == [12 // number] * number


def test_a_planted_structure_is_found_despite_noise():
    trace, blocks = planted_trace(1, 8, per_block=4, length=64, requests_per_group=12)
    placement = grace.place(with_noise(trace, 0.2), Topology(ep_size=8), 0, 0)
    for row, block in zip(placement.physical_to_logical_map.reshape(3, 8, 4), blocks, strict=True):
        assert all(len(set(block[held].tolist())) == 1 for held in row)


def test_nodes_come_first():
    """Four tight pairs, of which two and two are loosely used together: pairs share a rank, loose fours a node."""
    together = np.kron(np.eye(2), np.full((4, 4), 3.0)) + np.kron(np.eye(4), np.full((2, 2), 9.0)) + 0.1
    np.fill_diagonal(together, 0)
    order = np.random.default_rng(1).permutation(8)
    ranks = group_hierarchically(together[np.ix_(order, order)], 2, 4, np.random.default_rng(0))
    of_expert = np.empty(8, np.int64)
    of_expert[order] = ranks
    assert (of_expert[0::2] == of_expert[1::2]).all()
    assert sorted(of_expert[::2].tolist()) == [0, 1, 2, 3]
    assert of_expert[0] // 2 == of_expert[2] // 2 != of_expert[4] // 2


def test_hot_experts_by_hand():
    share, held = np.array([15.0, 50, 5, 30]), np.arange(4)
    assert grace.hot_experts(share, held, 1).tolist() == [1]
    assert grace.hot_experts(share, held, 2).tolist() == [1, 3]  # two thirds need 50 + 30
    assert grace.hot_experts(share, held, 9).tolist() == [1, 3, 0]


def test_the_heaviest_rank_gives_to_the_lightest_by_hand():
    """Loads 60 + 10, 8 + 2, 12 + 8: rank 0 is 2.1 means, so expert 0 goes to two ranks, and only they have copies.

    Then every rank serves 20 of expert 0, and rank 0, heaviest no more than half above the mean, has nothing to give
    that others lack but expert 1, the copy it gets itself is of what is heaviest elsewhere.
    """
    load = np.array([60.0, 10, 8, 2, 12, 8])
    copies = grace.replicate(load, np.arange(6).reshape(3, 2), 1)
    assert copies[1:].ravel().tolist() == [0, 0]
    assert copies[0, 0] == 4


@given(
    st.integers(0, 9999), st.sampled_from([(2, 2), (4, 4), (4, 8), (8, 8), (8, 24), (4, 32)]), st.sampled_from([1, 2])
)
@settings(max_examples=30, deadline=None)
def test_every_slot_is_filled_and_no_rank_holds_an_expert_twice(seed, sizes, nodes):
    ep_size, redundant = sizes
    trace = random_trace(seed, experts=16)
    placement = grace.place(trace, Topology(ep_size=ep_size, num_nodes=nodes), redundant, seed)
    assert placement.physical_to_logical_map.shape == (3, 16 + redundant)
    assert (placement.logical_replica_count >= 1).all()
    rows = np.sort(placement.physical_to_logical_map.reshape(3, ep_size, -1), axis=2)
    assert (np.diff(rows, axis=2) > 0).all()


def test_more_slots_than_experts_are_filled_too():
    load = np.array([3.0, 2, 1, 1])
    copies = grace.replicate(load, np.arange(4).reshape(2, 2), 3)
    assert copies.shape == (2, 3)
    assert all(set(copies[rank]) | {2 * rank, 2 * rank + 1} == {0, 1, 2, 3} for rank in range(2))
    assert grace.replicate(load, np.arange(4).reshape(1, 4), 1).shape == (1, 1)


def test_copies_lower_the_predicted_load():
    """On average: the paper's rule looks at the giver, and what a taker ends up with may be more than before."""
    own = np.arange(32).reshape(8, 4)

    def heaviest(load, spare):
        slots = np.concatenate([own, grace.replicate(load, own, spare)], axis=1)
        return (load / np.bincount(slots.ravel(), minlength=32))[slots].sum(axis=1).max()

    loads = [np.random.default_rng(seed).gamma(0.5, 100.0, 32) for seed in range(40)]
    alone, one, four = (np.mean([heaviest(load, spare) / load.sum() for load in loads]) for spare in (0, 1, 4))
    assert four < one < 0.9 * alone


def test_the_seed_decides():
    trace = random_trace(2, requests=20, experts=16)
    one, two = (grace.place(trace, Topology(ep_size=4), 4, 7).physical_to_logical_map for _ in range(2))
    np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize(
    ("ep_size", "redundant", "message"), [(3, 0, "divide 8 experts"), (4, 2, "ep_size 4 does not divide 10 experts")]
)
def test_uneven_sizes_are_refused(ep_size, redundant, message):
    with pytest.raises(ValueError, match=message):
        grace.place(random_trace(0), Topology(ep_size=ep_size), redundant, 0)
