"""Calibration with real processes, and predicted bytes against those that a run counts. No time is asserted."""

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from typer.testing import CliRunner

from semmoe import cost
from semmoe.calibration import PairSpeeds, PhaseLinks, load_links
from semmoe.cli import app
from semmoe.demo import MODEL
from semmoe.engines.transformers import calibrate as calibration
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import model as models
from semmoe.engines.transformers import pairs
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.expectation import expect
from semmoe.files import save_json
from semmoe.online import schedule_batch
from semmoe.replayer import replay
from semmoe.settings import CoclusterSettings, GenerateSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import split
from semmoe.texts import held_out_prompts
from semmoe.topology import Topology

SHAPE = cost.LayerShape(hidden_size=1000, expert_size=10, top_k=2)


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


def test_one_rank_has_no_links_to_measure():
    with pytest.raises(ValueError, match="ep_size must be at least 2, not 1"):
        calibration.calibrate(str(MODEL), 1)


@pytest.mark.parametrize(("predicted", "doubtful"), [(0.84, True), (0.86, False), (1.14, False), (1.16, True)])
def test_a_fit_that_is_off_by_more_than_a_seventh_is_doubted(tmp_path, monkeypatch, predicted, doubtful):
    """In the times of a calibration that was measured before; only the measuring itself is left out."""
    links = load_links("pcie5")
    found = calibration.Calibration(links=links, shape=SHAPE, predicted=predicted, measured=1.0)
    monkeypatch.setattr(calibration, "calibrate", lambda *arguments: found)
    result = CliRunner().invoke(app, ["calibrate", "tiny", "--json", "--out", str(tmp_path / "links.json")])
    written = json.loads(result.stdout)
    assert (written["error"], written["doubtful"]) == (pytest.approx(predicted - 1), doubtful)
    assert ("warning:" in result.stderr) == doubtful
    assert (f"{predicted - 1:+.0%}" in result.stderr) == doubtful


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
    assert found.shape == cost.LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)


@pytest.mark.slow
@pytest.mark.dist
def test_a_model_whose_experts_do_not_divide_is_refused():
    with pytest.raises(ValueError, match="ep_size 3 does not divide"):
        calibration.calibrate(str(MODEL), 3)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Prompts of the embedded model's held-out text, prefill only."""
    folder, tokenizer = tmp_path_factory.mktemp("trace"), load_tokenizer(str(MODEL))
    prompts = [tokenizer(text)["input_ids"][:96] for _, _, text in held_out_prompts(per_domain=10)]
    return record(models.load_model(str(MODEL)), str(MODEL), prompts, folder)


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("attention", ["dp", "tp"])
def test_bytes_of_the_verdict_are_those_that_generate_counts(attention, trace):
    """The requests held out for the verdict are generated, in turn, one batch, prefill: bytes per rank pair agree."""
    f, topology = trace.fingerprint, Topology.for_attention(attention, 4)
    quick = SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10))
    links = calibration._without_times("this machine", 4, "gloo", 4)
    shape = cost.LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)
    whole = ReplaySettings(batch_tokens=trace.num_tokens, batches="prefill")
    held_out, seen = split(trace, 0.2, quick.seed)
    for method in ("linear", "semmoe"):
        settings = SolveSettings(method=method, cocluster=quick.cocluster)
        expected = expect(trace, topology, settings, whole, PhaseLinks(links, links), shape)
        up = gen.Configuration(name=method, plan=solve(seen, topology, settings))

        def forecast(groups=None, plan=up.plan):
            rows = replay(held_out, plan, whole, groups).rows_per_batch(links.all_to_all).mean(axis=0)
            return f.num_layers * cost.all_to_all_bytes(rows, shape, links)

        told = f.num_layers * np.array(expected["bytes_per_rank_pair"])  # whole bytes of each layer
        np.testing.assert_allclose(told, forecast(), atol=f.num_layers)
        prompts = [held_out.prompt(r).tolist() for r in range(held_out.num_requests)]
        predicted = forecast(schedule_batch(prompts, up.plan, 1))  # a batch is shared out at once, unlike in a replay
        once = GenerateSettings(max_new_tokens=1, batch_size=len(prompts))
        counted = np.array(gen.generate(str(MODEL), prompts, [up], once)[0].all_to_all_bytes_per_rank_pair)
        assert predicted.sum() == pytest.approx(counted.sum(), rel=0.02)
        np.testing.assert_allclose(predicted, counted, atol=0.02 * counted.max())


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


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_of_torchrun_on_two_nodes_write_one_file(tmp_path):
    """Two launchers of two ranks each, as on two machines."""
    out, port = tmp_path / "links.json", free_port()
    semmoe = [str(Path(sys.executable).with_name("semmoe")), "calibrate", str(MODEL), "--out", str(out), "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(port)]
    ranks = [[*launcher, "--node-rank", str(node), "--no-python", *semmoe] for node in (0, 1)]
    nodes = [subprocess.Popen(words, stdout=subprocess.PIPE, text=True) for words in ranks]
    said = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert json.loads(said[0])["out"] == str(out)
    assert said[1] == ""
    links = load_links(str(out), Topology(ep_size=4, num_nodes=2))
    assert (links.pairs.size, links.between_nodes is None) == (4, False)
