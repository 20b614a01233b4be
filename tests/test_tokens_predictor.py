"""The predictor: what it expects is a sum of table rows, structure is found, and nothing predicts itself."""

from dataclasses import replace

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace, with_prefill

from semmoe.core import NEIGHBOUR, PRIOR, PROFILED, Placement
from semmoe.settings import PredictorSettings
from semmoe.tokens import regression
from semmoe.tokens import slices as scores
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.predictor import fit, predict, project
from semmoe.tokens.slices import Looks, trace_history

ANY_ROUTING = PredictorSettings(lookback=1)


def following_trace(seed=0, requests=60, layers=4, experts=8, length=20):
    """The first layer is random, and each expert of a layer is followed by one of its own at the next layer."""
    rng = np.random.default_rng(seed)
    first = np.argsort(rng.random((requests * length, experts)), axis=1)[:, :2]
    chosen = [first]
    for _ in range(layers - 1):
        chosen.append(rng.permutation(experts)[chosen[-1]])
    tokens = rng.integers(20, size=(requests, length)).tolist()
    return make_trace(tokens, np.stack(chosen, axis=1), vocab_size=20, num_experts=experts)


def once_each_trace(seed=0, requests=10, length=12):
    """Every token id occurs once; experts follow the layer before, as in `following_trace`."""
    trace = following_trace(seed, requests, length=length)
    ids = np.random.default_rng(seed).permutation(requests * length).astype(np.int32)
    size = replace(trace.fingerprint, vocab_size=len(ids))
    return replace(trace, token_ids=ids, prompt_ids=ids, fingerprint=size)


def spread_out(seed, layers, experts, ranks, redundant=0) -> Placement:
    """Experts on random ranks; the redundant ones are copies of random experts that their rank does not hold."""
    rng = np.random.default_rng(seed)
    rows = []
    for _ in range(layers):
        slots = rng.permutation(experts).reshape(ranks, -1).tolist()
        for rank in slots:
            rank += rng.permutation(np.setdiff1d(np.arange(experts), rank))[: redundant // ranks].tolist()
        rows.append(np.concatenate(slots))
    return Placement(physical_to_logical_map=np.array(rows, np.int32), num_experts=experts, ep_size=ranks)


def predicted(predictor, trace, layer) -> np.ndarray:
    """(T, E) for all of a profile."""
    return predict(predictor, trace, trace, layer, np.arange(trace.num_tokens))


def earlier_experts(trace, layer, lookback) -> np.ndarray:
    return np.ascontiguousarray(trace.expert_ids[:, max(layer - lookback, 0) : layer][:, ::-1].transpose(1, 0, 2))


@pytest.mark.parametrize("prefill", [0, 9])
@given(seed=st.integers(0, 999), lookback=st.integers(0, 2))
def test_predictions_agree_with_loops_over_the_fitted_weights(prefill, seed, lookback):
    trace = with_prefill(random_trace(seed), prefill)
    predictor = fit(trace, PredictorSettings(lookback=lookback), seed)
    for layer in range(3):
        expected = oracles.expected_activations(predictor, trace, layer, leave_one_out=True)
        np.testing.assert_allclose(predicted(predictor, trace, layer), expected, atol=1e-4)


def test_requests_are_predicted_alike_alone_and_among_all():
    trace = random_trace(2, requests=20)
    predictor, some = fit(trace, ANY_ROUTING, 0), np.array([3, 4, 11, 19])
    rows = np.isin(trace.request_of_token(), some)
    few = np.array([7, 0, 20])
    found = predict(predictor, trace, trace.select(some), 2, few)
    np.testing.assert_allclose(found, predicted(predictor, trace, 2)[rows][few], atol=1e-5)


@pytest.mark.parametrize("redundant", [0, 4])
@given(seed=st.integers(0, 999), lookback=st.integers(0, 2))
def test_tables_hold_the_expectations_summed_over_hosted_experts(redundant, seed, lookback):
    """Up to rounding: each row added is off by at most half a unit, a token's row by half of one after its shift."""
    trace = random_trace(seed)
    predictor = fit(trace, PredictorSettings(lookback=lookback), seed)
    placement = spread_out(seed, 3, 8, 4, redundant)
    tables = project(predictor, trace, placement)
    assert tables.looks == predictor.looks
    assert tables.token_scores.shape == (3, len(np.unique(trace.token_ids)) + 1, 4)
    for layer in range(3):
        expected = oracles.expected_activations(predictor, trace, layer, leave_one_out=False)
        found = oracles.score_tokens(
            scores, tables, layer, 0, 4, trace.token_ids, np.ascontiguousarray(tables.looks.planes(trace, layer)),
            trace_history(tables, layer, trace),
        )  # fmt: skip
        rounded = 2.0 ** tables.token_shift[layer] / 2 + (tables.looks.number(layer) + 2) * 2 / 2 + 2
        difference = np.abs(found / SCALE - expected @ placement.hosts[layer].T)
        assert difference.max() <= rounded / SCALE + 1e-4


def test_prompt_tokens_score_without_history_as_they_are_predicted():
    trace = with_prefill(random_trace(3), 10_000)
    predictor, placement = fit(trace, ANY_ROUTING, 0), spread_out(3, 3, 8, 4)
    tables = project(predictor, trace, placement)
    expected = oracles.expected_activations(predictor, trace, 2, leave_one_out=False) @ placement.hosts[2].T
    found = (
        oracles.score_tokens(scores, tables, 2, 0, 4, trace.token_ids, earlier_experts(trace, 2, tables.lookback))
        / SCALE
    )
    np.testing.assert_allclose(found, expected, atol=(2.0 ** tables.token_shift[2] + 8) / SCALE)


def test_expectations_of_a_layer_sum_to_the_experts_of_a_token():
    trace = random_trace(0, requests=60)
    predictor = fit(trace, PredictorSettings(), 0)
    tables = project(predictor, trace, spread_out(0, 3, 8, 4))
    for layer in range(3):
        np.testing.assert_allclose(predicted(predictor, trace, layer).sum(axis=1), 2, atol=0.05)
        mean = tables.token_scores[layer, -1].astype(int) << tables.token_shift[layer]
        assert np.abs(mean.sum()) <= 2.5 * SCALE


@pytest.mark.parametrize("lookback", [None, 1, 2])
def test_routing_that_follows_from_the_layer_before_is_predicted_in_full(lookback):
    trace = following_trace()
    predictor = fit(trace, PredictorSettings(lookback=lookback), 0)
    assert predictor.held_out_error < 0.01
    assert predictor.looks.lookback == lookback if lookback else predictor.looks.lookback >= 1
    for layer in (1, 2, 3):
        top = np.argsort(-predicted(predictor, trace, layer), axis=1)[:, :2]
        np.testing.assert_array_equal(np.sort(top), np.sort(trace.expert_ids[:, layer]))


def test_the_error_is_that_of_many_requests_held_out():
    """Every fourth request strays at random and is not predicted: a mean over requests lies in between."""
    trace = following_trace()
    experts, strays = trace.expert_ids.copy(), np.random.default_rng(1)
    for first in trace.request_offsets[:-1:4]:
        experts[first : first + 20] = np.argsort(strays.random((20, 4, 8)), axis=2)[..., :2]
    predictor = fit(replace(trace, expert_ids=experts), ANY_ROUTING, 0)
    assert 0.2 < predictor.held_out_error < 0.85


def test_the_held_out_error_is_of_what_the_mean_misses_however_little_that_is():
    """One of 400 tokens strays, and no token of the requests held out."""
    experts = np.tile([0, 1], (400, 2, 1))
    experts[7] = 2, 3
    trace = make_trace(np.random.default_rng(0).integers(6, size=(40, 10)).tolist(), experts, num_experts=8)
    assert fit(trace, ANY_ROUTING, 0).held_out_error == pytest.approx(0.56, abs=0.05)


def test_without_any_time_the_shortest_look_back_is_fitted():
    trace = following_trace()
    assert fit(trace, PredictorSettings(), 0).looks.lookback >= 1
    assert fit(trace, PredictorSettings(), 0, lambda: False).looks.lookback == 0


@pytest.mark.parametrize("judged", [2, 8])
def test_the_error_on_some_experts_is_of_these_alone(monkeypatch, judged):
    """Experts 0 to 3 take turns with the token id, and 4 to 7 at random: some of both are judged."""
    monkeypatch.setattr("semmoe.tokens.predictor.JUDGED", judged)
    rng = np.random.default_rng(0)
    tokens = rng.integers(4, size=(60, 20))
    experts = np.stack([tokens.ravel(), 4 + rng.integers(4, size=1200)], axis=1)[:, None]
    error = fit(make_trace(tokens.tolist(), experts, vocab_size=4, num_experts=8), ANY_ROUTING, 0).held_out_error
    assert error == pytest.approx(0.5, abs=0.1)


def test_random_routing_is_not_predicted():
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((1200, 3, 8)), axis=2)[..., :2]
    trace = make_trace(rng.integers(20, size=(60, 20)).tolist(), experts, vocab_size=20, num_experts=8)
    predictor = fit(trace, PredictorSettings(), 0)
    assert predictor.held_out_error == pytest.approx(1, abs=0.1)
    assert predictor.looks.lookback == 0


@pytest.mark.parametrize("decoding", [True, False])
def test_the_token_before_predicts_where_it_decides_and_was_known(decoding):
    """Experts take turns along each request, beginning anywhere; tokens of a prompt are routed at once."""
    rng = np.random.default_rng(0)
    turns = [rng.integers(8) + np.arange(20) for _ in range(60)]
    experts = (np.concatenate(turns)[:, None, None] + np.array([0, 1])) % 8
    trace = make_trace(rng.integers(20, size=(60, 20)).tolist(), experts, vocab_size=20, num_experts=8)
    trace = trace if decoding else with_prefill(trace, 1200)
    predictor = fit(trace, PredictorSettings(), 0)
    assert (predictor.held_out_error < 0.4) == decoding


def test_token_ids_that_decide_their_experts_are_learnt_and_tokens_seen_once_are_not_trusted():
    """Ids 0 to 9 come often and decide; 240 more come once each, with experts that mean nothing."""
    rng = np.random.default_rng(1)
    ids = rng.permutation(np.concatenate([np.repeat(np.arange(10), 96), np.arange(10, 250)]))
    random = np.argsort(rng.random((1200, 2, 8)), axis=2)[..., :2]
    own = np.argsort(rng.random((10, 2, 8)), axis=2)[..., :2]
    experts = np.where((ids < 10)[:, None, None], own[np.minimum(ids, 9)], random)
    trace = make_trace(ids.reshape(60, 20).tolist(), experts, vocab_size=250, num_experts=8)
    expected = predicted(fit(trace, PredictorSettings(lookback=0), 0), trace, 1)
    top = np.argsort(-expected, axis=1)[:, :2]
    hits = np.array([len(set(a) & set(b)) for a, b in zip(top.tolist(), experts[:, 1].tolist(), strict=True)])
    assert (hits[ids < 10] == 2).mean() > 0.99
    assert hits[ids >= 10].mean() < 1.1


@given(st.integers(0, 999))
def test_a_token_that_occurs_once_carries_nothing_into_its_own_prediction(seed):
    trace = once_each_trace(seed)
    predictor = fit(trace, ANY_ROUTING, seed)
    other_ids = np.random.default_rng(seed + 1).permutation(trace.num_tokens).astype(np.int32)
    for layer in range(4):
        np.testing.assert_allclose(predictor.layers[layer].parts[3], 0, atol=1e-6)
        np.testing.assert_allclose(
            predicted(predictor, trace, layer),
            predicted(predictor, replace(trace, token_ids=other_ids), layer),
            atol=1e-6,
        )


@given(st.integers(0, 999), st.sampled_from([None, 1]))
def test_relabelled_experts_are_predicted_alike(seed, lookback):
    trace, rng = random_trace(seed, requests=20), np.random.default_rng(seed)
    renamed = np.stack([rng.permutation(8) for _ in range(3)])
    other = replace(trace, expert_ids=renamed[np.arange(3)[:, None], trace.expert_ids].astype(np.uint8))
    settings = PredictorSettings(lookback=lookback)
    first, second = fit(trace, settings, seed), fit(other, settings, seed)
    assert (first.looks, first.ridge) == (second.looks, second.ridge)
    for layer in range(3):
        expected = predicted(first, trace, layer)
        np.testing.assert_allclose(predicted(second, other, layer)[:, renamed[layer]], expected, atol=1e-4)


@pytest.mark.parametrize("lookback", [None, 0, 3])
def test_a_model_of_one_layer_has_nothing_to_look_back_at(lookback):
    trace = random_trace(0, layers=1)
    predictor = fit(trace, PredictorSettings(lookback=lookback), 0)
    assert (predictor.looks.lookback, predictor.looks.ordered, len(predictor.layers)) == (0, 0, 1)
    tables = project(predictor, trace, spread_out(0, 1, 8, 4))
    assert tables.path_scores.shape == (1, 0, 4)
    found = oracles.score_tokens(scores, tables, 0, 0, 4, trace.token_ids, np.empty((0, trace.num_tokens, 2), np.uint8))
    assert found.shape == (trace.num_tokens, 4)


@pytest.mark.parametrize("lookback", [1, 4, 8])
def test_a_given_lookback_is_kept_up_to_the_layers_that_there_are(lookback):
    trace = random_trace(0, layers=6)
    predictor = fit(trace, PredictorSettings(lookback=lookback), 0)
    assert predictor.looks.lookback == min(lookback, 5)
    rows = predictor.looks.rows(2, 8)
    assert predictor.layers[-1].parts[2].shape == (rows, 8)
    tables = project(predictor, trace, spread_out(0, 6, 8, 4))
    assert tables.path_scores.shape == (6, rows, 4)
    assert not tables.path_scores[0].any()  # nothing comes before the first layer


@pytest.mark.parametrize("routed", [[12], [0, 12], [12, 0]])
def test_a_trace_too_small_to_hold_requests_out_is_fitted_all_the_same(routed):
    trace = random_trace(0, requests=1)
    trace = replace(
        trace,
        request_offsets=np.cumsum([0, *routed]),
        prompt_offsets=np.array([0] * len(routed) + [len(trace.prompt_ids)]),
    )
    predictor = fit(trace, PredictorSettings(), 0)
    assert (predictor.looks.lookback, predictor.ridge) == (2, 100.0)
    assert np.isnan(predictor.held_out_error)
    assert np.isfinite(predicted(predictor, trace, 2)).all()


def test_a_sample_of_whole_requests_is_fitted_where_the_trace_is_longer():
    trace = following_trace()
    predictor = fit(trace, PredictorSettings(lookback=1, max_tokens=600), 0)
    sums = [layer.mean.sum() for layer in predictor.layers]
    np.testing.assert_allclose(sums, 2)
    assert any((layer.mean != whole.mean).any()
               for layer, whole in zip(predictor.layers, fit(trace, ANY_ROUTING, 0).layers, strict=True))  # fmt: skip
    top = np.argsort(-predicted(predictor, trace, 2), axis=1)[:, :2]
    np.testing.assert_array_equal(np.sort(top), np.sort(trace.expert_ids[:, 2]))


def test_the_seed_decides_everything():
    trace = random_trace(4, requests=30)
    np.random.seed(1)
    first = project(fit(trace, PredictorSettings(), 7), trace, spread_out(0, 3, 8, 4))
    np.random.seed(2)
    second = project(fit(trace, PredictorSettings(), 7), trace, spread_out(0, 3, 8, 4))
    for name, table in vars(first).items():
        np.testing.assert_array_equal(table, getattr(second, name))


def test_rows_of_tokens_by_what_serves_them():
    """Ids 0 and 1 were profiled; 2 is near 1; 3 is near 0."""
    trace = make_trace([[0, 1, 0, 1]] * 4, np.tile([[[0, 1]], [[2, 3]]], (8, 2, 1)), vocab_size=4)
    embeddings = np.array([[1.0, 0.0], [0.0, 1.0], [0.1, 1.0], [1.0, 0.1]])
    predictor, placement = fit(trace, ANY_ROUTING, 0), spread_out(0, 2, 4, 2)
    plain, with_neighbours = project(predictor, trace, placement), project(predictor, trace, placement, embeddings)
    assert plain.token_rows.tolist() == [0, 1, 2, 2, 2]
    assert plain.token_source.tolist() == [PROFILED, PROFILED, PRIOR, PRIOR, PRIOR]
    assert with_neighbours.token_rows.tolist() == [0, 1, 1, 0, 2]
    assert with_neighbours.token_source.tolist() == [PROFILED, PROFILED, NEIGHBOUR, NEIGHBOUR, PRIOR]
    np.testing.assert_array_equal(plain.token_scores, with_neighbours.token_scores)


def test_embeddings_of_another_vocabulary_are_refused():
    trace = random_trace(0)
    with pytest.raises(ValueError, match="3 embeddings for a vocabulary of 20"):
        project(fit(trace, ANY_ROUTING, 0), trace, spread_out(0, 3, 8, 4), np.zeros((3, 2)))


@pytest.mark.parametrize("lookback", [-1, 9])
def test_a_lookback_out_of_range_is_refused(lookback):
    with pytest.raises(ValueError, match=f"between 0 and 8, not {lookback}"):
        PredictorSettings(lookback=lookback)


@pytest.mark.parametrize("looks", [(0, 0), (1, 1), (3, 0), (3, 2)])
def test_the_products_are_those_of_the_whole_matrix(looks):
    trace, (lookback, ordered) = random_trace(4, requests=20, layers=4), looks
    counts = regression.count_tokens(trace, 3)
    design = regression.design_of(trace, 3, Looks(lookback=2, ordered=1), counts, loo=True)
    design = regression.with_looks(design, trace, 3, Looks(lookback=lookback, ordered=ordered))
    one_hot = (design.active[..., None] == np.arange(design.columns + design.num_experts)).any(axis=1).astype(float)
    whole = np.concatenate([one_hot[:, : design.columns], design.dense], axis=1)
    square, target = regression.products(design, regression.dense_products(design))
    np.testing.assert_allclose(square, whole.T @ whole, rtol=1e-5, atol=1e-3)
    np.testing.assert_allclose(target, whole.T @ one_hot[:, design.columns :], rtol=1e-5, atol=1e-3)
