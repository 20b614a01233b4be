"""Scores are sums of table rows, histories are what was observed, and slices are equal and nearly the best."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from oracles import History
from synthetic import random_trace, with_prefill

from semmoe.tokens import slices as scores
from semmoe.tokens.kernels import FRACTION, RUNNING_LIMIT, RUNNING_PRIOR
from semmoe.tokens.slices import PathScores, assign, trace_history
from semmoe.traces.affinity import known_rows

LAYERS, EXPERTS, TOP_K, VOCABULARY, RANKS = 3, 8, 2, 20, 4


def random_tables(seed, lookback=2, ordered=1, ranks=RANKS) -> PathScores:
    """Tables of the shapes of `random_trace`, half of whose tokens share the last row."""
    rng = np.random.default_rng(seed)
    known, path = VOCABULARY // 2, (ordered * TOP_K + lookback - ordered) * EXPERTS
    rows = np.full(VOCABULARY + 1, known, np.int32)
    rows[rng.permutation(VOCABULARY)[:known]] = np.arange(known)
    return PathScores(
        token_rows=rows,
        token_source=np.zeros(VOCABULARY + 1, np.uint8),
        token_scores=rng.integers(-127, 128, (LAYERS, known + 1, ranks)).astype(np.int8),
        token_shift=rng.integers(0, 6, LAYERS).astype(np.uint8),
        path_scores=rng.integers(-2000, 2000, (LAYERS, path, ranks)).astype(np.int16),
        history_scores=rng.integers(-2000, 2000, (LAYERS, 2 * EXPERTS + 1, ranks)).astype(np.int16),
        lookback=lookback,
        ordered=ordered,
    )


def predicted_scores(seed, tokens, slices) -> np.ndarray:
    """(B, S) int32 as a predictor gives them: most tokens prefer one slice, and some slices are liked more."""
    rng = np.random.default_rng(seed)
    liked = rng.dirichlet(np.full(slices, 3.0))
    shares = rng.dirichlet(8 * liked + 0.2, size=tokens) if slices > 1 else np.ones((tokens, 1))
    return np.rint(4 * 2048 * shares).astype(np.int32)


def total(scores, slices) -> int:
    return int(scores[np.arange(len(scores)), slices].sum())


def test_the_worked_example_of_equal_slices():
    scores = np.array([[9, 1], [5, 4], [7, 0], [0, 6]], np.int32)
    assert assign(scores).tolist() == [0, 1, 0, 1]


def test_tokens_that_all_prefer_one_slice_stay_where_it_means_most_to_them():
    """Slices of two: tokens 0 and 2 would lose 10 and 9 by moving, tokens 1 and 3 would lose 1 and 2."""
    scores = np.array([[10, 0], [10, 9], [9, 0], [10, 8]], np.int32)
    assert assign(scores).tolist() == [0, 1, 0, 1]


def test_equal_scores_still_fill_equal_slices():
    assert np.bincount(assign(np.zeros((12, 4), np.int32))).tolist() == [3, 3, 3, 3]


def test_ties_go_to_the_lowest_slice_where_there_is_room():
    scores = np.array([[3, 3, 1], [0, 5, 5], [4, 1, 4]], np.int32)
    assert oracles.best_slices_total(scores) == total(scores, assign(scores))
    assert assign(np.array([[2, 2, 2]], np.int32)).tolist() == [0]


@pytest.mark.parametrize(("tokens", "slices"), [(0, 4), (1, 4), (3, 8), (5, 1), (64, 8), (65, 8), (71, 8), (7, 7)])
def test_every_token_gets_a_slice_and_no_slice_more_than_its_share(tokens, slices):
    found = assign(predicted_scores(0, tokens, slices))
    assert (found.shape, found.dtype) == ((tokens,), np.int16)
    filled = np.bincount(found, minlength=slices)
    assert (found >= 0).all()
    assert len(filled) == slices
    assert filled.max(initial=0) <= -(-tokens // slices)


@given(st.integers(0, 9999), st.integers(0, 40), st.integers(1, 9), st.sampled_from([1, 3, 2000, 1 << 20]))
def test_slices_never_overflow_whatever_the_scores(seed, tokens, slices, largest):
    scores = np.random.default_rng(seed).integers(-largest, largest + 1, (tokens, slices)).astype(np.int32)
    found = assign(scores)
    assert found.shape == (tokens,)
    assert ((found >= 0) & (found < slices)).all()
    assert np.bincount(found, minlength=slices).max(initial=0) <= max(-(-tokens // slices), 1)
    np.testing.assert_array_equal(assign(scores.copy()), found)
    assert total(scores, found) <= oracles.best_slices_total(scores)


def times_optimum(tokens, slices) -> list[float]:
    instances = [predicted_scores(seed, tokens, slices) for seed in range(10)]
    return [total(scores, assign(scores)) / oracles.best_slices_total(scores) for scores in instances]


@pytest.mark.parametrize(("tokens", "slices"), [(12, 3), (16, 4), (64, 8), (256, 8), (512, 16)])
def test_the_sum_of_scores_is_near_the_optimum(tokens, slices):
    ratios = times_optimum(tokens, slices)
    assert max(ratios) <= 1
    assert min(ratios) >= 0.98


@pytest.mark.parametrize(("tokens", "slices"), [(30, 4), (100, 8), (250, 8), (510, 16)])
def test_slices_that_need_not_all_be_full_stay_near_the_optimum_on_average(tokens, slices):
    """A batch that slices do not divide leaves room that the prices do not know of: one of 30 tokens misses 8 %."""
    ratios = times_optimum(tokens, slices)
    assert max(ratios) <= 1
    assert min(ratios) >= 0.9
    assert np.mean(ratios) >= 0.97


def test_what_fits_without_moves_goes_where_it_scores_most():
    scores = predicted_scores(3, 64, 8)
    order = np.argsort(scores.argmax(axis=1), kind="stable")
    fitting = np.concatenate([order[scores[order].argmax(axis=1) == s][:2] for s in range(8)])
    padded = np.concatenate([scores[fitting], np.zeros((16 - len(fitting), 8), np.int32)])
    np.testing.assert_array_equal(assign(padded)[: len(fitting)], scores[fitting].argmax(axis=1))


def test_the_layout_of_the_scores_in_memory_does_not_matter():
    scores = predicted_scores(1, 50, 4)
    np.testing.assert_array_equal(assign(np.asfortranarray(scores)), assign(scores))
    np.testing.assert_array_equal(assign(np.repeat(scores, 2, axis=0)[::2]), assign(scores))


def test_ids_outside_the_vocabulary_read_the_last_row():
    assert known_rows(np.array([0, 19, 20, 21, -1]), 21).tolist() == [0, 19, 20, 20, 20]


def test_a_score_by_hand():
    """Token 1 reads row 0: 3 << 2; its one expert at the layer before, 0, adds 5; no token before adds 7."""
    tables = PathScores(
        token_rows=np.array([1, 0, 1], np.int32),
        token_source=np.zeros(3, np.uint8),
        token_scores=np.array([[[0], [0]], [[3], [-1]]], np.int8),
        token_shift=np.array([0, 2], np.uint8),
        path_scores=np.array([[[0], [0]], [[5], [6]]], np.int16),
        history_scores=np.array([[[0]] * 5, [[1], [2], [3], [4], [7]]], np.int16),
        lookback=1,
        ordered=0,
    )
    earlier = np.zeros((1, 2, 1), np.uint8)
    assert oracles.score_tokens(scores, tables, 1, 0, 1, np.array([1, 9]), earlier).tolist() == [
        [12 + 5 + 7],
        [-4 + 5 + 7],
    ]
    history = np.array([[100], [200]], np.int32)
    assert oracles.score_tokens(scores, tables, 1, 0, 1, np.array([1, 9]), earlier, history).tolist() == [[117], [201]]


@pytest.mark.parametrize(("lookback", "ordered"), [(0, 0), (1, 0), (1, 1), (2, 0), (2, 1), (2, 2)])
@pytest.mark.parametrize("decoding", [True, False])
@given(seed=st.integers(0, 9999))
def test_scores_agree_with_loops(lookback, ordered, decoding, seed):
    rng, tables = np.random.default_rng(seed), random_tables(seed, lookback, ordered)
    tokens, layer = int(rng.integers(1, 9)), int(rng.integers(LAYERS))
    first, slices = [(0, 4), (0, 2), (2, 2), (3, 1)][rng.integers(4)]  # all ranks, or those of one group
    ids = rng.integers(-2, VOCABULARY + 3, tokens)
    earlier = rng.integers(EXPERTS, size=(min(layer, lookback), tokens, TOP_K)).astype(np.uint8)
    history = rng.integers(-5000, 5000, (tokens, RANKS)).astype(np.int32) if decoding else None
    found = oracles.score_tokens(scores, tables, layer, first, slices, ids, earlier, history)
    assert found.dtype == np.int32
    assert found.tolist() == [
        oracles.score(tables, layer, first, slices, int(ids[t]), earlier[:, t], None if history is None else history[t])
        for t in range(tokens)
    ]


@pytest.mark.parametrize(("first", "slices"), [(0, 19), (0, 16), (8, 8), (3, 13), (16, 3)])
@given(seed=st.integers(0, 9999))
def test_many_ranks_are_scored_as_few_are(first, slices, seed):
    """Eight at a time where there are so many."""
    rng, tables = np.random.default_rng(seed), random_tables(seed, 2, seed % 3, ranks=19)
    ids, earlier = rng.integers(-2, VOCABULARY + 3, 3), rng.integers(EXPERTS, size=(2, 3, TOP_K)).astype(np.uint8)
    history = rng.integers(-5000, 5000, (3, 19)).astype(np.int32) if seed % 2 else None
    found = oracles.score_tokens(scores, tables, 2, first, slices, ids, earlier, history)
    assert found.tolist() == [
        oracles.score(tables, 2, first, slices, int(ids[t]), earlier[:, t], None if history is None else history[t])
        for t in range(3)
    ]


def test_a_group_s_scores_are_its_columns_of_the_scores_of_all_ranks():
    tables, rng = random_tables(0), np.random.default_rng(0)
    ids, earlier = rng.integers(VOCABULARY, size=30), rng.integers(EXPERTS, size=(2, 30, TOP_K))
    history = rng.integers(-500, 500, (30, RANKS)).astype(np.int32)
    every = oracles.score_tokens(scores, tables, 2, 0, 4, ids, earlier, history)
    np.testing.assert_array_equal(oracles.score_tokens(scores, tables, 2, 2, 2, ids, earlier, history), every[:, 2:])


def test_a_history_by_hand():
    """One rank, two experts; the first token chose expert 1: an eighth of its row, and its row as the token before."""
    assert (FRACTION, RUNNING_PRIOR) == (8, 8)
    tables = replace(
        random_tables(0, ranks=1),
        history_scores=np.array([[[80], [160], [30], [40], [-7]]], np.int16),
    )
    history, slots = History(tables, 1), np.zeros(1, np.int64)
    assert history.contribution(0, slots).tolist() == [[-7]]
    history.observe(0, slots, np.array([[1]]))
    assert history.contribution(0, slots).tolist() == [[160 // 8 + 40]]
    history.observe(0, slots, np.array([[0]]))  # a running mean of 20 moves by a ninth of the way to 80
    assert history.contribution(0, slots).tolist() == [[20 + 60 // 9 + 30]]
    history.reset(slots)
    assert history.contribution(0, slots).tolist() == [[-7]]


def test_prompt_tokens_of_a_mixed_pass_are_scored_without_their_request_s_history():
    tables, slots = random_tables(2), np.array([0, 1, 1])
    history = History(tables, 2)
    history.observe(1, slots, np.arange(6).reshape(3, 2))
    known, nothing = history.contribution(1, slots), tables.history_scores[1, -1]
    found = history.contribution(1, slots, np.array([True, False, True]))
    assert found.tolist() == [known[0].tolist(), nothing.tolist(), known[2].tolist()]
    assert known[1].tolist() != nothing.tolist()


def test_the_running_mean_forgets_no_faster_than_its_limit():
    """After many tokens of expert 0, one of expert 1 moves the mean by one part in PRIOR + LIMIT."""
    tables = replace(random_tables(0, ranks=1), history_scores=np.array([[[0], [3200], [0], [0], [0]]], np.int16))
    history, slots = History(tables, 1), np.zeros(1, np.int64)
    for _ in range(100):
        history.observe(0, slots, np.array([[0]]))
    history.observe(0, slots, np.array([[1]]))
    assert history.contribution(0, slots).tolist() == [[3200 // (RUNNING_PRIOR + RUNNING_LIMIT)]]


@pytest.mark.parametrize("prefill", [0, 7, 1000])
@given(seed=st.integers(0, 9999))
def test_a_trace_s_history_agrees_with_loops(prefill, seed):
    trace, tables = random_trace(seed), random_tables(seed)
    trace = with_prefill(trace, prefill)
    for layer in range(LAYERS):
        found = trace_history(tables, layer, trace)
        assert found.dtype == np.int32
        assert found.tolist() == oracles.trace_history(tables, layer, trace)


@given(st.integers(0, 9999))
def test_a_history_fed_token_by_token_equals_that_of_the_trace(seed):
    """Requests in step, as in decode: the n-th tokens of all requests are one batch; slots are not request numbers."""
    trace, tables = random_trace(seed), random_tables(seed)
    slot_of = np.random.default_rng(seed).permutation(trace.num_requests + 3)[: trace.num_requests]
    for layer in range(LAYERS):
        history, found = History(tables, trace.num_requests + 3), np.zeros((trace.num_tokens, RANKS), np.int32)
        for step in range(int(np.diff(trace.request_offsets).max())):
            running = np.flatnonzero(np.diff(trace.request_offsets) > step)
            rows = trace.request_offsets[running] + step
            found[rows] = history.contribution(layer, slot_of[running])
            history.observe(layer, slot_of[running], trace.expert_ids[rows, layer])
        np.testing.assert_array_equal(found, trace_history(tables, layer, trace))


def test_many_tokens_of_a_slot_are_observed_in_their_order():
    tables, experts = random_tables(5), np.random.default_rng(5).integers(EXPERTS, size=(40, TOP_K))
    at_once, one_by_one = History(tables, 2), History(tables, 2)
    slots = np.arange(40) % 2
    at_once.observe(1, slots, experts)
    for slot, chosen in zip(slots, experts, strict=True):
        one_by_one.observe(1, np.array([slot]), chosen[None])
    both = np.arange(2)
    np.testing.assert_array_equal(at_once.contribution(1, both), one_by_one.contribution(1, both))
    np.testing.assert_array_equal(at_once.contribution(0, both), np.tile(tables.history_scores[0, -1], (2, 1)))


def test_prompt_tokens_know_nothing_before_them_but_are_known_to_the_first_decoded_one():
    trace, tables = random_trace(1, requests=3), random_tables(1)
    rows = int(trace.request_offsets[-1]) - 1  # all but the last token of the last request
    found = trace_history(tables, 1, with_prefill(trace, rows))
    np.testing.assert_array_equal(found[:rows], np.tile(tables.history_scores[1, -1], (rows, 1)))
    np.testing.assert_array_equal(found[rows], trace_history(tables, 1, trace)[rows])
