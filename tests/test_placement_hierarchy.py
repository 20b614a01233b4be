"""Placement over several nodes: nodes first, then ranks, gate groups, costs by phase."""

from dataclasses import replace
from itertools import product

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, planted_trace, random_trace, with_noise, with_prefill

from semmoe.core import Placement
from semmoe.costs.rows import KINDS, kind_costs, mean_costs, near_and_far, plain_costs
from semmoe.evaluation.replay import replay
from semmoe.placement import cocluster, hierarchy, ours
from semmoe.placement.cocluster import Sample
from semmoe.placement.joint import pairs_between, seat_groups
from semmoe.placement.layers import LayerProblem, LayerSearch
from semmoe.placement.loads import total_cost
from semmoe.placement.problem import Problem, Tokens, default_costs, weighed_tokens
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

TWO = Topology(ep_size=4, dp_size=4, num_nodes=2)
QUICK = CoclusterSettings(starts=2, kept=1, rounds=2, batch_tokens=64, load_limit=None)


def quick(**changes):
    names = {"groups", "activation", "remote_node", "load_limit"} & changes.keys()
    cocluster = replace(QUICK, **{name: changes.pop(name) for name in names})
    return SolveSettings(cocluster=cocluster, **changes)


def node_rows(result, topology) -> float:
    """Rows between nodes, one per rank reached, per token and layer."""
    node, total = topology.node_of, result.total
    return total.rows[node[:, None] != node].sum() / total.tokens


@pytest.mark.parametrize(
    ("topology", "groups"),
    [
        (Topology(ep_size=16, dp_size=16, num_nodes=4), 4),
        (Topology(ep_size=16, dp_size=8, num_nodes=4), 4),
        (Topology(ep_size=16, dp_size=2, num_nodes=4), 2),
        (Topology(ep_size=16, num_nodes=4), 1),
        (Topology(ep_size=12, dp_size=4, num_nodes=3), 1),  # groups across the borders of nodes
    ],
)
def test_nodes_as_ranks(topology, groups):
    nodes = topology.num_nodes
    assert hierarchy.node_topology(topology) == Topology(ep_size=nodes, dp_size=groups, num_nodes=nodes)


@pytest.mark.parametrize("topology", [Topology(ep_size=4), Topology(ep_size=4, num_nodes=4)])
def test_no_search_over_nodes_where_there_is_one_or_each_is_a_rank(topology):
    assert hierarchy.node_topology(topology) is None


def test_what_another_node_costs_by_hand():
    topology = Topology(ep_size=4, num_nodes=2)
    nodes = hierarchy.node_topology(topology)
    plain = hierarchy.node_costs((plain_costs(topology, 1.0, 2.0, 3.0),), topology, nodes)
    assert plain.rank.tolist() == [[0, 3], [3, 0]]
    assert not plain.pair.any()
    links = np.where(topology.node_of[:, None] == topology.node_of, 1.0, 5.0)
    pairs = hierarchy.node_costs((kind_costs("per-pair", topology, links),), topology, nodes)
    assert pairs.pair.tolist() == [[0, 4], [4, 0]]
    assert not pairs.rank.any()


@given(seed=st.integers(0, 9999), copies=st.integers(0, 1))
def test_a_node_s_experts_are_divided_over_its_ranks(seed, copies):
    rng = np.random.default_rng(seed)
    own = rng.permutation(12).reshape(3, 4)
    slots = np.concatenate([own, own[[1, 2, 0], : 4 * copies]], axis=1)
    primary = np.empty(12, np.int64)
    primary[own] = np.arange(3)[:, None]
    out, first = hierarchy.divide_nodes(slots, primary, rng.random((12, 12)), rng.random((12, 6)), rng)
    assert out.shape == (6, 2 + 2 * copies)
    for m in range(3):
        assert sorted(out[2 * m : 2 * m + 2].ravel()) == sorted(slots[m])
    assert (first // 2 == primary).all()
    assert all(e in out[g] for e, g in enumerate(first))


def test_groups_that_are_used_together_go_to_one_node_by_hand():
    together = np.zeros((8, 8))
    together[:2, 4:6] = together[4:6, :2] = 5  # gate groups 0 and 2
    together[2:4, 6:] = together[6:, 2:4] = 4  # 1 and 3
    at_node = np.zeros((8, 2))
    at_node[:2, 1] = 3
    found = hierarchy.pack_groups(together, at_node, 4, np.random.default_rng(0))
    assert found.tolist() == [1, 1, 0, 0, 1, 1, 0, 0]


@pytest.mark.parametrize("topology", [TWO, Topology(ep_size=4, dp_size=2, num_nodes=2)])
def test_planted_structure_is_found_over_nodes(topology):
    trace, _ = planted_trace(topology.dp_size, topology.attn_tp_size, length=40)
    renamed = np.stack([np.random.default_rng(l).permutation(16) for l in range(3)])
    trace = replace(trace, expert_ids=renamed[np.arange(3)[:, None], trace.expert_ids].astype(np.uint8))
    result = replay(trace, solve(trace, topology, quick()), ReplaySettings(batch_tokens=40, batches="prefill"))
    assert result.total.lar == 1.0
    assert node_rows(result, topology) == 0.0


def test_a_plan_for_nodes_sends_fewer_rows_between_them_than_one_that_knows_none():
    """A token's two experts are on two ranks in any case, and always the same two ranks' worth of experts."""
    rng = np.random.default_rng(0)
    order = np.stack([rng.permutation(16) for _ in range(3)])
    block = rng.integers(4, size=1600)
    near = np.where(rng.random((1600, 3)) < 0.7, block[:, None], rng.integers(4, size=(1600, 3)))
    first, second = near * 4 + rng.integers(4, size=(1600, 3)), (near ^ 1) * 4 + rng.integers(4, size=(1600, 3))
    ids = order[np.arange(3)[:, None], np.stack([first, second], axis=2)]
    requests = block.reshape(40, 40)
    trace = make_trace(requests.tolist(), ids, vocab_size=4, num_experts=16)
    topology, rows = Topology(ep_size=4, num_nodes=2), []
    for planned in (topology, Topology(ep_size=4)):
        plan = solve(trace, planned, quick(remote_node=4.0))
        result = replay(trace, replace(plan, topology=topology), ReplaySettings(batch_tokens=400))
        rows.append(node_rows(result, topology))
    assert rows[0] < 0.8 * rows[1]


@pytest.mark.parametrize("kind", KINDS)
@given(seed=st.integers(0, 9999))
def test_the_costs_of_tokens_by_loops(kind, seed):
    rng = np.random.default_rng(seed)
    costs = kind_costs(kind, TWO, rng.integers(1, 9, (4, 4)) / 2.0)
    slots, primary = rng.permutation(8).reshape(4, 2), np.empty(8, np.int64)
    primary[slots] = np.arange(4)[:, None]
    experts = np.stack([rng.permutation(8)[:3] for _ in range(20)])
    home = rng.integers(4, size=20)
    tokens = [(row.tolist(), 1.0, int(h), 0) for row, h in zip(experts, home, strict=True)]
    expected = 20 * oracles.layout_cost(slots, primary.tolist(), tokens, TWO, (costs,))[0]
    assert total_cost(costs, primary[experts], home, TWO.node_of) == pytest.approx(expected)


def test_costs_of_both_phases_are_averaged_by_their_tokens():
    prefill, decode = plain_costs(TWO, 1.0, 1.0, 1.0), plain_costs(TWO, 1.0, 5.0, 1.0)
    assert mean_costs((prefill, decode), np.array([0, 1, 1, 1])).rank[0, 1] == 4.0
    assert mean_costs((decode, decode), np.array([0, 1])) is decode


def test_each_phase_is_charged_its_own_costs():
    """Half of the tokens use experts 0 and 1 or 2 and 3, half 0 and 2 or 1 and 3: one half can be kept together."""
    ids = np.array([[0, 1], [2, 3], [0, 2], [1, 3]] * 50)[:, None]
    trace = make_trace([[i % 4 for i in range(200)]], ids, vocab_size=4, num_experts=4)
    trace = replace(trace, phase=(np.arange(200) % 4 < 2).astype(np.uint8))  # 1: decode, the first kind
    topology = Topology(ep_size=2)
    dear, free = plain_costs(topology, 1.0, 1.0, 0.0), plain_costs(topology, 0.0, 0.0, 0.0)
    for costs, together in (((free, dear), [0, 1]), ((dear, free), [0, 2])):
        tokens = Tokens(ids[:, 0], np.zeros(200, np.int64), trace.request_of_token(), trace.phase)
        problem = LayerProblem(tokens=tokens, topology=topology, settings=QUICK, costs=costs, num_experts=4)
        (found,) = LayerSearch(problem).rough([0.0])
        assert together in [sorted(rank) for rank in found.slots.tolist()]
        plan = solve(trace, topology, quick(), costs=costs)
        assert together in [sorted(rank) for rank in plan.placement.physical_to_logical_map.reshape(2, 2).tolist()]
    for phase, together in (("decode", [0, 1]), ("prefill", [0, 2])):
        plan = solve(trace, topology, quick(phase=phase))
        assert together in [sorted(rank) for rank in plan.placement.physical_to_logical_map.reshape(2, 2).tolist()]
        assert plan.settings["phase"] == phase


def test_a_phase_without_tokens_is_refused():
    trace = random_trace(0)
    with pytest.raises(ValueError, match="phase is prefill, of which the trace has no token"):
        solve(trace, Topology(ep_size=4), quick(phase="prefill"))
    weighed = weighed_tokens(with_prefill(trace, 5), "prefill")
    assert weighed.sum() == 5
    assert weighed_tokens(trace, "both").all()


def test_groups_that_use_each_other_s_experts_are_seated_on_one_node_by_hand():
    """Requests of group 0 use the experts of groups 0 and 2, those of 1 the experts of 1 and 3, and back."""
    rates = np.zeros((4, 1, 4), np.float32)
    rates[np.arange(4), 0, np.arange(4)], rates[np.arange(4), 0, [2, 3, 0, 1]] = 2, 1
    costs = 1.0 + 4 * (np.arange(4)[:, None] // 2 != np.arange(4) // 2)
    seats = seat_groups(pairs_between(rates, np.ones(4), np.arange(4)[None], np.arange(4), 4), costs)
    assert sorted(seats) == [0, 1, 2, 3]
    assert seats[0] // 2 == seats[2] // 2
    assert seats[1] // 2 == seats[3] // 2


def test_the_group_that_keeps_most_to_itself_is_seated_behind_the_slow_link_by_hand():
    """Group 1 uses none of the others' experts, and none of them its own."""
    rates = np.zeros((4, 1, 4), np.float32)
    rates[np.arange(4), 0, np.arange(4)] = 2
    rates[[0, 2, 3], 0, [2, 3, 0]] = 1
    costs = np.ones((4, 4))
    costs[3], costs[:, 3] = 4.0, 4.0
    seats = seat_groups(pairs_between(rates, np.ones(4), np.arange(4)[None], np.arange(4), 4), costs)
    assert sorted(seats) == [0, 1, 2, 3]
    assert seats[1] == 3


@pytest.mark.parametrize("slow", range(4))
@pytest.mark.parametrize("redundant", [0, 4])
def test_the_requests_that_send_least_are_behind_the_slow_link(slow, redundant):
    """Those of one group of four keep to their own experts, half of the others' tokens stray."""
    trace, blocks = planted_trace(groups=4, ranks=1)
    calm = trace.request_of_token() % 4 == 0
    strayed = with_noise(trace, 0.5).expert_ids
    trace = replace(trace, expert_ids=np.where(calm[:, None, None], trace.expert_ids, strayed))
    topology, relative = Topology(ep_size=4, dp_size=4, num_nodes=4), np.ones((4, 4))
    relative[slow] = relative[:, slow] = 4.0
    costs = kind_costs("per-rank", topology, relative)
    plan = solve(trace, topology, quick(redundant_experts=redundant), costs=(costs, costs))
    for layer, hosts in enumerate(plan.placement.hosts):  # (G, E)
        assert hosts[slow, blocks[layer] == 0].all()


def test_an_expert_on_the_same_node_is_worth_what_it_saves_by_hand():
    """Another node costs 1 for a pair, 1 for a rank, 2 for the node; another rank of the node the first two."""
    slots = np.array([[[0, 1], [2, 3], [4, 5], [6, 7]]])
    slots = slots.reshape(1, -1).astype(np.int32)
    placement = Placement(physical_to_logical_map=slots, num_experts=8, ep_size=4)
    plain = plain_costs(TWO, 1.0, 1.0, 2.0)
    worth = ours._worth(placement, TWO, (plain, plain))
    assert worth.shape == (1, 8, 4)
    assert worth[0, :, 0].tolist() == [1, 1, 0.5, 0.5, 0, 0, 0, 0]
    alone = Topology(ep_size=4, dp_size=4)
    even = plain_costs(alone, 1.0, 1.0, 2.0)
    assert ours._worth(placement, alone, (even, even))[0, :, 3].tolist() == [0, 0, 0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize(("dp_size", "num_nodes"), [(8, 2), (8, 4), (4, 2), (8, 8), (8, 1)])
def test_what_an_expert_is_worth_in_each_group_by_loops(dp_size, num_nodes):
    """1 on a rank of the group, a half on another rank of its node, which saves half of a pair's cost, else 0."""
    topology = Topology(ep_size=8, dp_size=dp_size, num_nodes=num_nodes)
    rows = np.random.default_rng(0).permutation(16)
    slots = np.append(rows, rows[[3, 9, 14, 1, 6, 2, 12, 7]]).reshape(3, 8).T.reshape(1, -1)
    placement = Placement(physical_to_logical_map=slots.astype(np.int32), num_experts=16, ep_size=8)
    plain = plain_costs(topology, 1.0, 1.0, 2.0)
    worth, node_of = ours._worth(placement, topology, (plain, plain)), topology.node_of
    assert worth.shape == (1, 16, dp_size)
    for expert, group in product(range(16), range(dp_size)):
        hosts = np.flatnonzero(placement.hosts[0, :, expert])
        ranks = range(group * topology.attn_tp_size, (group + 1) * topology.attn_tp_size)
        near = {node_of[rank] for rank in ranks} & {node_of[rank] for rank in hosts} and 1 < num_nodes < dp_size
        assert worth[0, expert, group] == (1 if set(ranks) & set(hosts) else 0.5 if near else 0)


def test_blocks_are_as_few_as_nodes_have_room_for():
    assert hierarchy.count_blocks(256, 8, 8, 64) == 4
    assert hierarchy.count_blocks(256, 8, 8, 128) == 2
    assert hierarchy.count_blocks(256, 8, 8, 63) is None  # a node has room for its own group alone
    assert hierarchy.count_blocks(256, 8, 18, 128) == 2  # 8 groups do not divide over 18 nodes, 2 blocks do
    assert hierarchy.count_blocks(256, 8, 8, 257) is None  # every node has room for all and more


@pytest.mark.parametrize("rng", [None, np.random.default_rng(0)])
def test_copies_of_whole_groups_put_blocks_of_groups_on_neighbouring_nodes(rng):
    """4 groups of 2 experts on 4 nodes of 2 ranks with 3 places: 2 blocks on 2 nodes each, and two experts more."""
    together = np.eye(8)
    together[0, 7] = together[7, 0] = 5  # of group 3, used with expert 0
    together[0, 6] = together[6, 0] = 4
    slots, primary = hierarchy.copy_groups(np.repeat([0, 1], 4), together, np.zeros((8, 8)), 4, 6, rng)
    assert sorted(slots[:2].ravel().tolist()) == [0, 1, 2, 3, 6, 7]
    assert (slots[:2] == slots[2:4]).all()
    assert (slots[4:6] == slots[6:]).all()
    assert set(slots[4:].ravel()) >= {4, 5, 6, 7}
    node = primary // 2
    assert node[:, :4].tolist() == [[0] * 4] * 2 + [[1] * 4] * 2 + [[0] * 4] * 2 + [[1] * 4] * 2
    assert node[:, 4:].tolist() == [[2] * 4] * 2 + [[3] * 4] * 2 + [[2] * 4] * 2 + [[3] * 4] * 2
    assert all(e in slots[rank] for row in primary for e, rank in enumerate(row))


def test_ranks_of_whole_groups_have_equal_loads_by_hand():
    together = np.diag([6.0, 3.0, 2.0, 1.0])
    slots, _ = hierarchy.copy_groups(np.zeros(4, np.int64), together, np.zeros((4, 4)), 2, 4, None)
    assert [sorted(row) for row in slots.tolist()] == [[0, 3], [1, 2]] * 2


def test_copies_of_hot_experts_go_to_nodes_by_affinity_by_hand():
    """Experts 0 and 3 are hot, used with 1 and 2, and with 4 and 5: each has two copies, on two ranks of a node."""
    together = np.zeros((6, 6))
    for hot, others in ((0, (1, 2)), (3, (4, 5))):
        together[hot, others] = together[others, hot] = 10
    slots = hierarchy.copy_hot(together, np.zeros((6, 4)), 2, 4, np.random.default_rng(0), None)
    assert sorted(map(sorted, slots.tolist())) == [[0, 1], [0, 2], [3, 4], [3, 5]]
    assert [min(slots[:2].ravel()) // 3, min(slots[2:].ravel()) // 3] in ([0, 1], [1, 0])
    node = np.array([1, 1, 0, 0, 1, 0])  # expert 0 with 1 and 4, which is used little; 3 with 2 and 5
    slots = hierarchy.copy_hot(together, np.zeros((6, 4)), 2, 4, np.random.default_rng(0), node)
    assert sorted(map(sorted, slots[:2].tolist())) == [[2, 3], [3, 5]]
    assert sorted(map(sorted, slots[2:].tolist())) == [[0, 1], [0, 4]]


@given(seed=st.integers(0, 9999), nodes=st.sampled_from([2, 4]), places=st.sampled_from([4, 8, 12]))
def test_copies_of_hot_experts_leave_no_expert_out_and_no_rank_has_one_twice(seed, nodes, places):
    """Whether experts stay on given nodes or not."""
    rng = np.random.default_rng(seed)
    together = rng.exponential(size=(8, 8)) * rng.exponential(size=8) ** 4
    together += together.T
    np.fill_diagonal(together, 0)
    for node in (None, rng.permutation(np.arange(8) % nodes)):
        slots = hierarchy.copy_hot(together, rng.random((8, 2 * nodes)), nodes, places, rng, node)
        assert slots.shape == (2 * nodes, places // 2)
        assert set(slots.ravel()) == set(range(8))
        assert all(len(set(rank)) == len(rank) for rank in slots.tolist())


def groups_trace():
    """Every token uses one expert of 4 in each of 2 groups of 4, at random."""
    rng, trace = np.random.default_rng(0), random_trace(0, requests=60, num_groups=4, experts=16)
    groups = np.argsort(rng.random((*trace.expert_ids.shape[:2], 4)), axis=2)[..., :2]
    ids = groups * 4 + rng.integers(4, size=groups.shape)
    return replace(trace, expert_ids=ids.astype(trace.expert_ids.dtype))


def test_a_token_finds_its_groups_of_one_block_on_one_node():
    """With blocks on two nodes of four each, a token is sent to one other node at most, whatever levels the load."""
    trace, topology = groups_trace(), Topology(ep_size=8, dp_size=8, num_nodes=4)
    request, settings = trace.request_of_token(), replace(QUICK, load_limit=1.0)
    group, costs = request % 8, default_costs(topology, QUICK)
    tokens = Tokens(trace.expert_ids[:, 0], group, request, trace.phase)
    sample = Sample(tokens, np.ones(trace.num_tokens, bool), None)
    problem = LayerProblem(
        tokens=tokens,
        topology=topology,
        settings=settings,
        costs=costs,
        num_experts=16,
        num_groups=4,
        redundant=16,
    )
    found = LayerSearch(problem).unsearched()[2:]  # the first are of hot experts
    for layout in found:
        measured = cocluster._measure(layout, sample, topology, settings, costs, 20.0)
        node = measured.preferred[group[:, None], trace.expert_ids[:, 0]] // 2
        own = (group // 2)[:, None]
        assert max(len(set(row) - set(home)) for row, home in zip(node.tolist(), own.tolist(), strict=True)) == 1
    assert len(found) == 2


def test_a_plan_to_begin_from_keeps_its_copies_of_whole_groups():
    """To the search, which has one copy used by all, they look like load; so the plan is measured as it is too."""
    trace, topology = groups_trace(), Topology(ep_size=8, dp_size=8, num_nodes=4)
    chosen = quick(redundant_experts=16, load_limit=3.0, activation=1.0)  # which binds nowhere, so that rows decide
    old = solve(trace, topology, chosen)
    new = solve(trace, topology, chosen, previous=old)
    rows = [replay(trace, plan).total.node_rows.sum() for plan in (old, new)]
    assert rows[1] <= rows[0]


def test_what_a_pair_costs_near_and_far_by_hand():
    assert near_and_far((plain_costs(TWO, 1.0, 2.0, 3.0),), TWO) == (3, 6)
    links = np.where(TWO.node_of[:, None] == TWO.node_of, 1.0, 5.0)
    assert near_and_far((kind_costs("per-pair", TWO, links, activation=1.0),), TWO) == (2, 6)
    for alone in (Topology(ep_size=4), Topology(ep_size=4, num_nodes=4)):
        near, far = near_and_far((plain_costs(alone, 1.0, 2.0, 0.0),), alone)
        assert (near, far) == (3, 3)
    assert near_and_far((plain_costs(Topology(ep_size=1), 1.0, 2.0, 0.0),), Topology(ep_size=1)) == (0, 0)


def test_the_load_limit_holds_where_rows_between_nodes_are_dear():
    """Most tokens use two of four experts: one node for these saves rows, but would compute most pairs."""
    rng, trace = np.random.default_rng(0), random_trace(0, requests=60)
    pairs = np.argsort(rng.random((*trace.expert_ids.shape[:2], 4)), axis=2)[..., :2]
    pairs += 4 * (rng.random(pairs.shape[:2]) < 0.25)[..., None]
    trace = replace(trace, expert_ids=pairs.astype(trace.expert_ids.dtype))
    links = kind_costs("per-rank", TWO, np.where(TWO.node_of[:, None] == TWO.node_of, 1.0, 20.0))
    plan = solve(trace, TWO, quick(load_limit=1.2), costs=(links, links))
    assert replay(trace, plan, ReplaySettings(batch_tokens=64)).load_max_over_mean.mean() < 1.3


@pytest.mark.parametrize("remote_rank", [0.1, 1.0, 64.0])
def test_the_load_limit_holds_whatever_a_row_costs(remote_rank):
    """The same on one node: the price of load follows the costs, else expensive rows outweigh any load."""
    rng, trace = np.random.default_rng(0), random_trace(0, requests=60)
    pairs = np.argsort(rng.random((*trace.expert_ids.shape[:2], 4)), axis=2)[..., :2]
    pairs += 4 * (rng.random(pairs.shape[:2]) < 0.25)[..., None]
    trace, settings = replace(trace, expert_ids=pairs.astype(trace.expert_ids.dtype)), quick(load_limit=1.2)
    changed = replace(settings, cocluster=replace(settings.cocluster, remote_rank=remote_rank))
    plan = solve(trace, Topology(ep_size=4, dp_size=4), changed)
    assert replay(trace, plan, ReplaySettings(batch_tokens=64)).load_max_over_mean.mean() < 1.3


def test_a_load_limit_that_all_rough_layouts_meet_is_used():
    """Tokens of one theme in half of all cases: on its own node it saves rows between nodes, at more load."""
    rng, trace = np.random.default_rng(0), random_trace(0, requests=60, experts=32)
    topology = Topology(ep_size=8, dp_size=8, num_nodes=4)
    theme = rng.choice(4, size=trace.expert_ids.shape[:2], p=(0.5, 0.25, 0.125, 0.125))
    popular = np.arange(1, 33)[rng.permutation(32)] ** -0.3
    weight = np.where(np.arange(32) // 8 == theme[..., None], 8, 1) * popular
    ids = np.argsort(-np.log(weight) - rng.gumbel(size=weight.shape), axis=2)[..., : trace.expert_ids.shape[2]]
    trace = replace(trace, expert_ids=ids.astype(trace.expert_ids.dtype))
    links = kind_costs("per-rank", topology, np.where(topology.node_of[:, None] == topology.node_of, 1.0, 20.0))
    rows, loads = {}, {}
    for limit in (1.3, 1.6, None):
        plan = solve(trace, topology, quick(load_limit=limit), costs=(links, links))
        found = replay(trace, plan, ReplaySettings(batch_tokens=64))
        rows[limit], loads[limit] = node_rows(found, topology), found.load_max_over_mean.mean()
    assert loads[1.3] < loads[1.6] < min(loads[None], 1.6)
    assert rows[1.6] < 1.02 * rows[None] < rows[1.3]


@pytest.mark.parametrize(("topology", "redundant"), [(TWO, 8), (TWO, 0), (Topology(ep_size=4, dp_size=4), 8)])
def test_layouts_over_nodes_with_copies_are_measured_on_requests_that_no_search_has_seen(topology, redundant):
    trace = random_trace(0, requests=60)
    group, request = np.zeros(60, np.int64), trace.request_of_token()
    settings = SolveSettings(redundant_experts=redundant, cocluster=QUICK)
    found = cocluster._Layers(Problem(trace=trace, topology=topology, settings=settings), None, group)
    searched = set(request[found.weighed].tolist())
    charged = set(found.part.request_of_token()[found.rows][found.charged].tolist())  # all requests are in the part
    assert found.part.num_requests == 60
    if topology is TWO and redundant:
        assert charged
        assert searched.isdisjoint(charged)
        assert len(searched) > 2 * len(charged)
        return
    assert searched == charged
