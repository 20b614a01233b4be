"""The price of a move from one plan to another, by hand and against plain loops."""

from dataclasses import replace

import numpy as np
import pytest

from semmoe.core import Placement
from semmoe.costs.links import load_links
from semmoe.costs.moving import move_between
from semmoe.placement.linear import vanilla_plan
from semmoe.topology import Fingerprint, Topology

MODEL = Fingerprint(
    model="m", architecture_hash="a", tokenizer_hash="t", num_layers=2, num_experts=4, top_k=2, vocab_size=16
)


def plan(rows, topology):
    placement = Placement(physical_to_logical_map=np.array(rows, np.int32), num_experts=4, ep_size=topology.ep_size)
    return replace(vanilla_plan(MODEL, topology), placement=placement)


def test_the_worked_example():
    topology = Topology(ep_size=2)
    old, new = plan([[0, 1, 2, 3]] * 2, topology), plan([[0, 2, 1, 3], [1, 0, 2, 3]], topology)
    move = move_between(old, new)
    assert move.experts.tolist() == [[[0, 1], [1, 0]], [[0, 0], [0, 0]]]
    assert (move.slots, move.inside, move.between) == (4, 2, 0)
    links = load_links("h200-nvlink", topology)
    seconds = move.seconds(4_000_000, links)
    bandwidth = links.inside_node.gigabytes_per_second
    assert seconds[0] == pytest.approx(4e-3 / bandwidth + links.inside_node.dispatch_latency_us * 1e-6)
    assert seconds[1] == 0.0


def test_a_rank_of_the_own_node_is_preferred():
    topology = Topology(ep_size=4, num_nodes=2)
    old = plan([[0, 1, 1, 2, 2, 3, 3, 0]] * 2, topology)
    new = plan([[0, 2, 1, 2, 2, 3, 3, 1]] * 2, topology)  # rank 0 gets 2 from rank 1, rank 3 gets 1 from rank 0
    move = move_between(old, new)
    assert move.experts[0].tolist() == [[0, 0, 0, 1], [1, 0, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert (move.inside, move.between) == (2, 2)


def test_a_source_on_the_own_node_is_preferred_to_a_lower_rank_on_another():
    """Rank 3 gets expert 1, which ranks 0, 1 and 2 have."""
    topology = Topology(ep_size=4, num_nodes=2)
    old = plan([[0, 1, 1, 2, 1, 3, 3, 0]] * 2, topology)
    move = move_between(old, plan([[0, 1, 1, 2, 1, 3, 3, 1]] * 2, topology))
    assert np.argwhere(move.experts[0]).tolist() == [[2, 3]]
    assert (move.inside, move.between) == (2, 0)


@pytest.mark.parametrize("seed", range(5))
def test_moves_agree_with_plain_loops(seed):
    rng, topology = np.random.default_rng(seed), Topology(ep_size=4, num_nodes=2)
    old, new = (plan([rng.permutation([0, 1, 2, 3, *rng.integers(0, 4, 4)]) for _ in range(2)], topology) for _ in "ab")
    found = move_between(old, new).experts
    for layer in range(2):
        had, has = (p.placement.physical_to_logical_map[layer].reshape(4, 2) for p in (old, new))
        for target in range(4):
            needed = set(has[target]) - set(had[target])
            assert found[layer, :, target].sum() == len(needed)
            expected = np.zeros(4, int)
            for expert in needed:  # of the own node's ranks the lowest, else the lowest of all
                sources = [rank for rank in range(4) if expert in had[rank]]
                expected[min(sources, key=lambda rank: (rank // 2 != target // 2, rank))] += 1
            assert found[layer, :, target].tolist() == expected.tolist()
