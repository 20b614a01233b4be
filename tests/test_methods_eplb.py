"""Replication and packing by load."""

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semmoe.numeric import assignment
from semmoe.numeric.assignment import replicate_experts
from semmoe.placement import eplb, linear


def test_heaviest_items_go_first_into_the_lightest_pack_with_room():
    pack, position = assignment.balanced_packing(np.array([[4.0, 3, 2, 1], [1, 1, 1, 9]]), 2)
    assert pack.tolist() == [[0, 1, 1, 0], [1, 1, 0, 0]]
    assert position.tolist() == [[0, 0, 1, 1], [0, 1, 1, 0]]


def test_copies_go_to_the_highest_load_per_copy():
    logical, copies = replicate_experts(np.array([[10.0, 4, 2]]), 6)
    assert logical.tolist() == [[0, 1, 2, 0, 0, 1]]
    assert copies.tolist() == [[3, 2, 1]]


def test_the_published_example_gives_the_published_placement():
    """From the README of deepseek-ai/EPLB; order inside a rank does not matter."""
    load = np.array(
        [
            [90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86],
            [20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27],
        ],
        float,
    )
    published = np.array(
        [[5, 6, 5, 7, 8, 4, 3, 4, 10, 9, 10, 2, 0, 1, 11, 1], [7, 10, 6, 8, 6, 11, 8, 9, 2, 4, 5, 1, 5, 0, 3, 1]]
    )
    placement = eplb.place(load, ep_size=8, redundant_experts=4, num_groups=4, num_nodes=2)
    found = np.sort(placement.physical_to_logical_map.reshape(2, 8, 2))
    np.testing.assert_array_equal(found, np.sort(published.reshape(2, 8, 2)))


@given(st.integers(0, 9999), st.sampled_from([(2, 0, 1), (4, 4, 1), (4, 8, 2), (8, 16, 4), (4, 0, 2)]))
def test_every_expert_is_placed_and_every_slot_filled(seed, sizes):
    ep_size, redundant, nodes = sizes
    load = np.random.default_rng(seed).integers(0, 100, (3, 16)).astype(float)
    placement = eplb.place(load, ep_size, redundant, num_groups=8, num_nodes=nodes)
    assert placement.physical_to_logical_map.shape == (3, 16 + redundant)
    assert (placement.logical_replica_count >= 1).all()


@given(st.integers(0, 9999), st.integers(1, 12), st.sampled_from([1, 2, 4]))
def test_packs_are_equally_full_and_positions_never_collide(seed, per_pack, packs):
    weight = np.random.default_rng(seed).random((2, per_pack * packs))
    pack, position = assignment.balanced_packing(weight, packs)
    assert (np.sort(pack * per_pack + position) == np.arange(per_pack * packs)).all()


@given(st.integers(0, 9999), st.integers(0, 10))
def test_a_further_copy_always_went_to_the_hottest(seed, redundant):
    """So taking one away leaves that expert at least as hot, per copy, as any other is now."""
    weight = np.random.default_rng(seed).random((2, 6)) + 0.01
    logical, copies = replicate_experts(weight, 6 + redundant)
    for row in range(2):
        assert np.bincount(logical[row], minlength=6).tolist() == copies[row].tolist()
        hottest_now = (weight[row] / copies[row]).max()
        for e in np.flatnonzero(copies[row] > 1):
            assert weight[row, e] / (copies[row, e] - 1) >= hottest_now


@pytest.mark.parametrize("redundant", [0, 8])
@pytest.mark.parametrize("seed", range(5))
def test_load_is_spread_no_worse_than_without_a_plan(seed, redundant):
    load = np.random.default_rng(seed).zipf(1.5, (4, 32)).clip(max=1000).astype(float)
    balanced = oracles.rank_load(eplb.place(load, 8, redundant), load)
    plain = oracles.rank_load(linear.place(4, 32, 8, redundant), load)
    assert (balanced.max(axis=1) <= plain.max(axis=1) + 1e-9).all()
    np.testing.assert_allclose(balanced.sum(axis=1), load.sum(axis=1))


@given(st.integers(0, 9999), st.integers(0, 2))
def test_gate_groups_stay_on_one_node(seed, redundant_per_rank):
    load = np.random.default_rng(seed).zipf(1.5, (3, 16)).clip(max=1000).astype(float)
    placement = eplb.place(load, 4, 4 * redundant_per_rank, num_groups=4, num_nodes=2)
    nodes = placement.physical_to_logical_map.reshape(3, 2, -1) // 4  # (L, node, slots): each slot's gate group
    for layer in nodes:
        assert not set(layer[0]) & set(layer[1])
        assert [len(set(node)) for node in layer] == [2, 2]


def test_groups_that_do_not_divide_over_nodes_are_balanced_as_one():
    load = np.random.default_rng(0).random((2, 12))
    np.testing.assert_array_equal(eplb.rebalance_experts(load, 12, 3, 2, 4), eplb.rebalance_experts(load, 12, 1, 1, 4))


def test_without_load_every_expert_is_still_placed():
    placement = eplb.place(np.zeros((1, 4)), 2, 2)
    assert placement.logical_replica_count.min() == 1


@pytest.mark.parametrize("redundant", [1, 3])
def test_slots_that_do_not_divide_over_ranks_are_refused(redundant):
    with pytest.raises(ValueError, match=f"ep_size 4 does not divide {8 + redundant}"):
        eplb.place(np.ones((1, 8)), 4, redundant)


def test_contiguous_placement_repeats_the_first_experts():
    assert linear.place(1, 4, 2).physical_to_logical_map.tolist() == [[0, 1, 2, 3]]
    assert linear.place(2, 4, 3, 2).physical_to_logical_map.tolist() == [[0, 1, 2, 3, 0, 1]] * 2
    with pytest.raises(ValueError, match="ep_size 3 does not divide 4"):
        linear.place(1, 4, 3)
