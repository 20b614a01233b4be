"""Algorithm 2 and the slices of Algorithm 3."""

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_fingerprint

from semmoe.core import PRIOR, PROFILED, Plan
from semmoe.evaluation.online import schedule_batch, schedule_requests, start
from semmoe.paper.policies import (
    PaperScheduler,
    PaperTable,
    PaperTables,
    Preference,
    assign_slices,
    look_up,
    path_key,
    slices_of,
)
from semmoe.placement.linear import place
from semmoe.requests.policy import PromptScores, RoundRobin
from semmoe.tokens.slices import ByPosition, position_slices
from semmoe.topology import Topology
from semmoe.traces.affinity import known_rows


def scheduler(scores) -> PaperScheduler:
    """The last row is the prior's."""
    scores = np.array(scores, np.float32)
    source = np.append(np.full(len(scores) - 1, PROFILED), PRIOR).astype(np.uint8)
    return PaperScheduler(PaperTable(request_scores=scores, request_source=source))


def test_a_request_goes_to_the_group_of_its_tokens_unless_that_was_used_this_round():
    requests = scheduler([[0.9, 0.1], [0.2, 0.8], [0.5, 0.5]])
    prompts = [[0, 0, 1], [0], [1, 1, 0], [1], [0], [1]]
    assert [requests.admit([np.array(prompt)])[0].group for prompt in prompts] == [0, 1, 1, 0, 0, 1]


@given(st.integers(0, 9999), st.integers(2, 5))
def test_scheduling_agrees_with_loops_and_each_round_uses_every_group_once(seed, groups):
    rng = np.random.default_rng(seed)
    scores = rng.random((7, groups)).astype(np.float32)
    prompts = [rng.integers(-2, 9, size=rng.integers(6)) for _ in range(3 * groups + 1)]
    requests = scheduler(scores)
    assigned = [requests.admit([prompt])[0].group for prompt in prompts]
    assert assigned == oracles.algorithm_2(scores, prompts)
    for first in range(0, 3 * groups, groups):
        assert sorted(assigned[first : first + groups]) == list(range(groups))


def test_ids_outside_the_vocabulary_are_served_by_the_prior_and_counted():
    requests = scheduler([[0.9, 0.1], [0.9, 0.1], [0.3, 0.7]])
    assert requests.admit([np.array([0, 2, -1, 999_999])])[0].group == 1
    assert requests.unknown_tokens == 3
    assert requests.admit([np.array([1])])[0].group == 0
    assert requests.unknown_tokens == 3


def test_tokens_that_were_not_profiled_are_counted():
    scores = np.array([[1, 0], [0, 1], [0.5, 0.5]], np.float32)
    source = np.array([PROFILED, PRIOR, PRIOR], np.uint8)
    requests = PaperScheduler(PaperTable(request_scores=scores, request_source=source))
    requests.admit([np.array([0, 1, 1])])
    assert requests.unknown_tokens == 2


def test_an_empty_prompt_takes_a_free_group():
    requests = scheduler([[0.9, 0.1], [0.3, 0.7]])
    assert [requests.admit([np.array([], np.int32)])[0].group for _ in range(4)] == [0, 1, 0, 1]


def map_plan(scores) -> Plan:
    """Requests of a mean length of 10 by a map; the last row serves unknown ids."""
    scores = np.array(scores, np.float32)
    (rows, groups), f = scores.shape, make_fingerprint(vocab_size=len(scores) - 1)
    zeros = np.zeros(groups, np.float32)
    table = PromptScores(token_scores=scores, token_weights=np.ones(rows, np.float32), bias=zeros, prices=zeros,
                       score_spread=0.0, mean_length=10.0)  # fmt: skip
    return Plan(
        topology=Topology(ep_size=groups, dp_size=groups), fingerprint=f, method="test",
        placement=place(f.num_layers, f.num_experts, groups), tokens=ByPosition(), requests=table,
    )  # fmt: skip


def test_a_batch_is_even_in_prompt_and_decode_tokens_together():
    """Requests of 30 + 10 and twice 10 + 10 tokens to two groups, of which all prefer the first: 40 each."""
    prompts = [[0] * 30, [0] * 10, [0] * 10]
    groups = schedule_batch(prompts, map_plan([[1, 0], [0, 0]]), new_tokens=10)
    assert groups.tolist() == [0, 1, 1]


@pytest.mark.parametrize(("unfinished", "expected"), [(0, [0, 1, 1]), (1, [0, 1, 0, 1, 0]), (9, [0, 1, 0, 1, 0, 1])])
def test_a_length_is_told_once_more_than_so_many_requests_have_arrived_after_it(unfinished, expected):
    """To the least loaded of two groups, by 10 tokens for a request that is not told and by 30 for one that is.

    With 0 unfinished the third request finds (30, 10), with 1 the fourth finds (30 + 10, 10), the fifth (40, 40).
    """
    prompts, lengths = [[0]] * len(expected), np.full(len(expected), 30)
    assert schedule_requests(prompts, map_plan([[0, 0]] * 2), lengths, unfinished=unfinished).tolist() == expected


def test_lengths_are_told_at_once_by_default_and_never_if_they_are_not_given():
    plan, prompts = map_plan([[0, 0]] * 2), [[0]] * 3
    assert schedule_requests(prompts, plan, np.full(3, 30)).tolist() == [0, 1, 1]
    assert schedule_requests(prompts, plan).tolist() == [0, 1, 0]


def test_known_rows_sends_strangers_to_the_last_row():
    assert known_rows(np.array([0, 3, 4, -1, 1 << 30]), 5).tolist() == [0, 3, 4, 4, 4]


def preference(first, confidence, second=None, second_confidence=None) -> Preference:
    tokens = len(first)
    return Preference(
        np.array(first, np.int16),
        np.array(confidence, np.float32),
        np.array([-1] * tokens if second is None else second, np.int16),
        np.array([0] * tokens if second_confidence is None else second_confidence, np.float32),
    )


def test_a_full_slice_keeps_its_most_confident_tokens():
    assert assign_slices(preference([0, 0, 0, 1], [0.9, 0.5, 0.7, 0.6]), 2).tolist() == [0, 1, 0, 1]


def test_overflow_goes_to_the_second_choice_before_any_free_slot():
    wishes = preference([0, 0, 0, 0, 0, 0], [0.9, 0.8, 0.5, 0.4, 0.3, 0.2], [1, 1, 2, 2, 1, 2], [0.1] * 6)
    assert assign_slices(wishes, 3).tolist() == [0, 0, 2, 2, 1, 1]


def wishes_strategy():
    share = st.integers(0, 8).map(lambda eighths: eighths / 8)
    slices = st.shared(st.integers(1, 5), key="slices")
    wish = slices.flatmap(lambda s: st.tuples(st.integers(0, s - 1), share, st.integers(-1, s - 1), share))
    return st.tuples(slices, slices.flatmap(lambda _: st.lists(wish, max_size=25)))


@given(wishes_strategy())
def test_slices_agree_with_loops_and_never_exceed_their_size(case):
    slices, wishes = case
    columns = [list(column) for column in zip(*wishes, strict=True)] or [[], [], [], []]
    assigned = assign_slices(preference(*columns), slices).tolist()
    assert assigned == oracles.assign_slices(wishes, slices)
    assert all(0 <= s < slices for s in assigned)
    assert all(assigned.count(s) <= -(-len(wishes) // slices) for s in range(slices))


@given(wishes_strategy())
def test_tokens_whose_slice_has_room_keep_their_first_choice(case):
    slices, wishes = case
    if not wishes:
        return
    columns = [list(column) for column in zip(*wishes, strict=True)]
    assigned = assign_slices(preference(*columns), slices)
    size = -(-len(wishes) // slices)
    for t, (first, confidence, _, _) in enumerate(wishes):
        before = sum(f == first and (-c, i) < (-confidence, t) for i, (f, c, _, _) in enumerate(wishes))
        if before < size:
            assert assigned[t] == first


def test_fewer_tokens_than_slices_and_none_at_all():
    assert assign_slices(preference([3, 3], [0.5, 0.9]), 4).tolist() == [0, 3]
    assert assign_slices(preference([], []), 4).tolist() == []
    assert position_slices(2, 4).tolist() == [0, 1]
    assert position_slices(0, 4).tolist() == []


@pytest.mark.parametrize(
    ("tokens", "slices", "expected"), [(6, 2, [0, 0, 0, 1, 1, 1]), (5, 2, [0, 0, 0, 1, 1]), (5, 4, [0, 0, 1, 1, 2])]
)
def test_slices_by_position_are_contiguous_and_equal_but_for_the_padding(tokens, slices, expected):
    assert position_slices(tokens, slices).tolist() == expected


def hand_tables() -> PaperTables:
    """Two layers, one group of two ranks, two token ids and the row for others; one layer of history."""
    return PaperTables(
        token_ranks=np.array([[[0, 1, 0]], [[1, 0, 1]]], np.int16),
        token_confidence=np.array([[[0.9, 0.6, 0.5]], [[0.8, 0.4, 0.5]]], np.float16),
        path_ranks=np.array([[[0, 0]], [[0, 1]]], np.int16),
        path_confidence=np.array([[[0, 0]], [[0.7, 0.9]]], np.float16),
        token_source=np.array([PROFILED, PROFILED, PRIOR], np.uint8),
        lookback=1,
    )


def test_look_up_takes_the_more_confident_table_and_keeps_the_other_as_second_choice():
    found = look_up(hand_tables(), 1, 0, np.array([0, 1, 0, 1]), np.array([[0], [0], [1], [1]]))
    assert found.first.tolist() == [1, 0, 1, 1]
    np.testing.assert_allclose(found.first_confidence, [0.8, 0.7, 0.9, 0.9], atol=1e-3)
    assert found.second.tolist() == [0, 0, 1, 0]
    np.testing.assert_allclose(found.second_confidence, [0.7, 0.4, 0.8, 0.4], atol=1e-3)


def test_look_up_without_history_has_no_second_choice():
    found = look_up(hand_tables(), 0, 0, np.array([0, 1, 7, -3]), None)
    assert found.first.tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(found.first_confidence, [0.9, 0.6, 0.5, 0.5], atol=1e-3)
    assert found.second.tolist() == [-1] * 4


@given(st.integers(0, 9999), st.sampled_from([(1, 2, 2), (2, 2, 1), (2, 3, 3)]))
def test_look_up_agrees_with_loops(seed, sizes):
    rng = np.random.default_rng(seed)
    groups, ranks, lookback = sizes
    paths = ranks**lookback
    tables = PaperTables(
        token_ranks=rng.integers(ranks, size=(4, groups, 6)).astype(np.int16),
        token_confidence=(rng.integers(5, size=(4, groups, 6)) / 4).astype(np.float16),
        path_ranks=rng.integers(ranks, size=(4, groups, paths)).astype(np.int16),
        path_confidence=(rng.integers(5, size=(4, groups, paths)) / 4).astype(np.float16),
        token_source=np.array([PROFILED] * 5 + [PRIOR], np.uint8),
        lookback=lookback,
    )
    assert slices_of(tables) == ranks
    group, tokens = rng.integers(groups, size=15), rng.integers(-1, 7, size=15)
    history = rng.integers(-1, ranks, size=(15, lookback)) if rng.random() < 0.8 else None
    found = look_up(tables, 3, group, tokens, history)
    for t in range(15):
        devices = None if history is None else history[t].tolist()
        expected = oracles.look_up(tables, 3, group[t], tokens[t], devices)
        got = (found.first[t], found.first_confidence[t], found.second[t], found.second_confidence[t])
        assert got == pytest.approx(expected)


def test_path_keys_number_every_sequence_once():
    history = np.array([[a, b] for b in range(3) for a in range(3)], np.int16)
    assert path_key(history, 3).tolist() == list(range(9))


def test_no_device_reads_as_device_0_in_a_path():
    history = np.array([[-1, 2], [2, -1], [-1, -1]], np.int16)
    assert path_key(history, 3).tolist() == path_key(np.maximum(history, 0), 3).tolist() == [6, 2, 0]


@given(st.integers(1, 5), st.integers(0, 20))
def test_round_robin_takes_one_group_after_the_other(groups, requests):
    scheduler = start(RoundRobin(num_groups=groups))
    found = [scheduler.admit([[1, 2, 3]])[0] for _ in range(requests)]
    assert [one.group for one in found] == [r % groups for r in range(requests)]
    assert [one.request for one in found] == list(range(requests))


def policies(groups=2):
    zeros = np.zeros(groups, np.float32)
    scores = PromptScores(
        token_scores=np.arange(9 * groups, dtype=np.float32).reshape(9, groups), token_weights=np.ones(9, np.float32),
        bias=zeros, prices=np.arange(groups, dtype=np.float32), score_spread=0.0, mean_length=10.0,
    )  # fmt: skip
    table = PaperTable(
        request_scores=np.eye(9, groups, dtype=np.float32), request_source=np.full(9, PROFILED, np.uint8)
    )
    return {policy.kind: policy for policy in (RoundRobin(num_groups=groups), scores, table)}


@pytest.mark.parametrize("kind", policies())
def test_a_scheduler_that_follows_another_goes_on_with_its_numbers_and_work(kind):
    before, after = start(policies()[kind]), start(policies()[kind])
    handles = [before.admit([[1, 2]], [5.0])[0] for _ in range(3)]
    after.follow(before)
    assert after.admit([[1, 2]], [5.0])[0].request == after.arrivals - 1 == 3
    np.testing.assert_array_equal(after.work.sum(), before.work.sum() + 5.0 * after.keeps_ledger)
    for handle in handles:
        after.finish(handle, 0.0)
    assert after.work.sum() == 5.0 * after.keeps_ledger
