"""The lab's larger calibration: its fit by hand, and with real processes. No time is asserted."""

import math

import numpy as np
import pytest

from lab import calibration, pairs
from semmoe.cli.demo import MODEL
from semmoe.costs import timing
from semmoe.costs.links import PairSpeeds, load_links
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.io.files import save_json
from semmoe.topology import Topology

SHAPE = timing.LayerShape(hidden_size=1000, expert_size=10, top_k=2)


def sample(tokens, dispatch, combine, experts, all_reduce) -> calibration.Sample:
    """Two ranks that send each other half of `tokens` rows."""
    seconds = dict(zip(calibration.PARTS, (dispatch, experts, combine, all_reduce), strict=True))
    rows = [[0, tokens // 2], [tokens // 2, 0]]
    return calibration.Sample(seconds=seconds, rows=rows, busiest_pairs=tokens, tokens=tokens)


@pytest.mark.parametrize(("backend", "shared"), [("gloo", True), ("nccl", False)])
def test_a_fit_recovers_the_times_that_made_the_samples(backend, shared):
    """Rows of 4,016 and 4,000 bytes; dispatch at 2 GB/s after 30 us, combine after 20, all-reduce at 1 GB/s after 10,

    experts 6 us a pair after 5.
    """
    draft = calibration._without_times("x", 2, backend, 4)
    assert (draft.shared, draft.routing_bytes) == (shared, 8)
    seen = []
    for tokens in (10, 100, 1000):
        rows = tokens if shared else tokens // 2
        reduced = 4000 * tokens * (2 if shared else 1)
        seen.append(sample(tokens, 30e-6 + 4016 * rows / 2e9, 20e-6 + 4000 * rows / 2e9, 5e-6 + 6e-6 * tokens,
                           10e-6 + reduced / 1e9))  # fmt: skip
    links = calibration._fit(seen, SHAPE, draft, Topology(ep_size=2))
    assert links.inside_node.model_dump() == pytest.approx(
        {"dispatch_latency_us": 30, "combine_latency_us": 20, "gigabytes_per_second": 2, "all_reduce_latency_us": 10,
         "all_reduce_gigabytes_per_second": 1}
    )  # fmt: skip
    assert links.experts.model_dump() == pytest.approx({"fixed_us": 5, "teraflops": 0.01})


def test_a_fit_of_times_that_do_not_grow_stays_a_valid_calibration(tmp_path):
    seen = [sample(tokens, 1e-3, 1e-3, 1e-3, 1e-3) for tokens in (10, 100, 1000)]
    links = calibration._fit(seen, SHAPE, calibration._without_times("x", 2, "gloo", 4), Topology(ep_size=2))
    save_json(tmp_path / "links.json", links)
    assert load_links(str(tmp_path / "links.json")) == links


@pytest.mark.parametrize(("predicted", "doubtful"), [(0.84, True), (0.86, False), (1.14, False), (1.16, True)])
def test_a_fit_that_is_off_by_more_than_a_seventh_is_doubted(predicted, doubtful):
    found = calibration.Calibration(links=load_links("pcie5"), shape=SHAPE, predicted=predicted, measured=1.0)
    assert (found.error, found.doubtful) == (pytest.approx(predicted - 1), doubtful)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_calibrate_themselves(tmp_path, monkeypatch):
    done = []
    found = calibration.calibrate(str(MODEL), 2, done.append, "two processes")
    assert sum(done) == len(calibration.TOKENS)
    save_json(tmp_path / "links.json", found.links)
    links = load_links(str(tmp_path / "links.json"))
    assert links == found.links
    assert (links.name, links.kind, links.dispatch_bytes_per_value) == ("two processes", "measured", 4)
    assert "2 processes" in links.source
    assert links.inside_node.gigabytes_per_second > 0
    assert links.experts.teraflops > 0
    assert math.isfinite(found.predicted)
    assert found.predicted > 0
    assert found.measured > 0
    f = fingerprint_of(str(MODEL))
    assert found.shape == timing.LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)


def test_the_speeds_of_pairs_are_slopes_between_two_sizes():
    """1 kB and 1 MB; from rank 0 to 1 at 1 GB/s after 5 us, back at a quarter of it after 9."""
    sizes, speeds = (1_000, 1_000_000), np.array([[np.inf, 1.0], [0.25, np.inf]])
    fixed = np.array([[0, 5e-6], [9e-6, 0]])
    seconds = np.stack([fixed + size / (speeds * 1e9) for size in sizes])
    found = pairs._speeds(seconds, sizes)
    assert np.array(found.gigabytes_per_second)[[0, 1], [1, 0]] == pytest.approx([1.0, 0.25], rel=1e-4)
    assert np.array(found.latency_us)[[0, 1], [1, 0]] == pytest.approx([0.0, 4.0], abs=0.1)


def test_a_fit_corrects_all_pairs_by_one_factor():
    """Rank 0 sends 100 rows of 4,016 bytes to rank 1; the pairs' speeds, 4 and 1 GB/s, are half of what they seem."""
    draft = calibration._without_times("x", 2, "gloo", 4)
    measured = PairSpeeds(gigabytes_per_second=[[9.0, 4.0], [1.0, 9.0]])
    draft = draft.model_copy(update={"pairs": measured, "shared": False})
    seen = []
    for tokens in (10, 100, 1000):
        taken = tokens / 2 / 0.5e9  # the slower of the two ways, at half of 1 GB/s
        seen.append(sample(tokens, 4016 * taken, 4000 * taken, 1e-6 * tokens, 1e-6 * tokens))
    links = calibration._fit(seen, SHAPE, draft, Topology(ep_size=2))
    assert links.pairs is not None
    assert np.array(links.pairs.gigabytes_per_second)[[0, 1], [1, 0]] == pytest.approx([2.0, 0.5], rel=1e-3)


@pytest.mark.slow
@pytest.mark.dist
def test_pairs_of_processes_are_measured_and_taken_by_the_solver(tmp_path):
    found = calibration.calibrate(str(MODEL), 2, name="two processes", pairs=True)
    assert found.links.pairs is not None
    assert found.links.pairs.size == 2
    save_json(tmp_path / "links.json", found.links)
    links = load_links(str(tmp_path / "links.json"), Topology(ep_size=2))
    assert (links.shared, links.all_to_all) == (False, "per-rank")
    assert np.all(np.array(links.pairs.gigabytes_per_second) > 0)
