"""How much a solve searches: with less or more effort, within a budget of seconds, on any number of threads."""

import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from synthetic import make_trace
from test_placement_cocluster import TOPOLOGIES, used_by_all
from typer.testing import CliRunner

from lab.save import save_trace
from semmoe.cli import app
from semmoe.evaluation.forecast import excess_load
from semmoe.evaluation.replay import replay
from semmoe.placement import cocluster
from semmoe.placement.layers import LayerSearch
from semmoe.plan import load_plan
from semmoe.settings import QUICK, THOROUGH, CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.tokens import predictor
from semmoe.topology import Topology

TRACE = used_by_all(1, requests=60, longest=30)
SMALL = CoclusterSettings(starts=3, kept=2, steps=20, batch_tokens=64)


def solved(topology, redundant=0, **effort):
    return solve(TRACE, topology, SolveSettings(redundant_experts=redundant, cocluster=replace(SMALL, **effort)))


def arrays(plan):
    tables = [getattr(plan.tokens, "path_scores", None), getattr(plan.tokens, "token_scores", None)]
    return [plan.placement.physical_to_logical_map, plan.placement.static_dispatch, *tables]


def assert_same(one, other):
    for a, b in zip(arrays(one), arrays(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("redundant", [0, 4])
def test_the_plan_is_the_same_for_any_number_of_threads(name, redundant, monkeypatch):
    plans = []
    for threads in (1, 5):
        for module in (cocluster, predictor):
            monkeypatch.setattr(module, "cpu_count", lambda threads=threads: threads)
        plans.append(solved(TOPOLOGIES[name], redundant))
    assert_same(*plans)


@pytest.fixture
def searches(monkeypatch):
    """Counts the searches of each layer, by its seed, and makes each take a second of the solver's clock."""
    made, lock, run = Counter(), threading.Lock(), LayerSearch._run

    def counted(self, *given):
        with lock:
            made[id(self)] += 1
        return run(self, *given)

    monkeypatch.setattr(LayerSearch, "_run", counted)
    monkeypatch.setattr(cocluster, "monotonic", lambda: float(made.total()))
    monkeypatch.setattr("semmoe.placement.ours.monotonic", lambda: float(made.total()))
    return made


ALL = 3 * (3 + 2 * 2 + 3)  # layers, their starts, further rough prices from two layouts, finer prices from one


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("redundant", [0, 4])
def test_without_any_time_each_layer_is_searched_once(name, redundant, searches):
    plan = solved(TOPOLOGIES[name], redundant, budget=0)
    assert list(searches.values()) == [1, 1, 1]
    assert plan.placement.hosts.any(axis=1).all()  # every expert is on a rank


@pytest.mark.parametrize("threads", [1, 2])
def test_a_budget_is_shared_by_layers_and_phases(threads, searches, monkeypatch):
    monkeypatch.setattr(cocluster, "cpu_count", lambda: threads)
    plan = solved(Topology(ep_size=4), budget=20)
    assert 12 <= searches.total() <= 26  # the time is used, and each phase ends with the search that passes its end
    if threads == 1:  # else a layer can wait while another one's searches use its time up
        assert sorted(searches.values()) == [6, 6, 6]
    assert plan.settings["cocluster"]["budget"] == 20


def test_a_budget_that_is_not_used_up_changes_nothing(searches):
    plan = solved(Topology(ep_size=4), budget=1000)
    assert searches.total() == ALL
    assert_same(plan, solved(Topology(ep_size=4)))


@pytest.mark.parametrize("effort", [QUICK, THOROUGH], ids=["quick", "thorough"])
def test_less_effort_makes_fewer_searches_and_more_makes_more(effort, searches):
    trace = used_by_all(2)
    solve(trace, Topology(ep_size=4), SolveSettings())
    usual = searches.total()
    solve(trace, Topology(ep_size=4), SolveSettings(cocluster=CoclusterSettings(**effort)))
    other = searches.total() - usual
    assert (other < usual / 2) if effort is QUICK else (other > usual * 1.5)


def test_the_command_takes_an_effort_and_a_budget(tmp_path):
    save_trace(TRACE, tmp_path / "trace")
    run, words = CliRunner(), ["solve", str(tmp_path / "trace"), "--ep-size", "4", "--out", str(tmp_path / "plan")]

    def used(*more):
        done = run.invoke(app, [*words, "--force", *more])
        assert done.exit_code == 0, done.output
        return load_plan(tmp_path / "plan").settings["cocluster"]

    usual = used()
    assert used("--quick") == usual | QUICK
    assert used("--thorough") == usual | THOROUGH
    changes = (
        "--set",
        "cocluster.copy_choice=static",
        "--set",
        "cocluster.starts=2",
        "--set",
        "cocluster.remote_rank=0",
    )
    assert used(*changes) == usual | {"copy_choice": "static", "starts": 2, "remote_rank": 0.0}
    assert 0 <= used("--budget", "3")["budget"] <= 3
    for wrong, why in (
        (["--quick", "--thorough"], "exclude each other"),
        (["--quick", "--method", "eplb"], "--quick has no effect here"),
        (["--budget", "5", "--method", "linear"], "--budget has no effect here"),
        (["--budget", "-1"], "--budget"),
        (["--budget", "nan"], "--budget"),
    ):
        done = run.invoke(app, [*words, "--force", *wrong])
        assert done.exit_code == 2, done.output
        assert why in " ".join(done.output.split())


def test_a_load_limit_that_is_not_kept_is_said(tmp_path):
    save_trace(TRACE, tmp_path / "trace")
    words = ["solve", str(tmp_path / "trace"), "--ep-size", "4", "--batch-tokens", "64", "--quick", "--force"]
    for limit, said in (("1", True), ("0", False), ("4", False)):
        done = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "plan"), "--load-limit", limit])
        assert done.exit_code == 0, done.output
        assert (f"the load limit of {limit} is not kept" in " ".join(done.output.split())) == said


def test_the_cause_of_a_load_above_the_limit_is_said():
    """A plan whose own load is known, under other limits, held-out loads, and with one hot expert."""
    plan, measure = solved(Topology(ep_size=4, dp_size=4)), ReplaySettings(batch_tokens=64)
    own = float(replay(TRACE, plan, measure).load_max_over_mean.mean())

    def causes(limit, held_out, trace=TRACE):
        expected = None if held_out is None else {"load_max_over_mean": held_out}
        return " ".join(excess_load(trace, replace(plan, expected=expected), limit, measure))

    assert own > 1.01
    assert causes(own + 0.01, own + 0.01) == causes(own + 0.01, None) == causes(own - 0.01, own - 0.01) == ""
    differ = causes(own + 0.01, own + 0.0101)
    assert f"requests that were held out load the busiest rank {own + 0.0101:.3f} times" in differ
    assert f"so the two differ; profile more than {TRACE.num_requests} requests" in differ
    alone = causes(own - 0.01, None)
    assert f"the load limit of {own - 0.01:g} is not kept: requests of the profile load" in alone
    assert "--set cocluster.remote_rank" in alone
    hot = TRACE.expert_ids.copy()
    hot[~(hot[:, 0] == 3).any(axis=1), 0, 0] = 3  # every token uses expert 3 of the first layer
    assert "in 1 of" in causes(own + 0.01, 9.0, replace(TRACE, expert_ids=hot))
    assert "one expert alone is above it on its rank" in causes(own + 0.01, 9.0, replace(TRACE, expert_ids=hot))


@pytest.mark.parametrize(("attention", "warned"), [("tp", True), ("dp", False)])
def test_a_budget_below_the_least_solve_is_warned_of_before_it(tmp_path, monkeypatch, attention, warned):
    monkeypatch.setattr(predictor, "least_seconds", lambda trace: 40.0)
    save_trace(TRACE, tmp_path / "trace")
    words = ["solve", str(tmp_path / "trace"), "--ep-size", "4", "--attention", attention, "--budget", "9"]
    result = CliRunner().invoke(app, [*words, "--quick", "--out", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    text = " ".join(result.output.split())
    assert ("--budget 9 is too short: the least solve of 3 layers of 8 experts takes about 80 s" in text) == warned


def test_the_least_time_grows_with_layers():
    one, thousand = (predictor.least_seconds(replace(TRACE.fingerprint, num_layers=n)) for n in (1, 1000))
    assert 0 < one < thousand / 100


@pytest.mark.parametrize(("attention", "number", "top_k"), [("dp", 896, 16), ("tp", 512, 10)])
def test_routing_of_many_experts_is_solved(tmp_path, attention, number, top_k):
    rng = np.random.default_rng(0)
    experts = np.argsort(rng.random((240, 2, number)), axis=2)[..., :top_k]
    tokens = rng.integers(1, 500, size=(12, 20)).tolist()
    save_trace(make_trace(tokens, experts, vocab_size=500, num_experts=number), tmp_path / "trace")
    words = ["solve", str(tmp_path / "trace"), "--ep-size", "8", "--attention", attention, "--quick"]
    result = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "plan")])
    assert result.exit_code == 0, result.output
    placement = load_plan(tmp_path / "plan").placement
    assert (np.sort(placement.physical_to_logical_map, axis=1) == np.arange(number)).all()
