"""Traffic by tier and by pair of nodes; against loops over tokens."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from synthetic import make_fingerprint

from semmoe.core import NEVER
from semmoe.costs.metrics import layer_traffic
from semmoe.engines.settings import PluginSettings, from_environment
from semmoe.engines.traffic import MOST_PAIRED, RankTraffic
from semmoe.placement.linear import vanilla_plan
from semmoe.runtime.collectives import Communicator
from semmoe.runtime.traffic import TrafficCounter
from semmoe.topology import Topology

RANKS = 8


def by_loops(targets, home, topology):
    """Rows per pair of ranks and per pair of nodes, and pairs per pair of ranks, token by token."""
    rows, served = Counter(), Counter()
    nodes, node_of = Counter(), topology.node_of
    for chosen, source in zip(targets.tolist(), home.tolist(), strict=True):
        served.update((source, t) for t in chosen)
        rows.update((source, t) for t in set(chosen) - {source})
        there = {int(node_of[t]) for t in chosen} - {int(node_of[source])}
        nodes.update((int(node_of[source]), node) for node in there)
    return rows, nodes, served


def published(topology, targets, home, dispatch=lambda rank: []):
    """The readings of all ranks, summed by name and labels as Prometheus sums processes."""
    out = Counter()
    for rank in range(topology.ep_size):
        counter = TrafficCounter(topology.ep_size, rank, num_nodes=topology.num_nodes)
        counter.count(torch.from_numpy(targets[home == rank]))
        for name, labels, value in RankTraffic(rank=rank, topology=topology).readings(counter, dispatch(rank), []):
            out[(name, *labels.items())] += value
    return out


def pairs_of(found, name):
    return {tuple(int(v) for _, v in key[1:]): n for key, n in found.items() if key[0] == name and n}


def total(found, name, **wanted):
    return sum(n for key, n in found.items() if key[0] == name and set(wanted.items()) <= set(key[1:]))


def draw(seed, topology):
    rng = np.random.default_rng(seed)
    return rng.integers(topology.ep_size, size=(300, 4)), rng.integers(topology.ep_size, size=300)


def test_one_token_by_hand():
    """Rank 0 of four on two nodes, experts on ranks 0, 2, 2 and 3."""
    counter = TrafficCounter(4, 0, num_nodes=2)
    counter.count(torch.tensor([[0, 2, 2, 3], [-1, -1, -1, -1]]))
    assert counter.totals() == (1, [1, 0, 2, 1], [0, 0, 1, 1], [0, 1])
    everywhere = TrafficCounter(4, 0, gathers=True, num_nodes=2)
    everywhere.count(torch.tensor([[0, 0, 0, 0]]))
    assert everywhere.totals() == (1, [4, 0, 0, 0], [0, 1, 1, 1], [0, 1])


@pytest.mark.parametrize("num_nodes", [1, 2, 4, 8])
def test_every_counter_is_what_loops_count(num_nodes):
    topology = Topology(ep_size=RANKS, num_nodes=num_nodes)
    targets, home = draw(num_nodes, topology)
    rows, nodes, served = by_loops(targets, home, topology)
    found = published(topology, targets, home)
    assert pairs_of(found, "node_rows") == nodes
    inside = sum(n for (i, j), n in rows.items() if topology.node_of[i] == topology.node_of[j])
    assert total(found, "remote_rows", tier="node") == inside
    assert total(found, "remote_rows", tier="network") == rows.total() - inside
    assert total(found, "pairs", local="true") == sum(n for (i, j), n in served.items() if i == j)
    whole = layer_traffic(targets, home, RANKS)
    assert total(found, "remote_rows") == whole.rows.sum()
    assert [total(found, "served_pairs", by=str(j)) for j in range(RANKS)] == whole.load.tolist()
    assert nodes.total() <= total(found, "remote_rows", tier="network") <= total(found, "pairs", local="false")


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
def test_bytes_by_tier_and_by_pair(num_nodes):
    """Rank i sends 100 * i + j bytes to rank j, over two communicators."""
    topology = Topology(ep_size=RANKS, num_nodes=num_nodes)

    def dispatch(rank):
        comms = [Communicator(None, rank, RANKS), Communicator(None, rank, RANKS)]
        for comm, share in zip(comms, (100 * rank, 1), strict=True):
            comm.count("dispatch", [share * (j if share == 1 else 1) for j in range(RANKS)], 1)
        return comms

    found = published(topology, *draw(0, topology), dispatch)
    sent = {(i, j): 100 * i + j for i in range(RANKS) for j in range(RANKS) if i != j}
    across = Counter()
    for (i, j), n in sent.items():
        across[int(topology.node_of[i]), int(topology.node_of[j])] += n
    assert pairs_of(found, "node_bytes") == {ends: n for ends, n in across.items() if ends[0] != ends[1]}
    assert total(found, "all_to_all_bytes", tier="node") == sum(across[n, n] for n in range(num_nodes))
    assert total(found, "all_to_all_bytes") == total(found, "sent_bytes", kind="dispatch") == sum(sent.values())


def test_no_series_per_pair_of_ranks():
    topology = Topology(ep_size=320, num_nodes=40)
    targets, home = draw(1, topology)
    found = published(topology, targets, home)
    assert Counter(key[0] for key in found) == {
        "routed_tokens": 320, "pairs": 640, "remote_rows": 640, "served_pairs": 320, "node_rows": 40 * 39,
    }  # fmt: skip
    small = Topology(ep_size=4)
    one_node = published(small, *draw(1, small))
    assert {key[0] for key in one_node} == {"routed_tokens", "pairs", "remote_rows", "served_pairs"}


def test_pairs_of_too_many_nodes_become_one_total():
    topology = Topology(ep_size=2 * MOST_PAIRED, num_nodes=2 * MOST_PAIRED)
    targets, home = draw(2, topology)
    found = published(topology, targets, home)
    assert {dict(key[1:])["to_node"] for key in found if key[0] == "node_rows"} == {"others"}
    assert total(found, "node_rows") == by_loops(targets, home, topology)[1].total()


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "never", str(NEVER + 1)])
def test_a_number_of_rows_from_which_nothing_can_be_shuffled_is_refused(value):
    with pytest.raises(ValueError, match="SEMMOE_SHUFFLE_FROM must lie between 1 and 2147483648"):
        from_environment(PluginSettings, {"SEMMOE_SHUFFLE_FROM": value})


def test_a_server_shuffles_from_its_own_number_of_rows_or_the_plan_s():
    plan = replace(vanilla_plan(make_fingerprint(), Topology(ep_size=2)), shuffle_from=7)
    assert PluginSettings().served(plan) is plan
    given = from_environment(PluginSettings, {"SEMMOE_SHUFFLE_FROM": "33"})
    assert given.served(plan).shuffle_from == 33
    assert given.environment()["SEMMOE_SHUFFLE_FROM"] == "33"
