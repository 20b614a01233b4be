"""Shipped links against DeepEP's measured tables; four nodes were held out of the fit (benchmarks/fit_links.py).

tests/deepep.json holds the points, with their source: tokens of a rank, microseconds of dispatch and of combine.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from semmoe.costs import timing
from semmoe.costs.links import Links, load_links
from semmoe.costs.payoff import MODELS, uniform_rows
from semmoe.topology import Topology

POINTS = json.loads(Path(__file__).with_name("deepep.json").read_text())["points"]
DEEPSEEK = next(model for model in MODELS if model.name == "DeepSeek-V3")
FITTED = [(name, int(nodes)) for name, found in POINTS.items() for nodes in found if nodes != "4"]
HELD_OUT = [(name, 4) for name, found in POINTS.items() if "4" in found]


def errors(links: Links, nodes: int, points: list) -> np.ndarray:
    """(points, 2) predicted over measured, less one."""
    topology = Topology(ep_size=8 * nodes, num_nodes=nodes)
    rows, out = uniform_rows(links.all_to_all, DEEPSEEK, topology), []
    for tokens, *measured in points:
        time = timing.layer_time(rows * tokens, 0, DEEPSEEK.shape, topology, links)
        out.append(np.array([time.dispatch, time.combine]) * 1e6 / measured - 1)
    return np.array(out)


@pytest.mark.parametrize(("name", "nodes"), FITTED)
def test_links_are_within_a_quarter_of_every_measured_point(name, nodes):
    found = errors(load_links(name), nodes, POINTS[name][str(nodes)])
    assert np.abs(found).max() <= 0.25
    assert np.abs(found).mean(axis=0).max() <= 0.15


@pytest.mark.parametrize(("name", "nodes"), HELD_OUT)
def test_four_nodes_that_were_held_out_are_within_thirty_percent(name, nodes):
    points = POINTS[name][str(nodes)]
    assert len(points) >= 5
    assert np.abs(errors(load_links(name), nodes, points)).max() <= 0.30


def test_there_are_links_of_both_kinds_for_one_two_and_four_nodes():
    assert {(load_links(name).all_to_all, nodes) for name, nodes in FITTED + HELD_OUT} == {
        (kind, nodes) for kind in ("per-node", "per-pair") for nodes in (1, 2, 4)
    }
    assert len(POINTS) == 16


def test_the_wrong_kind_is_far_off():
    """What semmoe charged before: a row for every remote rank on the links between nodes."""
    links = load_links("h100-400g").model_copy(update={"all_to_all": "per-rank"})
    assert errors(links, 2, POINTS["h100-400g"]["2"])[-3:].min() > 1.0
