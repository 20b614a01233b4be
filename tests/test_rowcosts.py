"""Costs by kind of an all-to-all: the worked example, and against a loop over rows."""

import numpy as np
import pytest

from semmoe.costs.metrics import layer_traffic
from semmoe.costs.rows import KINDS, hops, kind_costs, landing_ranks, plain_costs
from semmoe.topology import Topology

TOPOLOGY = Topology(ep_size=4, num_nodes=2)
RELATIVE = np.array([[0, 1, 5, 5], [1, 0, 5, 5], [5, 5, 0, 1], [5, 5, 1, 0]], float)


def charge(costs, topology, home: int, ranks: list[int]) -> float:
    """The cost of a token on `home` whose pairs `ranks` compute."""
    pairs = sum(costs.pair[home, y] for y in ranks)
    nodes = {int(topology.node_of[y]) for y in ranks}
    return pairs + sum(costs.rank[home, y] for y in set(ranks)) + sum(costs.node[home, m] for m in nodes)


@pytest.mark.parametrize(("kind", "cost"), [("per-rank", 11), ("per-node", 7), ("per-pair", 11)])
def test_the_worked_example(kind, cost):
    costs = kind_costs(kind, TOPOLOGY, RELATIVE, activation=0.0)
    assert charge(costs, TOPOLOGY, 0, [1, 2, 3]) == cost
    assert charge(costs, TOPOLOGY, 0, [1, 2, 3, 3]) == cost + (5 if kind == "per-pair" else 0)
    assert charge(costs, TOPOLOGY, 0, [0, 0]) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_costs_are_sums_over_the_rows_that_a_dispatcher_sends(kind):
    topology, rng = Topology(ep_size=6, num_nodes=3), np.random.default_rng(0)
    relative = rng.uniform(1, 9, (6, 6))
    costs, landing = kind_costs(kind, topology, relative, activation=0.5, per_row=2.0), landing_ranks(topology)
    for _ in range(200):
        home, ranks = int(rng.integers(6)), rng.integers(6, size=4).tolist()
        rows = []
        if kind == "per-pair":
            rows = [(home, y) for y in ranks]
        elif kind == "per-rank":
            rows = [(home, y) for y in set(ranks)]
        else:
            for m in {topology.node_of[y] for y in ranks}:
                first = home if m == topology.node_of[home] else landing[home, m]
                rows += [(home, first)] + [(first, y) for y in set(ranks) if topology.node_of[y] == m]
        expected = sum(2.0 * relative[i, j] for i, j in rows if i != j) + 0.5 * sum(y != home for y in ranks)
        assert charge(costs, topology, home, ranks) == pytest.approx(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_hops_are_the_rows_of_every_link(kind):
    topology, rng = Topology(ep_size=6, num_nodes=3), np.random.default_rng(1)
    targets, home, landing = rng.integers(6, size=(300, 4)), rng.integers(6, size=300), landing_ranks(topology)
    expected = np.zeros((6, 6), int)
    for ranks, at in zip(targets.tolist(), home.tolist(), strict=True):
        if kind == "per-pair":
            sent = [(at, y) for y in ranks]
        elif kind == "per-rank":
            sent = [(at, y) for y in set(ranks)]
        else:
            nodes = {int(topology.node_of[y]) for y in ranks}
            first = {m: at if m == topology.node_of[at] else landing[at, m] for m in nodes}
            sent = [(at, one) for one in first.values()] + [(first[topology.node_of[y]], y) for y in set(ranks)]
        for i, j in sent:
            expected[i, j] += i != j
    traffic = layer_traffic(targets, home, 6, 3)
    found = hops(kind, topology, traffic.rows, traffic.node_rows, traffic.pair_rows)
    np.testing.assert_array_equal(found, expected)


def test_without_links_a_first_row_to_a_node_costs_more():
    costs = plain_costs(TOPOLOGY, activation=1.0, per_rank=2.0, per_node=10.0)
    assert charge(costs, TOPOLOGY, 0, [0, 1]) == 1 + 2
    assert charge(costs, TOPOLOGY, 0, [2, 2, 3]) == 3 + 4 + 10


def test_another_kind_is_refused():
    with pytest.raises(ValueError, match="per-rank or per-node or per-pair, not 'free'"):
        kind_costs("free", TOPOLOGY, RELATIVE)
