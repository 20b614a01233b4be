"""The tables that the online side looks up."""

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace

from semmoe.core import NEIGHBOUR, PRIOR, PROFILED, Placement
from semmoe.paper import coclustering
from semmoe.paper.coclustering import CoClustering
from semmoe.paper.policies import device_of_expert, token_devices
from semmoe.paper.tables import build_policies
from semmoe.placement import linear
from semmoe.settings import PaperSettings
from semmoe.topology import Topology

TP2 = Topology(ep_size=2)
SETTINGS = PaperSettings(steps=2, swaps_per_expert=10)


def hand_trace():
    """Tokens 0 and 1, twice each, one expert of two a layer: 0 and 1 at layer 0; 0, 1 and 1, 1 at layer 1."""
    experts = [[[0], [0]], [[0], [1]], [[1], [1]], [[1], [1]]]
    return make_trace([[0, 0], [1, 1]], experts, num_experts=2, vocab_size=3)


def hand_clusters(labels) -> CoClustering:
    return CoClustering(placement=linear.place(2, 2, 2), token_ranks=np.array(labels, np.int16)[:, None])


def hand_tables():
    return build_policies(hand_trace(), hand_clusters([[0, 1, -1], [0, 1, -1]]), TP2, lookback=1)[0]


def test_token_table_holds_the_labels_and_how_often_they_are_the_device():
    tables = hand_tables()
    assert tables.token_ranks[:, 0, :2].tolist() == [[0, 1], [0, 1]]
    expected = [[2.5 / 3, 2.5 / 3], [1.25 / 3, 2.75 / 3]]  # one pseudo-occurrence of the layer's shares
    np.testing.assert_allclose(tables.token_confidence[:, 0, :2], expected, atol=1e-3)


def test_tokens_that_were_not_profiled_get_the_layer_s_most_common_device():
    tables = hand_tables()
    assert tables.token_ranks[1, 0, 2:].tolist() == [1, 1]
    np.testing.assert_allclose(tables.token_confidence[:, 0, 2:], [[0.5, 0.5], [0.75, 0.75]], atol=1e-3)


def test_path_table_counts_what_follows_a_device():
    tables = hand_tables()
    assert tables.path_ranks.shape == (2, 1, 2)
    assert tables.path_ranks[1, 0, 1] == 1
    np.testing.assert_allclose(tables.path_confidence[1, 0], [1.75 / 3, 2.75 / 3], atol=1e-3)


def test_path_table_names_the_rank_that_its_confidence_belongs_to():
    tables = hand_tables()
    assert tables.path_ranks[1, 0, 0] == 1  # after device 0: one each, and the layer's prior prefers rank 1


def test_a_path_that_never_occurred_gets_the_layer_s_most_common_device():
    experts = [[[0], [1]], [[0], [1]]]
    trace = make_trace([[0], [1]], experts, num_experts=2, vocab_size=3)
    tables = build_policies(trace, hand_clusters([[0, 0, -1], [1, 1, -1]]), TP2, lookback=1)[0]
    assert tables.path_confidence[1, 0, 1] == 1
    assert tables.path_ranks[1, 0, 1] == 1


def test_path_keys_read_the_most_recent_layer_first():
    """The device of layer 2 repeats that of layer 0, and layer 1 is its opposite or not: only the order tells."""
    devices = [[0, 1, 0], [1, 0, 1], [0, 1, 0], [1, 0, 1]]
    trace = make_trace([[0, 1, 0, 1]], np.array(devices)[:, :, None], num_experts=2, vocab_size=2)
    placement = linear.place(3, 2, 2)
    clusters = CoClustering(placement=placement, token_ranks=np.zeros((3, 1, 2), np.int16))
    tables = build_policies(trace, clusters, TP2, lookback=2)[0]
    recent_one_then_zero, recent_zero_then_one = 1 + 2 * 0, 0 + 2 * 1
    assert tables.path_ranks[2, 0, [recent_one_then_zero, recent_zero_then_one]].tolist() == [0, 1]


def test_without_embeddings_unseen_tokens_are_the_prior_s():
    tokens, _ = build_policies(hand_trace(), hand_clusters([[0, 1, -1]] * 2), TP2)
    assert tokens.token_source.tolist() == [PROFILED, PROFILED, PRIOR, PRIOR]


def test_unseen_tokens_take_the_row_of_their_nearest_neighbour():
    embeddings = np.array([[0.0, 1.0], [1.0, 0.0], [3.0, 1.0]])
    tokens, _ = build_policies(hand_trace(), hand_clusters([[0, 1, -1]] * 2), TP2, 1, embeddings)
    tables = tokens
    assert tables.token_source.tolist() == [PROFILED, PROFILED, NEIGHBOUR, PRIOR]
    assert tables.token_ranks[:, 0, 2].tolist() == [1, 1]
    np.testing.assert_array_equal(tables.token_confidence[:, 0, 2], tables.token_confidence[:, 0, 1])
    np.testing.assert_allclose(tables.token_confidence[:, 0, 3], [0.5, 0.75], atol=1e-3)


def test_a_token_that_was_prompted_but_never_routed_is_the_prior_s():
    trace = make_trace([[0], [1]], np.zeros((2, 2, 1)), prompts=[[2], [2]], num_experts=2, vocab_size=3)
    tokens, _ = build_policies(trace, hand_clusters([[0, 1, -1]] * 2), TP2)
    assert tokens.token_source.tolist() == [PROFILED, PROFILED, PRIOR, PRIOR]


def test_a_token_that_was_routed_but_never_prompted_is_the_prior_s_to_the_scheduler():
    trace = make_trace([[2], [2]], np.zeros((2, 2, 1)), prompts=[[0], [1]], num_experts=2, vocab_size=3)
    clusters = CoClustering(placement=linear.place(2, 2, 2), request_groups=np.array([0, 1], np.int16))
    _, requests = build_policies(trace, clusters, Topology(ep_size=2, dp_size=2))
    assert requests.request_source.tolist() == [PROFILED, PROFILED, PRIOR, PRIOR]


def test_each_table_has_its_own_source():
    """Token 0 was prompted, token 1 routed, token 2 both, token 3 neither; 3 resembles 0 most and 1 next."""
    trace = make_trace([[1], [2]], [[[0]], [[2]]], prompts=[[0], [2]], num_experts=4, vocab_size=4)
    placement = linear.place(1, 4, 4)
    labels = np.full((1, 2, 4), -1, np.int16)
    clusters = CoClustering(placement=placement, token_ranks=labels, request_groups=np.array([0, 1], np.int16))
    topology = Topology(ep_size=4, dp_size=2)
    tokens, requests = build_policies(trace, clusters, topology, 1)
    assert requests.request_source.tolist() == [PROFILED, PRIOR, PROFILED, PRIOR, PRIOR]
    assert tokens.token_source.tolist() == [PRIOR, PROFILED, PROFILED, PRIOR, PRIOR]
    embeddings = np.array([[1.0, 0.0], [1.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    tokens, requests = build_policies(trace, clusters, topology, 1, embeddings)
    assert requests.request_source.tolist() == [PROFILED, NEIGHBOUR, PROFILED, NEIGHBOUR, PRIOR]
    assert tokens.token_source.tolist() == [NEIGHBOUR, PROFILED, PROFILED, NEIGHBOUR, PRIOR]
    scores, confidence = requests.request_scores, tokens.token_confidence[0]
    np.testing.assert_array_equal(scores[3], scores[0])
    np.testing.assert_array_equal(confidence[:, 3], confidence[:, 1])


@pytest.mark.parametrize("dp_size", [1, 2])
def test_embeddings_without_any_prompt_token_leave_requests_to_the_prior(dp_size):
    trace = make_trace([[0], [1]], np.zeros((2, 2, 1)), prompts=[[], []], num_experts=2, vocab_size=3)
    clusters = CoClustering(
        placement=linear.place(2, 2, 2),
        token_ranks=np.zeros((2, 1, 3), np.int16) if dp_size == 1 else None,
        request_groups=np.array([0, 1], np.int16) if dp_size == 2 else None,
    )
    tokens, requests = build_policies(trace, clusters, Topology(ep_size=2, dp_size=dp_size), 1, np.eye(3))
    if dp_size == 1:
        assert tokens.token_source.tolist() == [PROFILED, PROFILED, NEIGHBOUR, PRIOR]
    else:
        assert requests.request_source.tolist() == [PRIOR] * 4


def test_tokens_without_an_expert_in_their_group_are_not_counted():
    """Groups of ranks 0, 1 and 2, 3, an expert each; request 0 is of group 0, and so are not experts 2 and 3."""
    experts = [[[1], [2]], [[1], [1]], [[3], [0]], [[2], [2]]]
    trace = make_trace([[0, 0, 0], [1]], experts, num_experts=4, vocab_size=2)
    clusters = CoClustering(
        placement=linear.place(2, 4, 4), token_ranks=np.array([[[1, -1], [-1, 0]], [[0, -1], [-1, 0]]], np.int16),
        request_groups=np.array([0, 1], np.int16),
    )  # fmt: skip
    tables = build_policies(trace, clusters, Topology(ep_size=4, dp_size=2), lookback=1)[0]
    # layer 0, group 0: rank 1 twice, the third token nowhere; layer 1: rank 1, rank 0, the first token nowhere
    np.testing.assert_allclose(tables.token_confidence[:, 0, 0], [1, (1 + 0.5) / 3], atol=1e-3)
    # into layer 1: rank 1 to rank 1, and nowhere, read as rank 0, to rank 0
    assert tables.path_ranks[1, 0].tolist() == [0, 1]
    np.testing.assert_allclose(tables.path_confidence[1, 0], [1.5 / 2, 1.5 / 2], atol=1e-3)


def test_request_scores_are_the_shares_of_a_token_s_prompt_occurrences():
    trace = make_trace([[5], [5], [5]], np.zeros((3, 2, 2)), prompts=[[0, 0, 1], [0], [1, 1, 1, 1]])
    clusters = CoClustering(placement=linear.place(2, 4, 2), request_groups=np.array([0, 1, 1], np.int16))
    tokens, requests = build_policies(trace, clusters, Topology(ep_size=2, dp_size=2))
    scores = requests.request_scores
    np.testing.assert_allclose(scores[:2], [[2 / 3, 1 / 3], [1 / 5, 4 / 5]], atol=1e-3)
    np.testing.assert_allclose(scores[[2, 6]], [[3 / 8, 5 / 8]] * 2, rtol=1e-6)
    assert not tokens.by_tables


@pytest.mark.parametrize(("dp_size", "attn_tp_size"), [(1, 4), (2, 2), (4, 1)])
def test_tables_have_the_shapes_of_the_topology(dp_size, attn_tp_size):
    trace = random_trace(0)
    topology = Topology(ep_size=4, dp_size=dp_size)
    clusters = coclustering.cluster(trace, topology, SETTINGS, seed=0)
    tokens, requests = build_policies(trace, clusters, topology, lookback=2)
    assert requests.by_tables == (dp_size > 1)
    assert tokens.by_tables == (attn_tp_size > 1)
    if dp_size > 1:
        assert requests.request_source.shape == (21,)
        assert requests.request_scores.shape == (21, dp_size)
        np.testing.assert_allclose(requests.request_scores.sum(axis=1), 1, rtol=1e-5)
    if attn_tp_size > 1:
        tables = tokens
        assert tables.token_source.shape == (21,)
        assert tables.token_ranks.shape == tables.token_confidence.shape == (3, dp_size, 21)
        assert tables.path_ranks.shape == tables.path_confidence.shape == (3, dp_size, attn_tp_size**2)
        assert set(np.unique(tables.token_ranks)) <= set(range(attn_tp_size))
        assert set(np.unique(tables.path_ranks)) <= set(range(attn_tp_size))


@given(st.integers(0, 99), st.sampled_from([1, 2]))
def test_token_confidence_agrees_with_loops(seed, dp_size):
    trace = random_trace(seed, requests=8)
    topology = Topology(ep_size=4, dp_size=dp_size)
    clusters = coclustering.cluster(trace, topology, SETTINGS, seed=0)
    tables = build_policies(trace, clusters, topology, lookback=1)[0]
    group = clusters.request_groups[trace.request_of_token()] if dp_size > 1 else np.zeros(trace.num_tokens)
    for l in range(3):
        for d in range(dp_size):
            table = _device_counts(trace, clusters.placement, topology, l, d, np.flatnonzero(group == d))
            prior = table.sum(axis=0) / max(table.sum(), 1)
            for v in range(20):
                if clusters.token_ranks[l, d, v] >= 0:
                    rank = clusters.token_ranks[l, d, v]
                    assert tables.token_ranks[l, d, v] == rank
                    expected = (table[v, rank] + prior[rank]) / (table[v].sum() + 1)
                    assert tables.token_confidence[l, d, v] == pytest.approx(expected, abs=1e-3)


def _device_counts(trace, placement, topology, layer, group, rows):
    """(V, S) how often each token's device was each rank of the group."""
    S = topology.attn_tp_size
    ranks = [oracles.ranks_of_expert(placement, layer, e)[0] for e in range(placement.num_experts)]
    inside = [rank - group * S if rank // S == group else -1 for rank in ranks]
    counts = np.zeros((trace.fingerprint.vocab_size, S))
    for t in rows:
        device = oracles.majority_rank(trace.expert_ids[t, layer], inside)
        if device >= 0:
            counts[trace.token_ids[t], device] += 1
    return counts


@given(st.integers(0, 99), st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2)]))
def test_path_tables_agree_with_loops(seed, sizes):
    dp_size, lookback = sizes
    trace = random_trace(seed, requests=8)
    topology = Topology(ep_size=4, dp_size=dp_size)
    S = topology.attn_tp_size
    clusters = coclustering.cluster(trace, topology, SETTINGS, seed=0)
    tables = build_policies(trace, clusters, topology, lookback)[0]
    group = clusters.request_groups[trace.request_of_token()] if dp_size > 1 else np.zeros(trace.num_tokens, int)
    hosts = [[oracles.ranks_of_expert(clusters.placement, l, e)[0] for e in range(8)] for l in range(3)]
    for d in range(dp_size):
        inside = [[rank - d * S if rank // S == d else -1 for rank in row] for row in hosts]
        rows = np.flatnonzero(group == d)
        devices = [[oracles.majority_rank(trace.expert_ids[t, l], inside[l]) for l in range(3)] for t in rows]
        for l in range(lookback, 3):
            counts = np.zeros((S**lookback, S))
            for seen in devices:
                if seen[l] >= 0:
                    path = sum(max(seen[l - 1 - i], 0) * S**i for i in range(lookback))
                    counts[path, seen[l]] += 1
            mixed = counts + counts.sum(axis=0) / max(counts.sum(), 1)
            shares = mixed / np.maximum(mixed.sum(axis=1, keepdims=True), 1e-12)
            np.testing.assert_array_equal(tables.path_ranks[l, d], shares.argmax(axis=1))
            np.testing.assert_allclose(tables.path_confidence[l, d], shares.max(axis=1), atol=1e-3)


def test_devices_are_counted_inside_the_group():
    maps = np.array([[0, 1, 2, 3]], np.int32)
    placement = Placement(physical_to_logical_map=maps, num_experts=4, ep_size=4)
    topology = Topology(ep_size=4, dp_size=2)
    assert device_of_expert(placement, topology).tolist() == [[[0, 1, -1, -1], [-1, -1, 0, 1]]]
    experts = np.array([[[1, 2]], [[3, 0]], [[2, 3]]])
    assert token_devices(experts, placement, topology, 0).tolist() == [[1], [0], [-1]]
    assert token_devices(experts, placement, topology, 1).tolist() == [[0], [1], [0]]


def test_an_expert_with_several_copies_in_a_group_counts_for_the_lowest_rank():
    placement = Placement(physical_to_logical_map=np.array([[1, 0, 0, 2]], np.int32), num_experts=3, ep_size=4)
    assert device_of_expert(placement, Topology(ep_size=4)).tolist() == [[[1, 0, 3]]]


@pytest.mark.parametrize(("lookback", "message"), [(0, "at least 1"), (21, "lookback 21 over 2 ranks")])
def test_lookback_that_makes_no_table_is_refused(lookback, message):
    with pytest.raises(ValueError, match=message):
        build_policies(hand_trace(), hand_clusters([[0, 1, -1]] * 2), TP2, lookback)


def test_a_lookback_beyond_the_layers_leaves_the_path_tables_unused():
    tables = build_policies(hand_trace(), hand_clusters([[0, 1, -1]] * 2), TP2, lookback=5)[0]
    assert tables.path_ranks.shape == (2, 1, 32)
    assert not tables.path_confidence.any()


def test_embeddings_of_another_vocabulary_are_refused():
    with pytest.raises(ValueError, match="4 embeddings for a vocabulary of 3"):
        build_policies(hand_trace(), hand_clusters([[0, 1, -1]] * 2), TP2, 1, np.ones((4, 2)))


def test_tables_do_not_depend_on_the_order_of_requests():
    trace, clusters = hand_trace(), hand_clusters([[0, 1, -1]] * 2)
    swapped = trace.select(np.array([1, 0]))
    tables, other = (build_policies(each, clusters, TP2, 1)[0] for each in (trace, swapped))
    np.testing.assert_array_equal(tables.token_confidence, other.token_confidence)
    np.testing.assert_array_equal(tables.path_ranks, other.path_ranks)
