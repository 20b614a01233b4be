"""A solve that begins from a plan moves what pays and leaves the rest where it is."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic import make_trace, random_trace
from test_placement_cocluster import TOPOLOGIES, used_by_all
from typer.testing import CliRunner

from lab.save import save_trace
from semmoe.cli import app
from semmoe.evaluation.replay import replay
from semmoe.placement.cocluster import keep_slots
from semmoe.plan import load_plan, save_plan
from semmoe.settings import CoclusterSettings, ReplaySettings, SolveSettings
from semmoe.solver import moved_experts, solve
from semmoe.topology import Topology

TRACE, DRIFTED = used_by_all(1, requests=60, longest=30), used_by_all(2, requests=60, longest=30)


def settings(redundant=0, move_cost=0.001):
    cocluster = CoclusterSettings(starts=2, steps=20, batch_tokens=64, move_cost=move_cost)
    return SolveSettings(redundant_experts=redundant, cocluster=cocluster)


@pytest.mark.parametrize("name", TOPOLOGIES)
@pytest.mark.parametrize("redundant", [0, 4])
def test_nothing_moves_where_moves_cost_more_than_anything_gains(name, redundant):
    old = solve(TRACE, TOPOLOGIES[name], settings(redundant))
    new = solve(DRIFTED, TOPOLOGIES[name], settings(redundant, move_cost=1e6), previous=old)
    np.testing.assert_array_equal(new.placement.physical_to_logical_map, old.placement.physical_to_logical_map)
    assert moved_experts(new, old) == (0, 3 * (8 + redundant))
    assert new.trace_hash != old.trace_hash


@pytest.mark.parametrize("redundant", [0, 4])
def test_the_dearer_a_move_the_fewer_there_are(redundant):
    topology = Topology(ep_size=4)
    old = solve(TRACE, topology, settings(redundant))
    moved = [
        moved_experts(solve(DRIFTED, topology, settings(redundant, cost), previous=old), old)[0]
        for cost in (0.0, 0.05, 0.5)
    ]
    assert moved[0] > moved[1] > 0
    assert moved[1] >= moved[2]
    stays = solve(DRIFTED, topology, settings(redundant, 0.05), previous=old).placement
    same = (stays.hosts & old.placement.hosts).sum()
    assert (stays.physical_to_logical_map == old.placement.physical_to_logical_map).sum() == same


@pytest.mark.parametrize("redundant", [0, 4])
def test_requests_that_drifted_do_not_all_go_to_one_group(redundant):
    """Two kinds of requests, then two others that the first plan has on one rank: a warm start parts these, too."""
    topology = Topology(ep_size=2, dp_size=2)
    old = solve(kinds([0, 1], [2, 3]), topology, settings(redundant))
    drifted = kinds([0, 2], [1, 3])
    cold, warm = (solve(drifted, topology, settings(redundant), previous=begin) for begin in (None, old))
    local = [replay(drifted, plan, ReplaySettings(batch_tokens=64)).total.lar for plan in (old, cold, warm)]
    assert local[1] > local[0] + 0.1
    assert local[2] > local[1] - 0.05


def kinds(*pairs):
    """40 requests, in turn of kinds that use two pairs of experts (2 p, 2 p + 1) each, and tokens of their own."""
    rng, requests, experts = np.random.default_rng(0), [], []
    for r in range(40):
        pair = rng.choice(pairs[r % len(pairs)], size=12)
        requests.append((8 * pair + rng.integers(0, 8, 12)).tolist())
        experts.append(np.stack([2 * pair, 2 * pair + 1], axis=1))
    ids = np.repeat(np.concatenate(experts)[:, None], 3, axis=1)
    return make_trace(requests, ids, vocab_size=32, num_experts=8)


@given(st.integers(0, 9999))
def test_an_expert_that_stays_on_its_rank_keeps_its_slot(seed):
    rng = np.random.default_rng(seed)
    old = np.stack([rng.permutation(12).reshape(3, 4) for _ in range(2)])
    new = np.stack([rng.permutation(12).reshape(3, 4) for _ in range(2)])
    found = keep_slots(new, old)
    np.testing.assert_array_equal(np.sort(found, axis=2), np.sort(new, axis=2))
    for l, g, s in np.ndindex(old.shape):
        if old[l, g, s] in new[l, g]:
            assert found[l, g, s] == old[l, g, s]


def test_a_plan_that_cannot_be_begun_from_is_refused():
    old = solve(TRACE, Topology(ep_size=4), settings())
    with pytest.raises(ValueError, match="has 0 redundant experts, not 4"):
        solve(TRACE, Topology(ep_size=4), settings(4), previous=old)
    with pytest.raises(ValueError, match="to begin from is for"):
        solve(TRACE, Topology(ep_size=2), settings(), previous=old)
    with pytest.raises(ValueError, match="only the method semmoe"):
        solve(TRACE, Topology(ep_size=4), replace(settings(), method="eplb"), previous=old)
    with pytest.raises(ValueError, match="another model"):
        solve(random_trace(0, experts=16), Topology(ep_size=4), settings(), previous=old)


def test_the_command_begins_from_a_plan(tmp_path):
    save_trace(DRIFTED, tmp_path / "trace")
    save_plan(solve(TRACE, Topology(ep_size=4), settings(4)), tmp_path / "old")
    run = CliRunner()
    words = ["solve", str(tmp_path / "trace"), "--out", str(tmp_path / "new")]
    done = run.invoke(app, [*words, "--from", str(tmp_path / "old")])
    assert done.exit_code == 0, done.output
    assert "of 36 experts move to another rank, from" in done.stdout
    new = load_plan(tmp_path / "new")
    assert new.placement.redundant_experts == 4
    assert new.settings["cocluster"]["move_cost"] == 0.001
    refused = run.invoke(app, [*words, "--set", "cocluster.move_cost=1", "--force"])
    assert refused.exit_code == 2
    other = run.invoke(app, [*words, "--from", str(tmp_path / "old"), "--ep-size", "2", "--force"])
    assert other.exit_code != 0
