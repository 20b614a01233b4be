"""Prompt to group scores: the fitted map against dense linear algebra, and on traces with known structure."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, planted_trace, random_trace

from semmoe.core import DECODE
from semmoe.requests import predictor as request_map
from semmoe.requests.predictor import UNSEEN, fit_request_rates, load_prices, project, request_rates


def map_scores(table, trace):
    """(R, D): the definition, prompt by prompt."""
    out = []
    for r in range(trace.num_requests):
        ids = np.unique(trace.prompt(r))
        weight = np.sqrt(table.token_weights[ids].sum())
        out.append(table.bias + (table.token_scores[ids].sum(axis=0) / weight if weight > 0 else 0))
    return np.array(out)


def hosted(groups) -> np.ndarray:
    """(L, E, D) bool of experts in groups (L, E)."""
    return groups[..., None] == np.arange(groups.max() + 1)


def one_hot(groups):
    return (groups.reshape(-1, 1) == np.arange(groups.max() + 1)).astype(float)


def alternating(shape, groups):
    return np.arange(shape[0] * shape[1]).reshape(shape) % groups


def test_rates_by_hand():
    """Request 0: token 1 uses experts 0 and 1, token 2 experts 0 and 3; two layers alike."""
    trace = make_trace([[1, 2], [3]], [[[0, 1]] * 2, [[0, 3]] * 2, [[2, 3]] * 2])
    assert request_rates(trace).tolist() == [[0.25, 0.125, 0, 0.125] * 2, [0, 0, 0.25, 0.25] * 2]


def dense_views(trace, groups):
    """Words (R, V) and routing (R, L * E) from the definitions, by loops."""
    f, rates, lengths = trace.fingerprint, request_rates(trace).astype(float), np.diff(trace.request_offsets)
    mean = lengths @ rates / lengths.sum()
    documents = [set(np.concatenate([trace.prompt(r) for r in np.flatnonzero(groups == g)])) for g in set(groups)]
    idf = [np.log((len(documents) + 1) / (sum(v in d for d in documents) + 1)) for v in range(f.vocab_size)]
    words, routing = np.zeros((trace.num_requests, f.vocab_size)), np.zeros(rates.shape)
    owner = groups[trace.request_of_token()]
    for r in range(trace.num_requests):
        ids = np.unique(trace.prompt(r))
        words[r, ids] = np.array(idf)[ids] / max(np.sqrt((np.array(idf)[ids] ** 2).sum()), 1e-9)
        for v in ids:
            others = np.flatnonzero((trace.token_ids == v) & (owner != groups[r]))
            pairs = np.zeros((f.num_layers, f.num_experts))
            for t in others:
                for l in range(f.num_layers):
                    pairs[l, trace.expert_ids[t, l]] += 1 / (f.num_layers * f.top_k)
            routing[r] += words[r, v] * (pairs.ravel() - len(others) * mean) / (len(others) + UNSEEN)
    return words, routing, mean, rates, lengths


@pytest.mark.parametrize("seed", [0, 1])
def test_held_out_predictions_agree_with_refitting_without_each_group(seed):
    trace = random_trace(seed, requests=10)
    groups = np.arange(10) // 2 * 2
    groups[:4] = [0, 1, 2, 2]
    fit = fit_request_rates(trace, groups)
    trace, groups = trace.select(fit.requests), groups[fit.requests]
    words, routing, mean, rates, lengths = dense_views(trace, groups)
    np.testing.assert_allclose(fit.routing, routing, atol=1e-5)
    kernel = words @ words.T + fit.routing_weight * routing @ routing.T / (routing**2).sum(axis=1).mean()
    noise = fit.ridge * lengths.mean() / lengths
    for g in np.unique(groups):
        out, rest = np.flatnonzero(groups == g), np.flatnonzero(groups != g)
        dual = np.linalg.solve(kernel[np.ix_(rest, rest)] + np.diag(noise[rest]), rates[rest] - mean)
        np.testing.assert_allclose(fit.held_out[out], mean + kernel[np.ix_(out, rest)] @ dual, atol=1e-4)


@pytest.mark.parametrize("seed", [0, 3])
def test_the_map_is_the_regression_projected_on_groups(seed):
    """For prompts that the profile never saw: the kernel's prediction, routing averages over the whole profile."""
    trace, fresh = random_trace(seed, requests=14), random_trace(seed + 50, requests=6)
    fit = fit_request_rates(trace, np.arange(14))
    experts = alternating(fit.shape, 2)
    table = project(fit, hosted(experts))
    averages = np.zeros((20, len(fit.mean_rate)))
    routed = fit.trace
    for v in range(20):
        rows = np.flatnonzero(routed.token_ids == v)
        one = (routed.expert_ids[rows][..., None] == np.arange(8)).sum(axis=(0, 2)).ravel()
        averages[v] = (one / 6 - len(rows) * fit.mean_rate) / (len(rows) + UNSEEN)
    idf, expected = fit.idf[:20], []
    for r in range(fresh.num_requests):
        x = np.zeros(20)
        ids = np.unique(fresh.prompt(r))
        x[ids] = idf[ids] / max(np.sqrt((idf[ids] ** 2).sum()), 1e-9)
        kernel = fit.words.toarray()[:, :20] @ x + fit.routing_scale * fit.routing @ (x @ averages)
        rates = fit.mean_rate + kernel @ fit.inverse @ (fit.rates - fit.mean_rate)
        expected.append(rates @ one_hot(experts))
    np.testing.assert_allclose(map_scores(table, fresh), expected, atol=1e-4)
    assert table.token_scores.shape == (21, 2)
    assert (table.token_scores[20] == 0).all()
    assert table.token_weights[20] == table.token_weights.max()


def test_a_planted_structure_is_predicted_from_the_prompt():
    trace, blocks = planted_trace(groups=4, ranks=1, requests_per_group=8)
    fit = fit_request_rates(trace, np.arange(trace.num_requests))
    assert fit.held_out_r2 > 0.6
    table = project(fit, hosted(blocks))
    assert (map_scores(table, trace).argmax(axis=1) == np.arange(trace.num_requests) % 4).all()
    assert fit.planning_rates.shape == (32, *blocks.shape)
    np.testing.assert_allclose(fit.planning_rates.reshape(32, -1), (fit.rates + fit.held_out) / 2)
    assert table.mean_length == 24


def test_duplicates_do_not_flatter_the_error():
    """Unpredictable requests, each there twice: told that they are duplicates, the fit explains nothing."""
    single = random_trace(5, requests=16, vocab=400)
    twice = single.select(np.repeat(np.arange(16), 2))
    naive = fit_request_rates(twice, np.arange(32)).held_out_r2
    honest = fit_request_rates(twice, np.repeat(np.arange(16), 2)).held_out_r2
    assert naive > 0.4 > 0.2 > honest


def test_large_profiles_are_drawn_from_by_group_and_a_seed_decides():
    trace, groups = random_trace(2, requests=40), np.repeat(np.arange(20), 2)
    fit = fit_request_rates(trace, groups, max_requests=11, seed=1)
    assert 2 <= len(fit.requests) <= 11
    routed = np.flatnonzero(np.diff(trace.request_offsets) > 0)
    for g in np.unique(groups[fit.requests]):
        assert set(routed[groups[routed] == g]) <= set(fit.requests)
    again = fit_request_rates(trace, groups, max_requests=11, seed=1)
    assert (fit.requests == again.requests).all()
    assert (fit.held_out == again.held_out).all()
    assert (fit_request_rates(trace, groups, max_requests=11, seed=2).requests != fit.requests).any()


def test_requests_without_routed_tokens_are_left_out():
    trace = random_trace(7, requests=12)
    lengths = np.diff(trace.request_offsets)
    fit = fit_request_rates(trace, np.arange(12))
    assert fit.requests.tolist() == np.flatnonzero(lengths).tolist()
    assert np.isfinite(fit.held_out).all()
    assert fit.mean_length == pytest.approx((trace.phase == DECODE).sum() / (lengths > 0).sum())


def test_the_same_prompt_everywhere_gives_the_mean():
    """No token tells requests apart: idf is zero, so every score is the bias."""
    trace = random_trace(8, requests=6)
    trace = make_trace([[1, 2]] * 4, trace.expert_ids[:8], [[3, 4]] * 4, vocab_size=20, num_experts=8)
    fit = fit_request_rates(trace, np.arange(4))
    table = project(fit, hosted(alternating(fit.shape, 2)))
    np.testing.assert_allclose(map_scores(table, trace), np.tile(table.bias, (4, 1)), atol=1e-6)
    assert np.isfinite(table.prices).all()


def test_prices_even_the_load_by_hand():
    """Three of four equal requests prefer group 0, by 1, 2 and 3: a price difference between 1 and 2 moves one."""
    scores = np.array([[1.0, 0], [2, 0], [3, 0], [0, 5]])
    prices = load_prices(scores, np.ones(4), 1.0)
    assert 1 - 0.05 <= prices[0] - prices[1] <= 2 + 0.05


def test_what_cannot_be_is_refused():
    trace = random_trace(0, requests=6)
    with pytest.raises(ValueError, match="6 requests have duplicate groups of shape"):
        fit_request_rates(trace, np.arange(5))
    with pytest.raises(ValueError, match="at least two distinct routed requests"):
        fit_request_rates(trace, np.zeros(6, int))
    fit = fit_request_rates(trace, np.arange(6))
    with pytest.raises(ValueError, match="hosted has shape"):
        project(fit, np.zeros((1, 8, 2), bool))


def test_the_weights_of_wide_targets_are_chosen_by_a_sketch(monkeypatch):
    """Targets that words tell without noise: the small ridge and no routing, by all columns and by four of them."""
    rng = np.random.default_rng(0)
    views = rng.normal(size=(30, 5))
    targets = (views @ rng.normal(size=(5, 24))).astype(np.float32)
    noise = rng.normal(size=(30, 5))
    search = request_map._Regression(targets, np.ones(30), np.arange(30))
    kernels = views @ views.T, noise @ noise.T

    monkeypatch.setattr(request_map, "ROUTING_WEIGHTS", (0.0, 5.0))
    monkeypatch.setattr(request_map, "RIDGES", (1e-3, 1e3))

    def chosen():
        return search.choose(*kernels, seed=0)

    everything = chosen()
    monkeypatch.setattr(request_map, "SKETCH", 4)
    assert chosen() == everything == (0.0, 1e-3)


@given(st.integers(0, 9999), st.integers(1, 40))
def test_at_most_so_many_requests_are_drawn_and_duplicates_stay_together(seed, most):
    rng = np.random.default_rng(seed)
    lengths, groups = rng.integers(0, 3, 40), rng.integers(8, size=40) ** 2 // 8
    chosen = request_map._choose(lengths, groups, most, seed)
    routed = np.flatnonzero(lengths > 0)
    assert len(chosen) <= max(most, 0)
    assert (np.diff(chosen) > 0).all()
    assert set(chosen) == set(routed[np.isin(groups[routed], groups[chosen])])
    assert len(chosen) == len(routed) or len(routed) > most


def test_a_load_within_its_limit_has_no_price_by_hand():
    """Of five equal requests three prefer group 0: a load of 1.2 of the mean."""
    scores = np.array([[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 2)
    assert load_prices(scores, np.ones(5), 1.25).tolist() == [0.0, 0.0]
    assert load_prices(scores, np.ones(5), 1.1)[0] > 0
