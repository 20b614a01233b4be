"""Figures for notebooks show what the library returned, in the colours of the report."""

import numpy as np
import pytest
import synthetic

import semmoe
from semmoe.report.experts import load_over_mean
from semmoe.report.plot import colours


@pytest.fixture(scope="module")
def found():
    trace = synthetic.random_trace(0, experts=8, requests=40)
    profile, evaluation = semmoe.split(trace, share=0.5)
    settings = semmoe.SolveSettings(redundant_experts=2)
    topology = semmoe.Topology.for_attention("tp", ep_size=2)
    return trace, semmoe.compare(profile, evaluation, topology, ["semmoe"], settings)


def test_methods_are_bars_of_what_was_replayed_and_ours_has_the_plan_s_colour(found):
    _, compared = found
    figure = semmoe.plot(compared)
    bars = [data for data in figure.data if data.type == "bar" and data.xaxis in (None, "x")]
    by_colour = {bar.marker.color: bar.x[0] for bar in bars}
    rates = {name: result.total.lar for name, result in compared.results.items()}
    assert by_colour[colours()["plan"]] == pytest.approx(rates["semmoe"], abs=1e-5)
    assert by_colour[colours()["vanilla"]] == pytest.approx(rates["linear"], abs=1e-5)
    assert [title.text for title in figure.layout.annotations] == [
        "Local activation rate",
        "Remote ranks per token",
        "Expert load, max / mean",
    ]


def test_a_plan_s_map_has_a_cell_for_each_physical_expert_and_marks_copies(found):
    trace, compared = found
    place = compared.plans["semmoe"].placement
    figure = semmoe.plot(compared.plans["semmoe"], trace)
    cells, marks, legend = figure.data
    shade = load_over_mean(trace.expert_ids, place.num_experts)
    expected = np.take_along_axis(shade, place.physical_to_logical_map.astype(np.int64), axis=1)
    drawn = np.array([[cell for cell in row if cell is not None] for row in cells.z], float)
    np.testing.assert_allclose(drawn, expected, atol=1e-5)
    assert len(marks.x) == 2 * 2 * len(place.physical_to_logical_map)  # both places of each of two copied experts
    assert legend.name == "has a copy on another rank"


def test_a_trace_is_the_load_of_its_experts(found):
    trace, _ = found
    (heat,) = semmoe.plot(trace).data
    np.testing.assert_allclose(np.array(heat.z, float), load_over_mean(trace.expert_ids, 8), atol=1e-5)


def test_no_colour_is_left_a_name(found):
    trace, compared = found
    for item in (trace, compared, compared.plans["semmoe"]):
        assert '"@' not in semmoe.plot(item).to_json()


def test_what_cannot_be_drawn_is_refused(found):
    _, compared = found
    with pytest.raises(TypeError, match="a Plan or a RoutingTrace, not a int"):
        semmoe.plot(5)
    with pytest.raises(ValueError, match="experts"):
        semmoe.plot(compared.plans["semmoe"], synthetic.random_trace(0, experts=16, requests=4))
