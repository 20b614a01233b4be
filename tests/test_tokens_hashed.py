"""Hash-routed layers: the token table is exact for every token id, and placement needs token frequencies only."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace

from semmoe.core import PRIOR, Placement, RoutingTrace
from semmoe.files import save_arrays
from semmoe.hashed import NO_HASHED, HashedLayers
from semmoe.placement import cocluster
from semmoe.replayer import replay
from semmoe.settings import CoclusterSettings, PredictorSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import split
from semmoe.tokens.hashed import activations
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.predictor import fit, predict, project
from semmoe.tokens.slices import look_up_tokens
from semmoe.topology import Topology
from semmoe.trace import open_trace, read_shards, save_trace

HALF = Placement(physical_to_logical_map=np.array([[0, 1, 2, 3], [0, 2, 1, 3]], np.int32), num_experts=4, ep_size=2)
EASY = SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10, load_limit=None))
QUICK = PredictorSettings(lookback=1)


def hashed_trace(seed=0, requests=40, layers=3, hashed=2, experts=8, vocab=60, length=30) -> RoutingTrace:
    """The first layers look experts up in a random table, the others stray from a token's favourites."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(vocab, size=(requests, length))
    tables = np.argsort(rng.random((hashed, vocab, experts)), axis=2)[..., :2].astype(np.uint8)
    chosen = [table[tokens.ravel()] for table in tables]
    taste = 2 * rng.normal(size=(vocab, layers - hashed, experts))[tokens.ravel()]
    strayed = np.argsort(-(taste + rng.gumbel(size=taste.shape)), axis=2)[..., :2]
    routed = np.stack([*chosen, *strayed.transpose(1, 0, 2)], axis=1)
    trace = make_trace(tokens.tolist(), routed, vocab_size=vocab, num_experts=experts)
    return replace(trace, hashed=HashedLayers(layers=np.arange(hashed, dtype=np.int32), expert_ids=tables))


def by_hand() -> RoutingTrace:
    """Two layers of four experts; layer 0 looks tokens up: 0 -> (0, 1), 1 -> (2, 3), 2 -> (0, 2), 3 -> (3, 3)."""
    table = np.array([[[0, 1], [2, 3], [0, 2], [3, 3]]], np.uint8)
    tokens = [[0, 1], [1, 0], [0, 0]]
    routed = [[table[0, t], [t, 2 + t]] for request in tokens for t in request]
    trace = make_trace(tokens, routed, vocab_size=4, num_experts=4)
    return replace(trace, hashed=HashedLayers(layers=np.array([0], np.int32), expert_ids=table))


def test_rows_count_the_experts_that_a_rank_hosts_for_profiled_and_other_tokens():
    trace = by_hand()
    tables = project(fit(trace, QUICK, 0), trace, HALF)
    found = look_up_tokens(tables, [0], 0, 2, np.array([0, 1, 2, 3]))[0]
    assert (found == SCALE * np.array([[2, 0], [0, 2], [1, 1], [0, 2]])).all()
    assert tables.token_source.tolist()[2:] == [PRIOR] * 3  # ids 2 and 3 were not profiled
    assert (look_up_tokens(tables, [0], 1, 1, np.array([4, -1])) == 0).all()  # ids outside the vocabulary
    assert not tables.path_scores[0].any()
    assert not tables.history_scores[0].any()
    assert tables.history_scores[1].any()


def test_rows_over_sixteen_ranks():
    """Eight or more ranks are looked up by other instructions."""
    trace = hashed_trace(1, requests=4, experts=16)
    rows = np.stack([np.roll(np.arange(16), l) for l in range(3)]).astype(np.int32)
    placement = Placement(physical_to_logical_map=rows, num_experts=16, ep_size=16)
    tables = project(fit(trace, QUICK, 0), trace, placement)
    found = look_up_tokens(tables, [0, 1], 0, 16, np.arange(60))
    expected = np.zeros((2, 60, 16), np.int32)
    np.put_along_axis(expected, (trace.hashed.expert_ids.astype(int) + np.arange(2)[:, None, None]) % 16, SCALE, axis=2)
    assert (found == expected).all()


@given(seed=st.integers(0, 99), copies=st.booleans())
def test_rows_of_other_layers_are_those_without_the_tables(seed, copies):
    trace = hashed_trace(seed, requests=8, hashed=1)
    physical = np.tile(np.arange(8, dtype=np.int32).reshape(2, 4), (3, 1, 1))
    if copies:
        physical = np.concatenate([physical, np.tile([[[4]], [[0]]], (3, 1, 1)).reshape(3, 2, 1)], axis=2)
    rows = physical.reshape(3, -1).astype(np.int32)
    placement = Placement(physical_to_logical_map=rows, num_experts=8, ep_size=2)
    with_table = project(fit(trace, QUICK, 0), trace, placement)
    plain = replace(trace, hashed=NO_HASHED)
    without = project(fit(plain, QUICK, 0), plain, placement)
    every = np.arange(61)
    one, other = (look_up_tokens(tables, [1, 2], 0, 2, every) for tables in (with_table, without))
    assert (one == other).all()
    hosted = placement.hosts[0][:, trace.hashed.expert_ids[0]].sum(axis=2).T  # (V, G), by another route
    assert (look_up_tokens(with_table, [0], 0, 2, every[:-1])[0] == SCALE * hosted).all()


def test_activations_count_an_expert_that_a_table_names_twice():
    table = np.array([[1, 1], [0, 2]])
    assert activations(table, np.array([0, 1, 0]), 3).tolist() == [[0, 2, 0], [1, 0, 1], [0, 2, 0]]


def test_predictions_of_a_hashed_layer_are_what_was_recorded():
    trace = hashed_trace(3)
    predictor = fit(trace, QUICK, 0)
    truth = np.zeros((trace.num_tokens, 8))
    np.put_along_axis(truth, trace.expert_ids[:, 1].astype(int), 1, axis=1)
    rows = np.arange(trace.num_tokens)
    assert (predict(predictor, trace, trace, 1, rows) == truth).all()
    assert np.abs(predict(predictor, trace, trace, 2, rows) - truth).max() > 0.1


def test_a_trace_whose_layers_are_all_hashed_is_solved():
    trace = hashed_trace(layers=2, hashed=2)
    plan = solve(trace, Topology(ep_size=2, dp_size=1), EASY)
    result = replay(trace, plan, ReplaySettings(batch_tokens=200))
    np.testing.assert_allclose(result.predicted_lar, [traffic.lar for traffic in result.layers], rtol=1e-12)


@pytest.mark.parametrize("redundant", [0, 4])
def test_held_out_tokens_find_their_experts_as_predicted(redundant):
    """Many token ids are never profiled: the exact rows know them all the same, the ridge's do not."""
    whole = hashed_trace(5, requests=120, vocab=2000)
    held_out, profile = split(whole, 0.7, 0)
    assert np.isin(held_out.token_ids, profile.token_ids, invert=True).mean() > 0.4
    topology, measure = Topology(ep_size=4, dp_size=1), ReplaySettings(batch_tokens=256)
    settings = replace(EASY, redundant_experts=redundant)
    exact = replay(held_out, solve(profile, topology, settings), measure)
    ridge = solve(replace(profile, hashed=NO_HASHED), topology, settings)
    learned = replay(held_out, ridge, measure)
    lar = [[traffic.lar for traffic in result.layers] for result in (exact, learned)]
    if not redundant:  # copies are chosen by the whole batch, so that a pair may be computed elsewhere
        np.testing.assert_allclose(exact.predicted_lar[:2], lar[0][:2], rtol=1e-12)
    assert abs(learned.predicted_lar[0] - lar[1][0]) > 0.01
    assert min(lar[0][0] - lar[1][0], lar[0][1] - lar[1][1]) > 0.05


def test_a_search_with_the_table_is_no_worse_than_with_the_ridge():
    """What was recorded is the table at the tokens that occur, so nothing but their frequencies enters the search."""
    profile, topology = hashed_trace(7, requests=80, vocab=200), Topology(ep_size=4, dp_size=1)
    plain, lar = replace(profile, hashed=NO_HASHED), {}
    for name, trace in (("table", profile), ("ridge", plain)):
        placement = cocluster.place(trace, topology, fit(trace, QUICK, 0), 0, EASY.cocluster, 0)
        plan = solve(profile, topology, EASY)
        scores = project(fit(profile, QUICK, 0), profile, placement)
        plan = replace(plan, placement=placement, tokens=scores)
        lar[name] = replay(profile, plan, ReplaySettings(batch_tokens=256)).layers
    assert sum(t.lar for t in lar["table"][:2]) >= sum(t.lar for t in lar["ridge"][:2])


def test_tables_travel_with_a_trace(tmp_path):
    trace = hashed_trace()
    save_trace(trace, tmp_path / "trace")
    for read in (open_trace(tmp_path / "trace"), *read_shards(tmp_path / "trace"), trace.select(np.array([3, 1]))):
        assert (read.hashed.expert_ids == trace.hashed.expert_ids).all()
        assert read.hashed.layers.tolist() == [0, 1]
    assert open_trace(tmp_path / "trace").digest() == trace.digest() != replace(trace, hashed=NO_HASHED).digest()
    save_trace(replace(trace, hashed=NO_HASHED), tmp_path / "without")
    assert not list((tmp_path / "without").glob("hashed*"))
    assert len(open_trace(tmp_path / "without").hashed.layers) == 0


def test_the_digest_of_a_trace_without_tables_is_what_it_was():
    trace = make_trace([[0]], [[[0, 1]]])
    assert trace.digest().startswith("cf69eab74a66")


def faults(trace):
    table, layers = trace.hashed.expert_ids, trace.hashed.layers
    return {
        "expected \\(2, 60, 2\\)": (layers, table[:, :-1]),
        "out of range for 8 experts": (layers, np.where(table == 7, 9, table)),
        "out of range for 3 layers": (layers + 2, table),
        "ascending": (layers[::-1].copy(), table),
        "once each": (layers[None], table),
        "expected \\(0, 0, 0\\)": (layers[:0], table),
        "expected integers": (layers, table.astype(np.float32)),
        "its table says": (layers, (table + 1) % 8),
    }


@pytest.mark.parametrize("words", list(faults(hashed_trace())))
def test_tables_that_do_not_fit_are_refused_with_the_trace_named(words, tmp_path):
    trace = hashed_trace()
    save_trace(trace, tmp_path / "trace")
    layers, table = faults(trace)[words]
    save_arrays(tmp_path / "trace/hashed.safetensors", {"layers": layers, "expert_ids": table})
    with pytest.raises(ValueError, match=f"trace: .*{words}"):
        open_trace(tmp_path / "trace")
