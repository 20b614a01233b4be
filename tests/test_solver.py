"""From a profile to a plan, and what it is expected to gain."""

from dataclasses import asdict, replace

import numpy as np
import pytest
from synthetic import make_fingerprint, planted_trace, random_trace

from semmoe.cli.solve import solve_expected
from semmoe.core import NEVER, PRIOR
from semmoe.costs.links import PhaseLinks, load_links
from semmoe.costs.timing import LayerShape, hooks, layer_time
from semmoe.evaluation.forecast import expect
from semmoe.evaluation.replay import replay
from semmoe.io import console
from semmoe.placement.linear import vanilla_plan
from semmoe.placement.problem import Problem
from semmoe.settings import GenerateSettings, PaperSettings, ReplaySettings, SolveSettings
from semmoe.solver import moved_experts, score, solve, solve_methods
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology
from semmoe.traces.split import split

QUICK = PaperSettings(steps=3, swaps_per_expert=20)
TP4 = Topology(ep_size=4)


def test_linear_places_experts_in_order_and_reads_no_seed():
    trace = random_trace(0)
    plan = solve(trace, TP4, SolveSettings(method="linear", redundant_experts=4))
    assert plan.placement.physical_to_logical_map.tolist() == [[*range(8), 0, 1, 2, 3]] * 3
    assert (plan.tokens.kind, plan.requests.kind) == ("by-position", "round-robin")
    assert plan.settings == {"method": "linear", "redundant_experts": 4}
    assert (plan.method, plan.trace_hash, plan.fingerprint) == ("linear", trace.digest(), trace.fingerprint)


def test_eplb_balances_the_load_of_the_profile():
    trace = random_trace(1)
    plan = solve(trace, TP4, SolveSettings(method="eplb", redundant_experts=4))
    assert plan.placement.physical_to_logical_map.shape == (3, 12)
    load = np.array([np.bincount(trace.expert_ids[:, l].ravel(), minlength=8) for l in range(3)])
    copies = plan.placement.logical_replica_count
    assert (copies[np.arange(3), load.argmax(axis=1)] >= 2).all()
    assert (plan.tokens.kind, plan.requests.kind) == ("by-position", "round-robin")


@pytest.mark.parametrize(("dp_size", "requests", "shuffle"), [(1, False, True), (4, True, False), (2, True, True)])
def test_the_paper_s_method_schedules_what_the_topology_asks_for(dp_size, requests, shuffle):
    plan = solve(
        random_trace(0),
        Topology(ep_size=4, dp_size=dp_size),
        SolveSettings(method="paper", paper=replace(QUICK, lookback=1)),
    )
    assert plan.requests.by_tables == requests
    assert plan.tokens.by_tables == shuffle
    expected = asdict(SolveSettings(method="paper", paper=replace(QUICK, lookback=1)))
    assert plan.settings == {k: v for k, v in expected.items() if k not in ("predictor", "cocluster", "phase")}


def test_the_seed_reaches_the_solver():
    trace = random_trace(2, requests=20)
    maps = [
        solve(trace, TP4, SolveSettings(method="paper", paper=QUICK, seed=seed)).placement.physical_to_logical_map
        for seed in (0, 0, 1, 2, 3)
    ]
    np.testing.assert_array_equal(maps[0], maps[1])
    assert any((maps[0] != other).any() for other in maps[2:])


def test_embeddings_reach_the_tables():
    trace = random_trace(0, requests=2, vocab=40)
    embeddings = np.random.default_rng(0).normal(size=(40, 4))
    settings = SolveSettings(method="paper", paper=QUICK)
    plain, with_neighbours = solve(trace, TP4, settings), solve(trace, TP4, settings, embeddings)
    assert (plain.tokens.token_source[:-1] == PRIOR).any()
    assert not (with_neighbours.tokens.token_source[:-1] == PRIOR).any()


def test_embeddings_reach_the_request_table():
    trace = random_trace(0, requests=2, vocab=40)
    embeddings = np.random.default_rng(0).normal(size=(40, 4))
    topology, settings = Topology(ep_size=2, dp_size=2), SolveSettings(method="paper", paper=QUICK)
    plain, with_neighbours = solve(trace, topology, settings), solve(trace, topology, settings, embeddings)
    assert (plain.requests.request_source[:-1] == PRIOR).any()
    assert not (with_neighbours.requests.request_source[:-1] == PRIOR).any()


def test_a_trace_without_routed_tokens_is_refused():
    with pytest.raises(ValueError, match="holds no routed token"):
        solve(random_trace(0, longest=0), TP4, SolveSettings(method="linear"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "magic"}, "linear, eplb, .*, paper, semmoe, or .* dotted name, not 'magic'"),
        ({"method": "eplb", "redundant_experts": -1}, "must lie between 0 and .*, not -1"),
        ({"method": "paper", "redundant_experts": 4}, "no redundant experts"),
        (
            {"method": "lab.methods.moetuner", "redundant_experts": 4},
            "moetuner does not apply: it has no redundant experts",
        ),
    ],
)
def test_settings_that_no_method_serves_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        solve(random_trace(0), TP4, SolveSettings(**arguments))


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        (PaperSettings, {"steps": 0}),
        (PaperSettings, {"theta": 0.0}),
        (PaperSettings, {"theta": 1.0}),
        (ReplaySettings, {"batch_tokens": 0}),
        (ReplaySettings, {"batches": "random"}),
        (GenerateSettings, {"max_new_tokens": 0}),
        (GenerateSettings, {"batch_size": 0}),
        (GenerateSettings, {"dtype": "int8"}),
    ],
)
def test_settings_out_of_range_name_the_value(settings, arguments):
    (value,) = arguments.values()
    with pytest.raises(ValueError, match=f"{value}"):
        settings(**arguments)


def problem(trace, settings, topology=TP4):
    return Problem(trace=trace, topology=topology, settings=settings)


def test_expectation_is_the_replay_of_requests_held_out():
    trace, _ = planted_trace(1, 4)
    settings, measure = (
        SolveSettings(method="paper", paper=QUICK, seed=3),
        ReplaySettings(batch_tokens=16, batches="prefill"),
    )
    expected = expect(problem(trace, settings), measure, holdout=0.5)
    held_out, profile = split(trace, 0.5, 3)
    result = replay(held_out, solve(profile, TP4, settings), measure).as_dict()
    assert (expected["requests"], expected["holdout"], expected["batch_tokens"]) == (3, 0.5, 16)
    assert expected["lar"] == result["lar"]
    assert expected["layers"] == result["layers"]
    assert set(result) - set(expected) == {"rows_per_rank_pair"}


def faster(links, factor):
    """The same links with `factor` times the bandwidth and the same latency."""
    speeds = ("gigabytes_per_second", "all_reduce_gigabytes_per_second")
    tiers = {name: getattr(links, name) for name in ("inside_node", "between_nodes")}
    changed = {
        name: tier and tier.model_copy(update={speed: factor * getattr(tier, speed) for speed in speeds})
        for name, tier in tiers.items()
    }
    return links.model_copy(update=changed)


@pytest.mark.parametrize(
    ("name", "nodes", "attention"), [("pcie5", 1, "tp"), ("h200-400g", 2, "tp"), ("h200-400g", 2, "dp")]
)
def test_what_is_expected_elsewhere_is_the_verdict_on_those_links_and_batches(name, nodes, attention):
    trace, _ = planted_trace(4 if attention == "dp" else 1, 4 if attention == "tp" else 1, requests_per_group=8)
    settings, measure = SolveSettings(method="paper", paper=QUICK, seed=3), ReplaySettings(batch_tokens=16)
    shape, links = LayerShape(hidden_size=65_536, expert_size=64, top_k=2), load_links(name)
    topology = Topology.for_attention(attention, 4, num_nodes=nodes)

    def found(links):
        return expect(problem(trace, settings, topology), measure, PhaseLinks(links, links), shape, holdout=0.5)

    expected = found(links)
    elsewhere = expected["elsewhere"]
    tokens, gains = elsewhere["batch_tokens"], np.array(elsewhere["gains"])
    here = tokens.index(expected["tokens_per_batch"])
    assert gains.shape == (len(tokens), len(elsewhere["bandwidths"]))
    assert gains[here, elsewhere["bandwidths"].index(1.0)] == pytest.approx(expected["verdict"]["gain"])
    for factor in (0.125, 0.25, 4.0):
        gain = found(faster(links, factor))["verdict"]["gain"]
        assert gains[here, elsewhere["bandwidths"].index(factor)] == pytest.approx(gain)
    assert gains.max() - gains.min() > 0.05  # links and batches decide


def layer_seconds(found, links, shape, batch):
    """Mean time of a layer of `batch` times as many tokens as were replayed, without semmoe's kernels."""
    sizes = zip(found.rows_per_batch(links.all_to_all), found.busiest_pairs, strict=True)
    return np.mean([layer_time(batch * rows, batch * pairs, shape, TP4, links).total for rows, pairs in sizes])


def test_a_plan_is_shuffled_from_the_least_rows_for_which_that_pays():
    """Against the times themselves, at that number of rows and one below, on links that GPUs have."""
    trace, _ = planted_trace(1, 4, requests_per_group=8)
    settings, measure = SolveSettings(method="paper", paper=QUICK, seed=3), ReplaySettings(batch_tokens=16)
    shape, links = LayerShape(hidden_size=4096, expert_size=64, top_k=2), load_links("pcie5")
    expected = expect(problem(trace, settings), measure, PhaseLinks(links, links), shape, holdout=0.5)
    held_out, profile = split(trace, 0.5, 3)
    plan = solve(profile, TP4, settings)
    shuffled, contiguous = (replay(held_out, p, measure) for p in (plan, replace(plan, tokens=ByPosition())))
    least = expected["shuffle_from"]
    assert 16 < least < 10_000
    for rows in (least - 1, least):
        batch = rows / shuffled.tokens_per_batch
        saved = layer_seconds(contiguous, links, shape, batch) - layer_seconds(shuffled, links, shape, batch)
        assert (saved > hooks(rows, TP4, False, links) - hooks(rows, Topology(ep_size=4, dp_size=4), False, links)) == (
            rows == least
        )


@pytest.mark.parametrize(("links", "width", "least"), [("h200-nvlink", 64, NEVER), ("cpu", 64, 1)])
def test_rows_this_narrow_are_never_shuffled_on_gpus_and_always_on_cpus(links, width, least):
    trace, _ = planted_trace(1, 4, requests_per_group=8)
    settings, measure = SolveSettings(method="paper", paper=QUICK, seed=3), ReplaySettings(batch_tokens=16)
    found = load_links("h200-nvlink" if links == "cpu" else links)
    if links == "cpu":
        found = found.model_copy(update={"experts": found.experts.model_copy(update={"teraflops": 0.1})})
    shape = LayerShape(hidden_size=width, expert_size=64, top_k=2)
    both, slow = PhaseLinks(found, found), PhaseLinks(found, load_links("h200-nvlink"))
    assert expect(problem(trace, settings), measure, both, shape, holdout=0.5)["shuffle_from"] == least
    # a pass may have tokens of both phases, so the larger number counts
    assert expect(problem(trace, settings), measure, slow, shape, holdout=0.5)["shuffle_from"] == NEVER


def test_the_command_writes_the_number_into_the_plan():
    """From which `Shuffler.shuffles` decides."""
    trace, _ = planted_trace(1, 4, requests_per_group=8)
    links, shape = load_links("pcie5"), LayerShape(hidden_size=4096, expert_size=64, top_k=2)
    asked = problem(trace, SolveSettings(method="paper", paper=QUICK, seed=3))
    with console.bars() as bars:
        plan = solve_expected(asked, ReplaySettings(batch_tokens=16), PhaseLinks(links, links), shape, bars)
    assert plan.shuffle_from == plan.expected["shuffle_from"] > 1


def test_plans_without_token_tables_state_no_number():
    trace, _ = planted_trace(1, 4, requests_per_group=8)
    links, shape = load_links("h200-nvlink"), LayerShape(hidden_size=4096, expert_size=64, top_k=2)
    settings, measure = SolveSettings(method="eplb"), ReplaySettings(batch_tokens=16)
    found = expect(problem(trace, settings), measure, PhaseLinks(links, links), shape, holdout=0.5)
    assert "shuffle_from" not in found


def test_experts_that_moved_by_hand():
    """Of 0 1 | 2 3 on two ranks, experts 1 and 2 change places."""
    before = vanilla_plan(make_fingerprint(num_layers=1, num_experts=4), Topology(ep_size=2))
    order = np.array([[0, 2, 1, 3]], np.int32)
    after = replace(before, placement=replace(before.placement, physical_to_logical_map=order))
    assert moved_experts(after, before) == (2, 4)
    assert moved_experts(before, before) == (0, 4)


def test_a_plan_made_from_another_keeps_its_number():
    trace = random_trace(0)
    first = replace(solve(trace, TP4, SolveSettings()), shuffle_from=7)
    assert solve(trace, TP4, SolveSettings(), previous=first).shuffle_from == 7
    assert solve(trace, TP4, SolveSettings()).shuffle_from == 1


@pytest.mark.parametrize("redundant", [0, 4])
def test_a_plan_alone_is_charged_for_semmoe_s_kernels_and_for_a_choice_of_copies_where_it_has_copies(redundant):
    trace, _ = planted_trace(1, 4, requests_per_group=8)
    links, shape = load_links("h200-nvlink"), LayerShape(hidden_size=4096, expert_size=64, top_k=2)
    settings, measure = SolveSettings(method="eplb", redundant_experts=redundant), ReplaySettings(batch_tokens=16)
    expected = expect(problem(trace, settings), measure, PhaseLinks(links, links), shape, holdout=0.5)
    seconds = hooks(expected["tokens_per_batch"], TP4, redundant > 0, links)
    assert expected["hooks_us"] == pytest.approx(seconds * 1e6)
    assert expected["others"]["linear"]["hooks_us"] == 0


@pytest.mark.parametrize(("requests", "dp_size", "enough"), [(2, 1, False), (3, 1, True), (6, 4, False), (7, 4, True)])
def test_nothing_is_expected_of_too_few_requests(requests, dp_size, enough):
    topology = Topology(ep_size=4, dp_size=dp_size)
    trace, _ = planted_trace(1, 4, requests_per_group=requests)
    found = expect(problem(trace, SolveSettings(method="paper", paper=QUICK), topology), ReplaySettings(batch_tokens=8))
    assert (found is not None) == enough


def test_linear_is_always_solved_for_comparison():
    done = []
    plans, seconds = solve_methods(
        random_trace(0), TP4, ["eplb", "eplb"], SolveSettings(redundant_experts=4), done.append
    )
    assert list(plans) == list(seconds) == ["linear", "eplb"]
    assert done == [0, 1]
    assert plans["linear"].placement.physical_to_logical_map.shape == (3, 12)


def test_bytes_are_measured_by_those_of_linear():
    trace, _ = planted_trace(1, 4)
    plans, _ = solve_methods(trace, TP4, ["linear", "eplb", "paper"], SolveSettings())
    measure = ReplaySettings(batch_tokens=32, batches="prefill")
    scores = score(trace, plans, measure)
    assert scores["linear"]["bytes_ratio"] == 1.0
    assert scores["paper"]["bytes_ratio"] == 0.0
    rows = {name: replay(trace, plan, measure).total.rows.sum() for name, plan in plans.items()}
    assert scores["eplb"]["bytes_ratio"] == pytest.approx(rows["eplb"] / rows["linear"])


@pytest.mark.parametrize(("dp_size", "num_nodes"), [(6, 1), (6, 3), (3, 3)])
def test_copies_make_up_for_experts_that_ranks_do_not_divide(dp_size, num_nodes):
    """16 experts and 2 copies on 6 ranks."""
    trace, _ = planted_trace(4, 1, seed=1)
    topology = Topology(ep_size=6, dp_size=dp_size, num_nodes=num_nodes)
    planned, eplb = (
        replay(trace, solve(trace, topology, SolveSettings(method=method, redundant_experts=2))).total
        for method in ("semmoe", "eplb")
    )
    assert planned.lar > eplb.lar
    assert planned.remote_nodes_per_token <= eplb.remote_nodes_per_token
