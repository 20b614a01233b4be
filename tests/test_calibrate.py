"""Calibration with real processes, and predicted bytes against those that a run counts. No time is asserted."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from ports import free_port
from test_cli import npz, refused, run
from typer.testing import CliRunner

from lab import calibrate as calibration
from lab.__main__ import app
from semmoe.cli.demo import MODEL
from semmoe.costs import timing
from semmoe.costs.links import Experts, Links, PhaseLinks, Tier, load_links
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import model as models
from semmoe.engines.transformers.recorder import record
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.evaluation.forecast import expect
from semmoe.evaluation.online import schedule_batch
from semmoe.evaluation.replay import replay
from semmoe.io.files import save_json
from semmoe.placement.problem import Problem
from semmoe.settings import CoclusterSettings, GenerateSettings, ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.topology import Topology
from semmoe.traces.split import split
from semmoe.traces.texts import held_out_prompts

ROOT = Path(__file__).parents[1]


def calibrate(*arguments):
    return CliRunner().invoke(app, ["calibrate", *map(str, arguments)])


def test_a_fit_by_hand():
    """The docstring's: 2 and 6 MB take 24 and 64 ms; between eight nodes the latency counts three times."""
    found = calibration.fit([0.024, 0.064], [2e6, 6e6])
    assert found.model_dump(exclude_none=True) == pytest.approx(
        {"dispatch_latency_us": 2000, "combine_latency_us": 2000, "gigabytes_per_second": 0.1}
    )
    assert calibration.fit([0.024, 0.064], [2e6, 6e6], doublings=3).dispatch_latency_us == pytest.approx(2000 / 3)


@pytest.mark.parametrize("seconds", [(0.01, 0.01), (0.02, 0.01)])
def test_times_that_do_not_grow_give_at_most_twice_the_speed_of_the_larger(seconds):
    found = calibration.fit([*seconds], [2e6, 6e6])
    assert found.gigabytes_per_second == pytest.approx(2 * 6e6 / 0.01 / 1e9)
    assert found.dispatch_latency_us > 0


def test_what_an_all_reduce_takes_where_it_was_not_measured():
    """1 MB at the 2 GB/s of an all-to-all, after a dispatch's 30 us; measured: at 1 GB/s after 5 us."""
    known = {"dispatch_latency_us": 30, "combine_latency_us": 20, "gigabytes_per_second": 2}
    assert Tier(**known).all_reduce_seconds(1e6) == pytest.approx(530e-6)
    measured = Tier(**known, all_reduce_latency_us=5, all_reduce_gigabytes_per_second=1)
    assert measured.all_reduce_seconds(1e6) == pytest.approx(1005e-6)
    assert Tier(**known, all_reduce_latency_us=0).all_reduce_seconds(1e6) == pytest.approx(500e-6)


def test_one_rank_has_no_links_to_measure():
    with pytest.raises(ValueError, match="ep_size must be at least 2, not 1"):
        calibration.calibrate(str(MODEL), 1)


@pytest.mark.slow
@pytest.mark.dist
def test_two_processes_calibrate_themselves(tmp_path):
    found = calibration.calibrate(str(MODEL), 2, "two processes")
    save_json(tmp_path / "links.json", found)
    links = load_links(str(tmp_path / "links.json"), Topology(ep_size=2))
    assert links == found
    assert (links.name, links.kind, links.dispatch_bytes_per_value) == ("two processes", "measured", 4)
    assert "2 processes" in links.source
    assert (links.shared, links.all_to_all, links.routing_bytes) == (True, "per-rank", 8)
    assert (links.between_nodes, links.pairs) == (None, None)
    assert links.inside_node.gigabytes_per_second > 0
    assert links.experts.teraflops > 0


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
    links = Links(
        name="gloo", kind="measured", shared=True, source="", dispatch_bytes_per_value=4, combine_bytes_per_value=4,
        routing_bytes=8, experts=Experts(fixed_us=0, teraflops=1),
        inside_node=Tier(dispatch_latency_us=0, combine_latency_us=0, gigabytes_per_second=1),
    )  # fmt: skip
    shape = timing.LayerShape(hidden_size=f.hidden_size, expert_size=f.expert_size, top_k=f.top_k)
    whole = ReplaySettings(batch_tokens=trace.num_tokens, batches="prefill")
    held_out, seen = split(trace, 0.2, quick.seed)
    for method in ("linear", "semmoe"):
        settings = SolveSettings(method=method, cocluster=quick.cocluster)
        problem = Problem(trace=trace, topology=topology, settings=settings)
        expected = expect(problem, whole, PhaseLinks(links, links), shape)
        up = gen.Configuration(name=method, plan=solve(seen, topology, settings))

        def forecast(groups=None, plan=up.plan):
            rows = replay(held_out, plan, whole, groups).rows_per_batch(links.all_to_all).mean(axis=0)
            return f.num_layers * timing.all_to_all_bytes(rows, shape, links)

        stated = f.num_layers * np.array(expected["bytes_per_rank_pair"])  # whole bytes of each layer
        np.testing.assert_allclose(stated, forecast(), atol=f.num_layers)
        prompts = [held_out.prompt(r).tolist() for r in range(held_out.num_requests)]
        predicted = forecast(schedule_batch(prompts, up.plan, 1))  # a batch is shared out at once, unlike in a replay
        once = GenerateSettings(max_new_tokens=1, batch_size=len(prompts))
        counted = np.array(gen.generate(str(MODEL), prompts, [up], once)[0].all_to_all_bytes_per_rank_pair)
        assert predicted.sum() == pytest.approx(counted.sum(), rel=0.02)
        np.testing.assert_allclose(predicted, counted, atol=0.02 * counted.max())


@pytest.mark.slow
@pytest.mark.dist
def test_ranks_of_torchrun_on_two_nodes_write_one_file(tmp_path):
    """Two launchers of two ranks each, as on two machines."""
    out, port = tmp_path / "links.json", free_port()
    words = ["-m", "lab", "calibrate", str(MODEL), "--out", str(out), "--json"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "2"]
    launcher += ["--master-port", str(port)]
    ranks = [[*launcher, "--node-rank", str(node), *words] for node in (0, 1)]
    nodes = [subprocess.Popen(rank, stdout=subprocess.PIPE, text=True, cwd=ROOT) for rank in ranks]
    said = [node.communicate(timeout=400)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0]
    assert json.loads(said[0])["out"] == str(out)
    assert said[1] == ""
    links = load_links(str(out), Topology(ep_size=4, num_nodes=2))
    assert "4 processes" in links.source
    assert links.inside_node.gigabytes_per_second > 0
    assert links.between_nodes is not None
    assert links.between_nodes.gigabytes_per_second > 0


@pytest.mark.slow
@pytest.mark.dist
def test_calibrate_writes_links_that_solve_takes(tmp_path):
    out = tmp_path / "links.json"
    result = calibrate("tiny", "--ep-size", 2, "--name", "a test", "--json", "--out", out)
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert written["links"] == json.loads(out.read_text())
    assert written["out"] == str(out)
    shown = calibrate("tiny", "--ep-size", 2, "--name", "a test", "--force", "--out", out).stdout
    assert all(words in shown for words in ("all-to-all inside nodes", "experts of a rank", "GB/s", "Tflop/s"))
    assert "between nodes" not in shown
    words = ["solve", npz(tmp_path / "t.npz"), "--ep-size", 2, "--method", "linear", "--out", tmp_path / "plan"]
    words += ["--hidden-size", 64, "--expert-size", 32]
    assert "on a test (measured, a row per rank)" in run(*words, "--links", out).stdout


@pytest.mark.dist
def test_calibrate_refuses_in_one_line(tmp_path):
    out = tmp_path / "links.json"
    refused(calibrate("tiny", "--ep-size", 1, "--out", out), "--ep-size", "greater than or equal to 2")
    refused(calibrate(tmp_path / "absent", "--ep-size", 2, "--out", out), "does not exist")
    assert not out.exists()
