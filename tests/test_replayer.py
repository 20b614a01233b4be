"""Replaying plans: planted structure pays in full, and totals agree with loops."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_fingerprint, make_trace, planted_trace, random_trace, with_prefill
from test_tokens_slices import random_tables

from semmoe.core import DECODE, PREFILL
from semmoe.evaluation.online import schedule_live, schedule_requests
from semmoe.evaluation.replay import (
    cut_batches,
    profiled_requests,
    replay,
    scheduled_by_answers,
    token_groups,
    token_homes,
)
from semmoe.placement.linear import vanilla_plan
from semmoe.requests.policy import PromptScores
from semmoe.settings import CoclusterSettings, PaperSettings, ReplaySettings, SolveSettings
from semmoe.solver import score, solve, solve_methods
from semmoe.tokens.copychoice import preferred_copies
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology
from semmoe.traces.split import split
from semmoe.traces.trace import open_trace

QUICK = PaperSettings(steps=3, swaps_per_expert=20)
TOPOLOGIES = [(1, 4), (4, 1), (2, 2)]


def test_two_batches_of_a_hand_made_trace():
    """One layer, one expert a token, two ranks by position: the batches are 0011 and 0101, experts 0 0 1 0 and 1 1 1 0.

    Local are three pairs of the first and two of the second; loads are (3, 1) and (1, 3).
    """
    experts = np.array([0, 0, 1, 0, 1, 1, 1, 0])[:, None, None]
    trace = make_trace([[0] * 8], experts, num_experts=2)
    measure = ReplaySettings(batch_tokens=4, batches="prefill")
    result = replay(trace, vanilla_plan(trace.fingerprint, Topology(ep_size=2)), measure)
    assert (result.total.pairs, result.total.local_pairs) == (8, 4)
    assert result.total.rows.tolist() == [[0, 2], [2, 0]]
    assert result.total.load.tolist() == [4, 4]
    assert result.load_max_over_mean.tolist() == [1.5]
    assert result.load_max_over_median.tolist() == [1.5]
    assert (result.num_batches, result.tokens_per_batch) == (2, 4)
    assert result.rows_per_batch().tolist() == [[[0, 1], [1, 0]]]
    assert result.busiest_pairs.tolist() == [3]
    assert result.predicted_lar is None
    assert result.unknown_share == 0


@pytest.mark.parametrize(("groups", "ranks"), TOPOLOGIES)
def test_planted_structure_pays_in_full_and_contiguous_experts_pay_by_chance(groups, ranks):
    trace, _ = planted_trace(groups, ranks, length=40)
    topology = Topology(ep_size=4, dp_size=groups)
    measure = ReplaySettings(batch_tokens=40, batches="prefill")
    assert replay(trace, solve(trace, topology, SolveSettings(method="paper")), measure).total.lar == 1.0
    linear = replay(trace, solve(trace, topology, SolveSettings(method="linear")), measure)
    assert linear.total.lar == pytest.approx(1 / 4, abs=0.04)


def test_planted_structure_pays_on_requests_not_seen_before():
    profile, evaluation = (planted_trace(4, 1, seed=1)[0].select(half) for half in (np.arange(12), np.arange(12, 24)))
    plan = solve(profile, Topology(ep_size=4, dp_size=4), SolveSettings(method="paper"))
    result = replay(evaluation, plan, ReplaySettings(batch_tokens=48))
    assert result.total.lar == 1.0
    assert result.token_max_over_mean == 1.0


def test_few_requests_at_a_time_leave_less_choice():
    """Four kinds in turns, each at home on one rank: a server with few lets no rank lead far and sends some away, in
    whatever order they were recorded; one with many sends none.
    """
    trace = planted_trace(4, 1, requests_per_group=10)[0]
    plan = solve(trace, Topology(ep_size=4, dp_size=4), SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10)))
    many, few = (replay(trace, plan, ReplaySettings(running=running)).total.lar for running in (0, 3))
    assert many == 1.0
    assert few < 0.9
    assert replay(trace, plan, groups=schedule_live(trace, plan, 12)).total.lar == 1.0, "in turns as recorded"
    order = np.random.default_rng(0).permutation(40)
    groups = np.zeros(40, np.int64)
    groups[order] = schedule_live(trace.select(order), plan, 12)
    assert replay(trace, plan, groups=groups).total.lar == few


def test_metrics_have_their_json_names():
    trace = random_trace(0)
    result = replay(
        trace, solve(trace, Topology(ep_size=4), SolveSettings(method="paper", paper=QUICK)), ReplaySettings()
    ).as_dict()
    shared = {"lar", "remote_ranks_per_token", "load_max_over_mean", "load_max_over_median"}
    assert result["load_max_layer"] == max(layer["load_max_over_mean"] for layer in result["layers"])
    assert result["load_max_layer"] > result["load_max_over_mean"]
    assert set(result) == shared | {
        "load_max_layer",
        "token_max_over_mean", "unknown_token_share", "unknown_token_lar", "predicted_lar",
        "rows_per_rank_pair", "rows_by_kind", "remote_nodes_per_token", "layers", "num_batches", "tokens_per_batch",
    }  # fmt: skip
    rows = np.array(result["rows_per_rank_pair"])
    assert rows.sum() / (trace.num_tokens * 3) == pytest.approx(result["remote_ranks_per_token"])
    assert [set(layer) for layer in result["layers"]] == [
        shared | {"layer", "predicted_lar", "load_per_rank", "remote_nodes_per_token"}
    ] * 3
    assert [sum(layer["load_per_rank"]) for layer in result["layers"]] == [trace.num_tokens * 2] * 3
    assert [layer["layer"] for layer in result["layers"]] == [0, 1, 2]
    assert json.loads(json.dumps(result)) == result
    assert result["lar"] == pytest.approx(np.mean([layer["lar"] for layer in result["layers"]]))


@pytest.mark.parametrize("method", ["paper", "linear", "eplb"])
@pytest.mark.parametrize(("groups", "ranks"), TOPOLOGIES)
@given(seed=st.integers(0, 9999))
def test_totals_agree_with_loops(groups, ranks, method, seed):
    profile, trace = split(random_trace(seed, requests=14), 0.5, seed)
    topology = Topology(ep_size=4, dp_size=groups)
    redundant = 4 if method == "eplb" else 0
    settings = SolveSettings(method=method, paper=replace(QUICK, lookback=1 + seed % 2), redundant_experts=redundant)
    plan = solve(profile, topology, settings) if profile.num_tokens else vanilla_plan(trace.fingerprint, topology)
    if trace.num_tokens == 0:
        return
    measure = ReplaySettings(batch_tokens=9, seed=seed)
    result = replay(trace, plan, measure)
    choice = preferred_copies(plan.placement, topology)
    expected = oracles.replay(trace, plan, choice, cut_batches(trace.num_tokens, measure))
    for layer, imbalance, (local, rows, load, mean) in zip(
        result.layers, result.load_max_over_mean, expected, strict=True
    ):
        assert layer.local_pairs == local
        np.testing.assert_array_equal(layer.rows, rows)
        np.testing.assert_array_equal(layer.load, load)
        assert imbalance == pytest.approx(mean)


def test_profiled_requests_are_counted_one_by_one():
    """A plan of the first five of twelve; a request that routed nothing was not learnt from."""
    trace = random_trace(3)
    five = trace.select(np.arange(5))
    plan = solve(five, Topology(ep_size=4), SolveSettings(method="linear"))
    learnt = int((np.diff(five.request_offsets) > 0).sum())
    assert learnt > 0
    assert profiled_requests(trace, plan) == learnt
    assert profiled_requests(trace.select(np.arange(11, 1, -1)), plan) == int(
        (np.diff(five.request_offsets)[2:] > 0).sum()
    )
    assert profiled_requests(random_trace(4), plan) == 0


def test_a_plan_without_hashes_is_known_by_its_whole_trace_or_not_at_all():
    trace = random_trace(3)
    plan = replace(solve(trace, Topology(ep_size=4), SolveSettings(method="linear")), profiled_requests=None)
    assert profiled_requests(trace, plan) == trace.num_requests
    assert profiled_requests(trace.select(np.arange(5)), plan) is None


def test_requests_differ_where_prompt_and_answer_are_divided_elsewhere():
    experts = np.zeros((3, 1, 1))
    hashes = [
        make_trace([routed], experts[: len(routed)], prompts=[prompt], num_experts=2).request_hashes()[0]
        for prompt, routed in (([1, 2], [3]), ([1], [2, 3]), ([1, 2, 3], []), ([1, 2], [3]))
    ]
    assert len(set(hashes)) == 3
    assert hashes[0] == hashes[3]


def test_answers_that_stand_for_prompts_are_counted_where_requests_are_scheduled_by_them():
    """Request 0 has its answer for a prompt, 1 a prompt of its own, 2 is a prompt that was routed in prefill."""
    trace = make_trace([[1, 2], [3, 4], [5, 0]], np.zeros((6, 1, 1)), [[1, 2], [0], [5, 0]], num_experts=4)
    trace = replace(trace, phase=np.array([DECODE] * 4 + [PREFILL] * 2, np.uint8))
    assert scheduled_by_answers(trace, Topology(ep_size=4, dp_size=4)) == 1
    assert scheduled_by_answers(trace, Topology(ep_size=4, dp_size=2)) == 1
    assert scheduled_by_answers(trace, Topology(ep_size=4)) == 0
    assert scheduled_by_answers(with_prefill(trace, 6), Topology(ep_size=4, dp_size=4)) == 0


def test_requests_without_tables_go_to_groups_in_turn():
    trace = random_trace(0, requests=7)
    plan = vanilla_plan(trace.fingerprint, Topology(ep_size=2, dp_size=2))
    assert schedule_requests([trace.prompt(r) for r in range(trace.num_requests)], plan).tolist() == [
        0,
        1,
        0,
        1,
        0,
        1,
        0,
    ]


def test_token_imbalance_counts_routed_tokens_of_each_group():
    trace = make_trace([[0] * 6, [0] * 2, [0] * 3], np.zeros((11, 1, 1)), num_experts=2)
    plan = vanilla_plan(trace.fingerprint, Topology(ep_size=2, dp_size=2))
    assert replay(trace, plan, ReplaySettings()).token_max_over_mean == pytest.approx(9 / 5.5)


def test_a_group_without_tokens_counts_in_the_balance():
    trace = make_trace([[0] * 6], np.zeros((6, 1, 1)), num_experts=4)
    plan = vanilla_plan(trace.fingerprint, Topology(ep_size=4, dp_size=4))
    assert replay(trace, plan, ReplaySettings()).token_max_over_mean == 4.0


@pytest.mark.parametrize("lookback", [0, 1, 2])
def test_tokens_are_scored_by_their_own_experts_at_the_layers_before(lookback):
    trace, tables, topology = random_trace(1), random_tables(1, lookback, 0), Topology(ep_size=4, dp_size=2)
    plan = replace(vanilla_plan(trace.fingerprint, topology), tokens=tables)
    group = (np.arange(trace.num_requests) % 2)[trace.request_of_token()]
    homes = token_homes(trace, plan, ReplaySettings(batches="prefill"), group)
    for layer, (evidence, _) in enumerate(homes):
        for t in range(trace.num_tokens):
            earlier = [trace.expert_ids[t, layer - back] for back in range(1, min(layer, lookback) + 1)]
            expected = oracles.score(tables, layer, 2 * group[t], 2, int(trace.token_ids[t]), earlier, None)
            assert evidence.scores[t].tolist() == expected


@pytest.mark.parametrize(("batches", "knows"), [("prefill", False), ("mixed", True)])
def test_tokens_know_those_before_them_in_decode_and_not_in_prefill(batches, knows):
    trace, topology = random_trace(0), Topology(ep_size=4)
    plan = solve(trace, topology, SolveSettings(method="semmoe", cocluster=CoclusterSettings(starts=1, steps=10)))
    other = plan.tokens.history_scores.copy()
    other[:, :-1] += 500  # all but the row for no token before
    changed = replace(plan, tokens=replace(plan.tokens, history_scores=other))
    settings = ReplaySettings(batches=batches)
    found = [
        [evidence.scores for evidence, _ in token_homes(trace, p, settings, token_groups(trace, p, settings))]
        for p in (plan, changed)
    ]
    assert np.array_equal(*found) == (not knows)


def test_tokens_that_the_prior_serves_are_counted():
    profile = make_trace([[0, 1], [1, 0]], np.tile([[0, 1]], (4, 2, 1)))
    trace = make_trace([[0, 5, 5, 4]], np.tile([[0, 1]], (4, 2, 1)))
    plan = solve(profile, Topology(ep_size=2), SolveSettings(method="paper", paper=QUICK))
    assert replay(trace, plan, ReplaySettings()).unknown_share == 0.75


def test_locality_of_unknown_tokens_by_hand():
    """Experts 0 and 1 on rank 0, 2 and 3 on rank 1; token 5 is new and goes where it is not at home."""
    profile = make_trace([[0, 1], [1, 0]], np.tile([[0, 1]], (4, 2, 1)), num_experts=4)
    trace = make_trace([[0, 5]], np.array([[[0, 1]], [[0, 1]]]).repeat(2, axis=1), num_experts=4)
    plan = solve(profile, Topology(ep_size=2), SolveSettings(method="paper", paper=QUICK))
    result = replay(trace, plan, ReplaySettings())
    hosts = plan.placement.hosts
    known_home = hosts[0][:, [0, 1]].sum(axis=1).argmax()
    expected = [hosts[l][1 - known_home, [0, 1]].mean() for l in range(2)]
    assert result.unknown_lar == pytest.approx(np.mean(expected))
    assert result.as_dict()["unknown_token_lar"] == result.unknown_lar
    assert replay(profile, plan, ReplaySettings()).unknown_lar is None
    strangers = make_trace([[5] * 5], profile.expert_ids[[0, 1, 2, 3, 0]], num_experts=4)
    result = replay(strangers, plan, ReplaySettings())
    assert result.unknown_lar == result.total.lar


@pytest.mark.parametrize(("ep_size", "dp_size", "expected"), [(2, 1, 1 / 4), (2, 2, 2 / 3), (4, 2, 1 / 4)])
def test_unknown_are_routed_tokens_where_tokens_are_shuffled_and_prompt_tokens_where_only_requests_are_scheduled(
    ep_size, dp_size, expected
):
    profile = make_trace([[0, 1], [1, 0]], np.tile([[0, 1]], (4, 2, 1)), prompts=[[2], [2]])
    trace = make_trace([[0, 1], [1, 5]], np.tile([[0, 1]], (4, 2, 1)), prompts=[[2, 0], [1]])
    plan = solve(
        profile,
        Topology(ep_size=ep_size, dp_size=dp_size),
        SolveSettings(method="paper", paper=replace(QUICK, lookback=1)),
    )
    assert replay(trace, plan, ReplaySettings()).unknown_share == pytest.approx(expected)


def test_unknown_to_a_request_map_are_prompt_tokens_that_weigh_as_much_as_one_never_seen():
    trace = make_trace([[0], [1]], np.zeros((2, 1, 1)), prompts=[[0, 5, 1], [5, 5]])
    zeros, weights = np.zeros(2, np.float32), np.array([1, 2, 1, 1, 1, 3, 3], np.float32)
    table = PromptScores(token_scores=np.zeros((7, 2), np.float32), token_weights=weights, bias=zeros, prices=zeros,
                       score_spread=0.0, mean_length=1.0)  # fmt: skip
    plan = vanilla_plan(trace.fingerprint, Topology(ep_size=2, dp_size=2))
    plan = replace(plan, tokens=ByPosition(), requests=table)
    assert replay(trace, plan, ReplaySettings()).unknown_share == pytest.approx(3 / 5)


def test_prompts_without_a_token_leave_nothing_unknown():
    profile, _ = planted_trace(2, 1)
    plan = solve(profile, Topology(ep_size=2, dp_size=2), SolveSettings(method="paper", paper=QUICK))
    nothing = replace(profile, prompt_ids=profile.prompt_ids[:0], prompt_offsets=0 * profile.prompt_offsets)
    assert replay(nothing, plan, ReplaySettings()).unknown_share == 0


def test_prefill_batches_are_consecutive_and_mixed_ones_a_permutation():
    prefill = cut_batches(10, ReplaySettings(batch_tokens=4, batches="prefill"))
    assert [batch.tolist() for batch in prefill] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    mixed = cut_batches(10, ReplaySettings(batch_tokens=5))
    assert sorted(np.concatenate(mixed)) == list(range(10))
    assert np.concatenate(mixed).tolist() != list(range(10))
    again, other = (cut_batches(10, ReplaySettings(batch_tokens=5, seed=seed)) for seed in (0, 1))
    np.testing.assert_array_equal(mixed, again)
    assert np.concatenate(other).tolist() != np.concatenate(mixed).tolist()


def test_a_batch_larger_than_the_trace_is_the_trace():
    assert [batch.tolist() for batch in cut_batches(3, ReplaySettings(batches="prefill"))] == [[0, 1, 2]]


@given(st.integers(1, 50), st.integers(1, 20), st.sampled_from(["mixed", "prefill"]))
def test_batches_never_repeat_a_token_and_leave_less_than_one_batch_out(tokens, batch_tokens, batches):
    cut = cut_batches(tokens, ReplaySettings(batch_tokens=batch_tokens, batches=batches))
    rows = np.concatenate(cut)
    assert len(set(rows.tolist())) == len(rows)
    assert tokens - len(rows) < batch_tokens
    assert {len(batch) for batch in cut} == {min(batch_tokens, tokens)}


def test_a_plan_for_another_model_is_refused():
    plan = vanilla_plan(make_fingerprint(num_experts=8, architecture_hash="other"), Topology(ep_size=2))
    with pytest.raises(ValueError, match="another model or tokenizer: vocab_size"):
        replay(random_trace(0), plan, ReplaySettings())


def test_a_trace_of_one_token_is_replayed():
    trace = make_trace([[0]], np.zeros((1, 1, 1)), num_experts=2)
    result = replay(trace, vanilla_plan(trace.fingerprint, Topology(ep_size=2)), ReplaySettings())
    assert (result.total.tokens, result.total.lar) == (1, 1.0)


def test_a_trace_without_routed_tokens_is_refused():
    trace = random_trace(0, longest=0)
    with pytest.raises(ValueError, match="no routed token"):
        replay(trace, vanilla_plan(trace.fingerprint, Topology(ep_size=2)), ReplaySettings())


REAL_TRACE = Path(__file__).parents[1] / "../shared/data/traces/gpt-oss-20b_decode.npz"


@pytest.mark.skipif(not REAL_TRACE.exists(), reason="the gpt-oss-20b decode trace is not there")
@pytest.mark.parametrize(("attention", "ep_size", "least"), [("tp", 8, 0.30), ("dp", 4, 0.26)])
def test_a_real_trace_gains_locality(attention, ep_size, least):
    profile, evaluation = split(open_trace(REAL_TRACE), 0.2, seed=0)
    plans, _ = solve_methods(profile, Topology.for_attention(attention, ep_size), ["paper"], SolveSettings())
    scores = score(evaluation, plans, ReplaySettings(batch_tokens=1024, batches="mixed"))
    assert scores["paper"]["lar"] >= least
    assert scores["linear"]["lar"] == pytest.approx(1 / ep_size, abs=0.01)
    assert scores["paper"]["bytes_ratio"] < 1
