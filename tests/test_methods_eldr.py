"""The field's methods through plan, file and replay; the rules by which others send requests to groups."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import make_trace, planted_trace, random_trace

from lab.methods import ALL
from lab.methods import eldr as baselines
from lab.methods.eldr import balanced_kmeans, eldr, request_signatures
from semmoe.evaluation.online import BATCH_LEAD, schedule_batch, schedule_requests
from semmoe.evaluation.replay import replay
from semmoe.placement import linear
from semmoe.placement.methods import find_method, obstacle
from semmoe.plan import load_plan, save_plan
from semmoe.requests.capacity import CapacityScheduler
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology

DP4, HYBRID, TP4 = Topology(ep_size=4, dp_size=4), Topology(ep_size=4, dp_size=2), Topology(ep_size=4)
REQUEST_METHODS = [name for name in ALL if find_method(name).needs_groups]
FIELD = [*REQUEST_METHODS, "lab.methods.exflow", "lab.methods.moetuner", "lab.methods.grace"]


def solved(method, topology, trace=None, **changes):
    return solve(trace or random_trace(0, requests=30), topology, SolveSettings(method=method, **changes))


@pytest.mark.parametrize("topology", [TP4, DP4, HYBRID])
@pytest.mark.parametrize("method", FIELD)
def test_a_plan_is_saved_loaded_and_replayed_the_same(method, topology, tmp_path):
    if obstacle(method, topology, 0):
        return
    trace, plan = random_trace(1, requests=30), solved(method, topology)
    save_plan(plan, tmp_path / "plan")
    loaded = load_plan(tmp_path / "plan")
    assert loaded.settings == plan.settings
    measure = ReplaySettings(batch_tokens=16)
    assert replay(trace, loaded, measure).as_dict() == replay(trace, plan, measure).as_dict()
    save_plan(solved(method, topology), tmp_path / "again")
    for name in ("plan.json", "plan.safetensors"):
        assert (tmp_path / "plan" / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


@pytest.mark.parametrize(
    ("method", "read"),
    [("least-loaded", set()), ("lab.methods.eldr", {"seed"}), ("lab.methods.exflow", {"seed"}),
     ("lab.methods.grace", {"seed"}), ("lab.methods.moetuner", {"gap"})],
)  # fmt: skip
def test_a_plan_names_the_settings_that_shaped_it(method, read):
    assert set(solved(method, DP4).settings) == {"method", "redundant_experts"} | read


def test_the_gap_of_moetuner_s_programs_is_recorded():
    gap = solved("lab.methods.moetuner", TP4).settings["gap"]
    assert 0 <= gap["clusters"] < 0.2
    assert gap["ranks"] == 0


@pytest.mark.parametrize("method", REQUEST_METHODS)
def test_methods_for_requests_leave_experts_in_order(method):
    plan = solved(method, HYBRID)
    expected = linear.place(3, 8, 4).physical_to_logical_map
    np.testing.assert_array_equal(plan.placement.physical_to_logical_map, expected)
    assert not plan.tokens.by_tables


def test_what_does_not_apply_is_refused_with_the_reason():
    for method in REQUEST_METHODS:
        with pytest.raises(ValueError, match=f"method {method} does not apply: .*--attention dp or hybrid"):
            solved(method, TP4)
    for method in [name for name in ALL if not find_method(name).copies and name not in REQUEST_METHODS]:
        with pytest.raises(ValueError, match=f"method {method} does not apply: it has no redundant experts"):
            solve(random_trace(0), TP4, SolveSettings(method=method, redundant_experts=4))
    for method in ALL:
        assert obstacle(method, DP4, 0) is None
    few = random_trace(0, requests=3)
    with pytest.raises(ValueError, match="routed requests cannot be clustered into 4 groups"):
        solved("lab.methods.eldr", DP4, few)


def test_least_loaded_follows_the_tokens_that_requests_turn_out_to_have():
    """Two groups; the first request is long. Round-robin would send the third to it again."""
    plan = solved("least-loaded", Topology(ep_size=2, dp_size=2))
    prompts, lengths = [[1]] * 6, np.array([1000, 1, 1, 1, 1, 1])
    assert schedule_requests(prompts, plan, lengths).tolist() == [0, 1, 1, 1, 1, 1]
    assert schedule_requests(prompts, plan).tolist() == [0, 1, 0, 1, 0, 1]
    assert replay(random_trace(7, requests=200), plan, ReplaySettings()).token_max_over_mean < 1.05


def test_signatures_by_hand():
    """Three requests; expert 0 is chosen by all, so it says nothing: idf of 1 and 2 is log(4 / 2) and log(4 / 3)."""
    trace = make_trace([[0], [1], [2]], [[[0, 1]], [[0, 2]], [[2, 0]]])
    signatures, idf = request_signatures(trace)
    np.testing.assert_allclose(idf, np.log([4 / 4, 4 / 2, 4 / 3, 4 / 1]))
    np.testing.assert_allclose(signatures.toarray(), [[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 0]])
    same = make_trace([[0, 0], [1]], [[[0, 1]], [[0, 1]], [[1, 0]]])
    signatures, _ = request_signatures(same)  # every request chooses the same: counts as they are
    np.testing.assert_allclose(signatures.toarray(), [[0.5**0.5, 0.5**0.5, 0, 0]] * 2)


@given(st.integers(0, 9999), st.integers(2, 3))
@settings(max_examples=25, deadline=None)
def test_balanced_clusters_are_full_and_assigned_best(seed, clusters):
    """The last assignment against enumeration, for the centroids that it was made by."""
    rng = np.random.default_rng(seed)
    rows = rng.random((6, 5))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    labels, centroids = balanced_kmeans(rows, clusters, np.random.default_rng(seed))
    assert np.bincount(labels, minlength=clusters).max() == 6 // clusters
    gain = rows @ centroids.T
    every = set(permutations(np.arange(6) // (6 // clusters)))
    best = max(gain[np.arange(6), list(choice)].sum() for choice in every)
    assert gain[np.arange(6), labels].sum() == pytest.approx(best)
    np.testing.assert_allclose(np.linalg.norm(centroids, axis=1), 1)


def test_alike_requests_are_no_trouble():
    labels, _ = balanced_kmeans(np.ones((7, 1)), 3, np.random.default_rng(0))
    assert np.bincount(labels, minlength=3).max() == 3


def test_eldr_finds_planted_groups():
    trace, _ = planted_trace(4, 1, requests_per_group=10)
    plan = solved("lab.methods.eldr", DP4, trace)
    groups = schedule_requests([trace.prompt(r) for r in range(trace.num_requests)], plan)
    assert all(len(set(groups[kind::4].tolist())) == 1 for kind in range(4))
    assert len(set(groups[:4].tolist())) == 4


def test_eldr_s_scores_are_products_with_centroids():
    """By the definition, for one prompt: token means times idf, onto centred centroids, over the root of squares."""
    trace = random_trace(4, requests=40)
    table = eldr(trace, 3, 0)
    signatures, idf = request_signatures(trace)
    used = np.flatnonzero(np.diff(trace.request_offsets) > 0)
    rng = np.random.default_rng(0)
    chosen = np.sort(rng.choice(used, len(used), replace=False))
    _, centroids = balanced_kmeans(signatures[chosen].toarray(), 3, rng)
    one_hot = (trace.expert_ids[..., None] == np.arange(8)).sum(axis=2).reshape(trace.num_tokens, -1)
    rows = np.stack(
        [one_hot[trace.token_ids == v].mean(axis=0) if (trace.token_ids == v).any() else one_hot.mean(axis=0)
         for v in range(20)] + [one_hot.mean(axis=0)]
    ) * idf  # fmt: skip
    expected = rows @ (centroids - centroids.mean(axis=0)).T
    scale = float((expected / table.token_scores)[0, 0])
    np.testing.assert_allclose(table.token_scores * scale, expected, rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(table.token_weights, (rows**2).sum(axis=1), rtol=1e-5)
    assert scale > 0


def test_few_requests_are_drawn_from_many(monkeypatch):
    monkeypatch.setattr(baselines, "MAX_REQUESTS", 8)
    trace = random_trace(0, requests=60)
    one, two = (eldr(trace, 4, 0) for _ in range(2))
    np.testing.assert_array_equal(one.token_scores, two.token_scores)
    assert replace(one, token_scores=two.token_scores).mean_length > 0


@pytest.mark.parametrize("method", ["semmoe", "lab.methods.eldr"])
def test_a_batch_at_hand_is_shared_out_by_its_tokens_and_gains_locality(method):
    plan = solved(method, Topology(ep_size=4, dp_size=4))
    rng, trace = np.random.default_rng(0), random_trace(5, requests=80)
    prompts = [np.tile(trace.prompt(r), rng.integers(1, 6)) for r in range(trace.num_requests)]
    groups = schedule_batch(prompts, plan, new_tokens=4)
    tokens = np.bincount(groups, [len(p) + 4 for p in prompts], 4)
    assert tokens.max() / tokens.mean() <= 1 + BATCH_LEAD
    scores = np.array([CapacityScheduler(plan.requests).score(p) for p in prompts])
    weight = np.array([len(p) + 4 for p in prompts])
    gained = (scores[np.arange(80), groups] * weight).sum()
    assert gained > (scores.mean(axis=1) * weight).sum()
