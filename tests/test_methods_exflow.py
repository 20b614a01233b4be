"""ExFlow: experts that follow each other share a rank."""

from itertools import permutations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import planted_trace, random_trace

from lab.methods import exflow, grouping
from lab.methods.grouping import link_costs, paths_of
from semmoe.topology import Topology

TP2 = Topology(ep_size=2)


def labels_of(placement):
    """(L, E) ranks of the experts."""
    slots = np.argsort(placement.physical_to_logical_map, axis=1)
    return slots // placement.experts_per_rank


def equal_labels(experts, ranks):
    return sorted(set(permutations(np.arange(experts) // (experts // ranks))))


def test_experts_follow_those_before_them():
    """0 and 1 are on rank 0; 3 follows 0 and 0 follows 1, so both go there; at the next layer 2 and 1 follow these."""
    counts = np.zeros((2, 4, 4))
    counts[0, 0, 3] = counts[0, 1, 0] = 5
    counts[0, 2, 1] = counts[0, 3, 2] = 4
    counts[1, 3, 2] = counts[1, 0, 1] = 5
    cost = link_costs(TP2)
    found = exflow.improve(counts, np.array([0, 0, 1, 1]), cost)
    assert found.tolist() == [[0, 0, 1, 1], [0, 1, 1, 0], [1, 0, 0, 1]]
    assert exflow.transfer_cost(counts, found, cost) == 0


def test_links_cost_more_between_nodes():
    cost = link_costs(Topology(ep_size=4, num_nodes=2))
    far = grouping.NODE_COST
    assert cost.tolist() == [[0, 1, far, far], [1, 0, far, far], [far, far, 0, 1], [far, far, 1, 0]]


@given(st.integers(0, 9999), st.sampled_from([1, 2]))
@settings(max_examples=20, deadline=None)
def test_a_layer_is_placed_best_given_its_neighbours(seed, nodes):
    """The local optimum in which sweeps end: no other placement of one layer alone costs less."""
    topology = Topology(ep_size=4, num_nodes=nodes)
    counts = np.random.default_rng(seed).integers(0, 20, (2, 4, 4)).astype(float)
    found, cost = labels_of(exflow.place(counts, 4, topology, 0)), link_costs(topology)
    least = exflow.transfer_cost(counts, found, cost)
    for layer in range(3):
        for row in equal_labels(4, 4):
            other = found.copy()
            other[layer] = row
            assert exflow.transfer_cost(counts, other, cost) >= least - 1e-9


@given(st.integers(0, 9999))
@settings(max_examples=25, deadline=None)
def test_it_is_close_to_the_best_of_all_placements(seed):
    counts = np.random.default_rng(seed).integers(0, 20, (2, 4, 4)).astype(float)
    cost, rows = link_costs(TP2), equal_labels(4, 2)
    best = min(exflow.transfer_cost(counts, np.array(choice), cost) for choice in product(rows, repeat=3))
    found = exflow.transfer_cost(counts, labels_of(exflow.place(counts, 4, TP2, 0)), cost)
    assert best <= found <= 1.15 * best


def test_a_planted_structure_is_found():
    trace, _ = planted_trace(1, 4, layers=4, per_block=2, requests_per_group=20)
    counts, topology = paths_of(trace), Topology(ep_size=4)
    found = labels_of(exflow.place(counts, 8, topology, 0))
    assert exflow.transfer_cost(counts, found, link_costs(topology)) == 0


def test_every_expert_is_placed_once_and_twice_the_same():
    counts = paths_of(random_trace(3, experts=16))
    one, two = (exflow.place(counts, 16, Topology(ep_size=8, num_nodes=2), 0) for _ in range(2))
    assert (one.logical_replica_count == 1).all()
    np.testing.assert_array_equal(one.physical_to_logical_map, two.physical_to_logical_map)
    assert exflow.place(np.zeros((0, 8, 8)), 8, TP2, 0).physical_to_logical_map.shape == (1, 8)


def test_uneven_sizes_are_refused():
    with pytest.raises(ValueError, match="ep_size 3 does not divide 8 experts"):
        exflow.place(np.zeros((1, 8, 8)), 8, Topology(ep_size=3), 0)
