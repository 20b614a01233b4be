"""What is written is what is read: results are checked against their types before they leave."""

import pytest
from synthetic import random_trace

from semmoe.evaluation.results import ReplayFile, checked
from semmoe.placement.methods import METHODS
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import score, solve_methods
from semmoe.topology import Topology


def test_a_replay_of_two_methods_is_what_a_reader_takes():
    trace = random_trace(0, requests=30)
    plans, _ = solve_methods(trace, Topology(ep_size=2), ["eplb"], SolveSettings())
    result = {"settings": {}, "methods": score(trace, plans, ReplaySettings(batch_tokens=64))}
    assert checked(ReplayFile, result) is result
    read = ReplayFile.model_validate(result)
    assert set(read.methods) == {"linear", "eplb"} <= set(METHODS)
    assert read.methods["eplb"].layers[0].lar == result["methods"]["eplb"]["layers"][0]["lar"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lar": 1.5}, "methods.eplb.lar"),
        ({"lar": float("nan")}, "methods.eplb.lar"),
        ({"remote_ranks_per_token": None}, "methods.eplb.remote_ranks_per_token"),
        ({"rows_per_rank_pair": [[1.0, 2.0]]}, "not square"),
        ({"rows_per_rank_pair": [[1.0] * 1025] * 1025}, "at most 1024"),
    ],
)
def test_a_result_that_no_reader_takes_is_not_written(changes, message):
    figures = {"lar": 0.5, "remote_ranks_per_token": 1.0, "load_max_over_mean": 1.1} | changes
    with pytest.raises(ValueError, match=message):
        checked(ReplayFile, {"settings": {}, "methods": {"eplb": figures}})


def test_a_result_without_a_part_is_not_written():
    with pytest.raises(ValueError, match="methods"):
        checked(ReplayFile, {"settings": {}})
