"""Where a plan pays: by hand for one case, and the directions in which it must go."""

from dataclasses import replace

import pytest

from semmoe.costs import timing
from semmoe.costs.metrics import uniform_remote_ranks
from semmoe.costs.payoff import BATCHES, LINKS, MODELS, Measured, measured, payoff, payoffs
from semmoe.topology import Topology

QWEN, _, DEEPSEEK = MODELS
DP = Measured(topology=Topology.for_attention("dp", 4), remote_share=0.8, load=1.1, vanilla_load=1.2)
TP = replace(DP, topology=Topology.for_attention("tp", 4))


def test_what_is_carried_over_are_two_ratios_of_the_runs():
    vanilla = {"remote_ranks_per_token": 2.0, "load_max_over_mean": 1.2}
    planned = {"remote_ranks_per_token": 1.6, "load_max_over_mean": 1.1}
    assert measured("dp", vanilla, planned, ep_size=4) == DP


def test_one_layer_on_nvlink_by_hand():
    """Each of 4 ranks sends 256 tokens to `remote` ranks: 2,112 bytes a row (FP8, 8 ids and weights), 4,096 back."""
    found = payoff(DP, "h200-nvlink", QWEN, 1024)
    remote = uniform_remote_ranks(4, 128, 8)

    def seconds(rows, load):
        travel = rows * (2048 + 8 * 8) / 282e9 + 31.5e-6 + rows * 2 * 2048 / 282e9 + 51.9e-6
        return travel + load * 256 * 8 * 6 * 2048 * 768 / 1085e12

    vanilla, plan = seconds(256 * remote, 1.2), seconds(256 * remote * 0.8, 1.1) + 5.6e-6
    assert found.gain == pytest.approx(1 - plan / vanilla)
    assert (found.against, found.worth_it) == ("vanilla", found.gain >= timing.WORTH)


def test_attention_tp_competes_with_no_all_to_all_too():
    assert payoff(TP, "h200-nvlink", QWEN, 1024).against == "expert parallelism without all-to-all"
    assert not payoff(TP, "h200-nvlink", QWEN, 1024).worth_it
    assert payoff(TP, "h200-nvlink", QWEN, 1024).gain <= payoff(DP, "h200-nvlink", QWEN, 1024).gain


def test_without_an_all_to_all_the_better_balanced_placement_counts():
    """Locality has no effect there, so that vanilla's and the plan's load may be exchanged."""
    uneven, even = (replace(TP, load=load, vanilla_load=other) for load, other in ((2.0, 1.0), (1.0, 2.0)))
    first, second = (payoff(one, "h200-nvlink", DEEPSEEK, 16384) for one in (uneven, even))
    assert first.against == "expert parallelism without all-to-all"
    assert first.gain < second.gain
    worse = payoff(replace(TP, load=2.0, vanilla_load=2.0), "h200-nvlink", DEEPSEEK, 16384)
    assert worse.against == first.against
    assert worse.gain > first.gain  # the same plan, against a slower rival


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_slower_links_and_fewer_remote_ranks_gain_more(model):
    by_links = [payoff(DP, name, model, 16384).gain for name in ("h200-nvlink", "h200-400g", "h200-100g")]
    assert by_links == sorted(by_links)
    by_share = [payoff(replace(DP, remote_share=share), "pcie5", model, 1024).gain for share in (1.0, 0.8, 0.5)]
    assert by_share == sorted(by_share)


def test_a_plan_that_changes_nothing_costs_what_semmoe_s_own_kernels_take(monkeypatch):
    same = replace(DP, remote_share=1.0, load=1.2)
    assert all(-0.1 < one.gain < 0 and not one.worth_it for one in payoffs(same))
    monkeypatch.setattr(timing, "hooks", lambda *args, **named: 0.0)
    assert all(one.gain == pytest.approx(0) and not one.worth_it for one in payoffs(same))


def test_every_links_model_and_batch_is_there_once():
    found = {(one.links, one.model, one.batch_tokens) for one in payoffs(TP)}
    assert len(found) == len(payoffs(TP)) == len(LINKS) * len(MODELS) * len(BATCHES)


def test_two_ranks_can_be_two_nodes():
    two = replace(DP, topology=Topology.for_attention("dp", 2))
    assert payoff(two, "h200-100g", DEEPSEEK, 1024).gain > 0
