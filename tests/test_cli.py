"""The command line as people and scripts meet it: results, exit codes, one clear line for a mistake."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.metadata import PathDistribution
from pathlib import Path

import numpy as np
import pytest
import typer
from safetensors.numpy import load_file, save_file
from synthetic import make_trace
from typer.testing import CliRunner

from lab.save import save_trace
from semmoe.cli import app
from semmoe.cli.app import install_hint
from semmoe.cli.demo import MODEL
from semmoe.core import DECODE
from semmoe.costs.links import load_links
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.io.files import save_json
from semmoe.placement.methods import METHODS
from semmoe.plan import load_plan
from semmoe.traces.trace import open_trace

PROMPTS = [f"def function_{i}(argument):\n    return argument + {i} # {'text ' * (i % 5)}\n" for i in range(24)]


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments])


def refused(result, *words):
    """Exit code 2 and one line on stderr that says what is wrong; no traceback."""
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A dataset, a trace of it, and a plan."""
    folder = tmp_path_factory.mktemp("work")
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    assert run("profile", MODEL, "--dataset", folder / "prompts.jsonl", "--out", folder / "trace").exit_code == 0
    assert run("solve", folder / "trace", "--ep-size", 4, "--out", folder / "plan").exit_code == 0
    return folder


def npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {
        "token_ids": rng.integers(0, 50, 400), "request_offsets": np.arange(0, 401, 20),
        "expert_ids": np.argsort(rng.random((400, 2, 8)), axis=2)[:, :, :2],
    }  # fmt: skip
    np.savez(path, **(arrays | changes))
    return path


def test_profile_resumes_and_says_so(work, tmp_path):
    first = ["--dataset", work / "prompts.jsonl", "--out", tmp_path / "trace"]
    assert run("profile", MODEL, *first).exit_code == 0
    again = run("profile", MODEL, *first)
    assert "resuming: 24 of 24" in again.stderr
    assert open_trace(tmp_path / "trace").num_requests == 24


@pytest.mark.slow
def test_prompts_that_are_cut_are_told_and_counted(work, tmp_path):
    lengths = [len(ids) for ids in load_tokenizer(str(MODEL))(PROMPTS)["input_ids"]]
    limit = sorted(lengths)[len(lengths) // 2]
    cut = sum(length > limit for length in lengths)
    given = ["--dataset", work / "prompts.jsonl", "--max-prompt-tokens", limit, "--json"]
    result = run("profile", MODEL, *given, "--out", tmp_path / "trace")
    assert f"{cut} of 24 prompts are cut to --max-prompt-tokens {limit}" in result.stderr.splitlines()
    assert json.loads(result.stdout)["cut_prompts"] == cut > 0
    whole = run("profile", MODEL, "--dataset", work / "prompts.jsonl", "--out", tmp_path / "whole", "--json")
    assert "cut" not in whole.stderr
    assert json.loads(whole.stdout)["cut_prompts"] == 0
    result = run("generate", MODEL, *given[:-1], "--limit", 4, "--max-new-tokens", 1, "--ep-size", 2, "--json")
    assert json.loads(result.stdout)["cut_prompts"] == sum(length > limit for length in lengths[:4])
    assert result.stderr.count("prompts are cut") == int(json.loads(result.stdout)["cut_prompts"] > 0)


def test_running_text_is_said_to_be_no_list_of_prompts(tmp_path):
    (tmp_path / "six.txt").write_text("A line.\n" * 6)
    result = run("profile", MODEL, "--dataset", tmp_path / "six.txt", "--out", tmp_path / "trace")
    line = next(line for line in result.stderr.splitlines() if "running text" in line)
    assert "six.txt" in line
    assert "prompts used: 1" in line
    assert "jsonl" in line


def test_profile_refuses_to_mix_datasets_or_models(work, tmp_path):
    shutil.copytree(work / "trace", tmp_path / "trace")
    before = open_trace(tmp_path / "trace").digest()
    other = tmp_path / "other.txt"
    other.write_text("Some other text.\n" * 20)
    refused(run("profile", MODEL, "--dataset", other, "--out", tmp_path / "trace"), "another dataset")
    assert open_trace(tmp_path / "trace").digest() == before


def test_solve_and_replay_as_json(work):
    result = run("replay", work / "trace", "--plan", work / "plan", "--json", "--batch-tokens", 64)
    assert result.exit_code == 0
    assert "24 of 24 requests were profiled: these figures flatter the plan" in result.stderr
    scores = json.loads(result.stdout)
    assert (scores["settings"]["profiled"], scores["settings"]["profiled_requests"]) == (True, 24)
    assert scores["settings"]["ep_size"] == 4
    assert set(scores["methods"]) == {"linear", "semmoe"}
    assert scores["methods"]["semmoe"]["lar"] > scores["methods"]["linear"]["lar"]
    assert len(scores["methods"]["semmoe"]["layers"]) == 6


def test_solve_ends_with_a_verdict_on_the_links_given(work, tmp_path):
    result = run(
        "solve", work / "trace", "--ep-size", 4, "--method", "eplb", "--links", "pcie5", "--out", tmp_path / "p"
    )
    assert result.exit_code == 0, result.output
    assert "linear" in result.stdout
    assert "on PCI Express 5.0 x16 inside a node (nominal, a row per rank), " in result.stdout
    assert "without all-to-all a layer takes" in result.stdout
    assert result.stdout.splitlines()[-1].startswith(("worth it: ", "not worth it: "))
    assert "warning" not in result.stderr


def test_the_verdict_as_json_and_in_the_plan(work, tmp_path):
    command = ["solve", work / "trace", "--ep-size", 4, "--method", "paper", "--json", "--out", tmp_path / "p"]
    expected = json.loads(run(*command).stdout)["expected"]
    assert expected == load_plan(tmp_path / "p").expected
    assert list(expected["others"]) == ["linear", "eplb"]
    assert expected["links"]["name"] == "H200 NVLink, one node"
    times = {"dispatch_us", "experts_us", "combine_us", "all_reduce_us", "hooks_us", "all_to_all_us", "layer_us"}
    assert times <= set(expected)
    assert expected["hooks_us"] > 29
    assert all(o["hooks_us"] == 0 for o in (*expected["others"].values(), expected["without_all_to_all"]))
    assert times == set(expected["without_all_to_all"])
    assert all(
        times | {"lar", "remote_ranks_per_token", "load_max_over_mean"} <= set(o) for o in expected["others"].values()
    )
    assert set(expected["verdict"]) == {"worth_it", "gain", "against", "sentence"}
    rivals = [*expected["others"].values(), expected["without_all_to_all"]]
    assert expected["verdict"]["gain"] == pytest.approx(1 - expected["layer_us"] / min(r["layer_us"] for r in rivals))
    pairs, f = np.array(expected["bytes_per_rank_pair"]), load_plan(tmp_path / "p").fingerprint
    rows = expected["remote_ranks_per_token"] * expected["tokens_per_batch"]
    assert pairs.sum() == pytest.approx(rows * (f.hidden_size * (1 + 2) + 8 * f.top_k), rel=1e-3)


def test_a_measured_share_of_all_to_alls_gives_the_gain_of_a_pass(work, tmp_path):
    command = ["solve", work / "trace", "--ep-size", 4, "--links", "pcie5", "--share", 0.4, "--force"]
    command += ["--out", tmp_path / "p"]
    result = json.loads(run(*command, "--json").stdout)
    plan, linear = result["expected"]["all_to_all_us"], result["expected"]["others"]["linear"]["all_to_all_us"]
    saving = 1 - plan / linear
    assert result["end_to_end"]["gain"] == pytest.approx(1 / (1 - 0.4 * saving))
    assert result["end_to_end"]["saving"] == pytest.approx(saving)
    assert result["end_to_end"]["gain"] > 1
    shown = run(*command).stdout.splitlines()[-1]
    assert shown.startswith(f"of the 40.0% of a pass that all-to-alls take, the plan saves {saving:.1%} on PCI ")
    itself = json.loads(run(*command, "--method", "linear", "--json").stdout)["end_to_end"]
    assert (itself["share"], itself["saving"], itself["gain"]) == (0.4, 0, 1)
    assert "end_to_end" not in json.loads(run(*command[:6], *command[8:], "--json").stdout)


def test_a_share_needs_the_widths_of_the_model(tmp_path):
    command = ["--ep-size", 2, "--method", "linear", "--share", 0.4, "--out", tmp_path / "p"]
    refused(run("solve", npz(tmp_path / "t.npz"), *command), "--share needs", "--hidden-size and --expert-size")
    assert not (tmp_path / "p").exists()


def test_only_attention_tp_has_a_rival_without_all_to_all(work, tmp_path):
    for attention, nodes, links in (("dp", 1, "H200 NVLink, one node"), ("tp", 2, "400 Gbit/s")):
        command = ["solve", work / "trace", "--ep-size", 4, "--attention", attention, "--num-nodes", nodes]
        result = run(*command, "--method", "linear", "--json", "--out", tmp_path / attention)
        expected = json.loads(result.stdout)["expected"]
        assert (expected["without_all_to_all"] is None) == (attention == "dp")
        assert links in expected["links"]["name"]
        assert list(expected["others"]) == ["eplb"]


def test_a_trace_without_widths_asks_for_them(tmp_path):
    command = ["solve", npz(tmp_path / "t.npz"), "--ep-size", 2, "--method", "linear", "--force"]
    command += ["--out", tmp_path / "plan"]
    silent = run(*command, "--json")
    assert "--hidden-size and --expert-size" in silent.stderr
    assert json.loads(silent.stdout)["expected"]["verdict"] is None
    half = run(*command, "--hidden-size", 64)
    assert "--hidden-size and --expert-size" in half.stderr
    assert "worth it" not in half.stdout
    full = run(*command, "--hidden-size", 64, "--expert-size", 32)
    assert "worth it" in full.stdout
    assert "warning" not in full.stderr


def test_links_and_widths_that_cannot_be_used_are_refused(work, tmp_path):
    command = ["solve", work / "trace", "--ep-size", 4, "--method", "linear", "--out", tmp_path / "plan"]
    refused(run(*command, "--hidden-size", 7), "--hidden-size is 7, but the trace was profiled with")
    refused(run(*command, "--expert-size", 7), "--expert-size is 7")
    refused(run(*command, "--expert-size", -7), "--expert-size", "greater than or equal to 0")
    refused(run(*command, "--links", "carrier-pigeon"), "no links called 'carrier-pigeon'", "h200-nvlink", "pcie5")
    refused(run(*command, "--links", "pcie5", "--num-nodes", 2), "say nothing of several nodes")
    (tmp_path / "links.json").write_text("{}")
    refused(run(*command, "--links", tmp_path / "links.json"), "links.json is not valid", "name: Field required")
    assert not (tmp_path / "plan").exists()


def test_each_phase_is_charged_by_its_own_all_to_all(work, tmp_path):
    command = [
        "solve",
        work / "trace",
        "--ep-size",
        4,
        "--num-nodes",
        2,
        "--attention",
        "dp",
        "--out",
        tmp_path / "plan",
    ]
    both = [*command, "--links", "h100-400g", "--decode-links", "h100-400g-ll"]
    result = run(*both)
    assert result.exit_code == 0, result.output
    assert (
        "prefill, on H100 NVLink inside nodes, 400 Gbit/s a GPU between them (measured, a row per node)"
        in result.stdout
    )
    assert (
        "decode, on H100 NVLink inside nodes, 400 Gbit/s a GPU between them, low latency (measured, a row per pair)"
        in (result.stdout)
    )
    plan = load_plan(tmp_path / "plan")
    assert [charged["all_to_all"] for charged in plan.settings["charged"].values()] == ["per-node", "per-pair"]
    assert plan.expected["decode"]["verdict"]["sentence"]
    assert plan.expected["rows_by_kind"].keys() == {"per-rank", "per-node", "per-pair"}
    weighed = run(*command, "--force", "--set", "cocluster.remote_node=3")
    assert weighed.exit_code == 0, weighed.output
    assert "charged" not in load_plan(tmp_path / "plan").settings
    refused = run(*both, "--force", "--set", "cocluster.remote_node=3")
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1)
    assert "--decode-links has no effect here: cocluster.remote_node weighs rows" in refused.stderr
    one_node = run(*command, "--force", "--links", "h100-nvlink")
    assert one_node.exit_code == 2
    assert "say nothing of several nodes" in one_node.stderr


def test_a_links_file_of_one_s_own_is_taken_and_named(work, tmp_path):
    links = load_links("pcie5").model_copy(update={"name": "[b]our[/b] cluster"})
    save_json(tmp_path / "links.json", links)
    command = ["solve", work / "trace", "--ep-size", 4, "--method", "linear", "--out", tmp_path / "plan"]
    assert "on [b]our[/b] cluster (nominal, a row per rank)" in run(*command, "--links", tmp_path / "links.json").stdout


def test_replay_all_has_the_documented_keys(tmp_path):
    trace = npz(tmp_path / "t.npz")
    result = run("replay", trace, "--ep-size", 2, "--batch-tokens", 50, "--json", "--profile-share", 0.5)
    methods = json.loads(result.stdout)["methods"]
    assert list(methods) == ["linear", "eplb", "paper", "semmoe"]
    warnings = [line for line in result.stderr.splitlines() if "warning:" in line]
    assert len(warnings) == 1
    assert "least-loaded (sends requests to attention groups" in warnings[0]
    keys = {"lar", "remote_ranks_per_token", "load_max_over_mean", "load_max_over_median", "token_max_over_mean",
            "bytes_ratio", "solve_seconds", "layers"}  # fmt: skip
    assert keys <= set(methods["paper"])
    assert (keys | {"predicted_lar"}) <= set(methods["semmoe"])
    assert methods["linear"]["bytes_ratio"] == 1.0


def test_replay_all_with_groups_and_with_redundant_experts(tmp_path):
    trace = npz(tmp_path / "t.npz")
    common = ["replay", trace, "--ep-size", 4, "--batch-tokens", 50, "--json", "--profile-share", 0.5]
    result = run(*common, "--attention", "hybrid", "--dp-size", 2)
    assert list(json.loads(result.stdout)["methods"]) == list(METHODS)
    assert "warning:" not in result.stderr
    result = run(*common, "--attention", "dp", "--redundant-experts", 4)
    assert list(json.loads(result.stdout)["methods"]) == ["linear", "eplb", "semmoe"]
    left_out = "least-loaded, paper (has no redundant experts)"
    assert left_out in result.stderr


def test_a_plan_of_a_part_of_a_file_says_so_on_all_of_it(work, tmp_path):
    trace = open_trace(work / "trace")
    save_trace(trace.select(np.arange(5)), tmp_path / "part")
    save_trace(trace.select(np.arange(5, 24)), tmp_path / "rest")
    plan = ["--method", "linear", "--ep-size", 4, "--out", tmp_path / "plan"]
    assert run("solve", tmp_path / "part", *plan).exit_code == 0
    for name, profiled, of in (("part", 5, 5), ("rest", 0, 19), (work / "trace", 5, 24)):
        result = run("replay", tmp_path / name, "--plan", tmp_path / "plan", "--json")
        settings = json.loads(result.stdout)["settings"]
        assert (settings["profiled_requests"], settings["requests"]) == (profiled, of)
        assert settings["profiled"] == (profiled > 0)
        assert (f"{profiled} of {of} requests were profiled" in result.stderr) == (profiled > 0)


def test_a_plan_that_names_no_requests_is_doubted(work, tmp_path):
    """It has no hashes of the requests that it was solved on: it loads, and replay says what it cannot know."""
    shutil.copytree(work / "plan", tmp_path / "plan")
    header = json.loads((tmp_path / "plan" / "plan.json").read_text())
    header["profiled_requests"] = False
    (tmp_path / "plan" / "plan.json").write_text(json.dumps(header))
    arrays = load_file(tmp_path / "plan" / "plan.safetensors")
    del arrays["profiled_requests"]
    save_file(arrays, tmp_path / "plan" / "plan.safetensors")
    save_trace(open_trace(work / "trace").select(np.arange(20)), tmp_path / "part")
    result = run("replay", tmp_path / "part", "--plan", tmp_path / "plan", "--json")
    assert json.loads(result.stdout)["settings"]["profiled_requests"] is None
    assert "does not say which requests it was solved on" in result.stderr


def test_a_plan_says_for_how_many_requests_at_a_time_it_expects(work, tmp_path):
    words = ["solve", work / "trace", "--ep-size", 2, "--attention", "dp", "--running", 3]
    result = run(*words, "--out", tmp_path / "plan")
    assert "held-out requests, 3 at a time on each rank" in " ".join(result.output.split())
    assert load_plan(tmp_path / "plan").expected["running"] == 3


def test_answers_that_stand_for_prompts_are_said_in_attention_dp_alone(tmp_path):
    decoded = npz(tmp_path / "t.npz", phase=np.full(400, DECODE, np.uint8))
    warning = "20 of 20 requests have their answers for prompts"
    for attention, groups in (("dp", True), ("tp", False)):
        to = ["--method", "eplb", "--ep-size", 2, "--attention", attention, "--json"]
        solved = run("solve", decoded, *to, "--out", tmp_path / attention)
        replayed = run("replay", decoded, "--plan", tmp_path / attention, "--json")
        compared = run("replay", decoded, *to)
        for result in (solved, replayed, compared):
            assert result.exit_code == 0, result.output
            assert (warning in result.stderr) == groups
            found = json.loads(result.stdout)
            assert found.get("settings", found)["scheduled_by_answers"] == 20 * groups
        held_out = json.loads(solved.stdout)["expected"]
        assert held_out["scheduled_by_answers"] == held_out["requests"] * groups


def test_replay_of_one_method_lists_that_one(tmp_path):
    result = run("replay", npz(tmp_path / "t.npz"), "--ep-size", 2, "--method", "eplb", "--json")
    assert list(json.loads(result.stdout)["methods"]) == ["eplb"]


@pytest.mark.parametrize("command", ["solve", "replay"])
def test_a_trace_without_routed_tokens_is_refused(tmp_path, command):
    save_trace(make_trace([[], []], np.zeros((0, 2, 2)), prompts=[[1], [2]]), tmp_path / "trace")
    out = ["--out", str(tmp_path / "out")] if command == "solve" else []
    words = [command, str(tmp_path / "trace"), "--ep-size", "2", *out]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 2, result.output
    assert "holds no routed token" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("attention", ["dp", "tp"])
def test_generate_on_a_plan_is_verified(work, tmp_path, attention):
    run("solve", work / "trace", "--ep-size", 2, "--attention", attention, "--out", tmp_path / "plan")
    result = run(
        "generate", MODEL, "--plan", tmp_path / "plan", "--dataset", work / "prompts.jsonl", "--limit", 6,
        "--max-new-tokens", 4, "--verify", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["identical"] is True
    assert len(found["completions"]) == 6


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--ep-size", 4, "--num-nodes", 2), ()])
def test_generate_says_where_the_time_went(options):
    arguments = ("generate", MODEL, "--attention", "dp", "--prompt", PROMPTS[0], "--max-new-tokens", 3, "--verify")
    if not options:  # one process
        result = run(*arguments)
        assert result.exit_code == 0, result.output
        assert "time to first token" in result.stdout
    figures = json.loads(run(*arguments, *options, "--json").stdout)
    assert figures["identical"] is True
    assert 0 < figures["communication_share"] < 1
    assert {"dispatch", "combine"} <= set(figures["collective_seconds"])
    waited = sum(figures["collective_seconds"].values())
    assert waited + sum(figures["compute_seconds"].values()) < figures["seconds"]
    assert 0 < figures["time_to_first_token"] < figures["seconds"]


def test_a_plan_for_another_model_is_refused_by_name(work, tmp_path):
    plan = tmp_path / "plan"
    run("solve", npz(tmp_path / "foreign.npz"), "--ep-size", 2, "--out", plan)
    refused(run("generate", MODEL, "--plan", plan, "--prompt", "x"), "another model or tokenizer", "foreign")
    refused(run("replay", work / "trace", "--plan", plan), "another model or tokenizer")


def test_settings_that_contradict_or_do_nothing_are_refused(work):
    refused(run("generate", MODEL, "--plan", work / "plan", "--ep-size", 2, "--prompt", "x"), "ep_size 4")
    refused(run("generate", MODEL, "--plan", work / "plan", "--attention", "dp", "--prompt", "x"), "attention tp")
    refused(run("generate", MODEL, "--plan", work / "plan", "--num-nodes", 2, "--prompt", "x"), "num_nodes 1")
    refused(run("replay", work / "trace", "--plan", work / "plan", "--ep-size", 4), "--ep-size has no effect")
    refused(
        run("solve", work / "trace", "--method", "eplb", "--set", "paper.theta=0.2", "--out", "x"),
        "--set paper.theta has no effect",
    )
    refused(run("solve", work / "trace", "--set", "paper.theta=0.2", "--out", "x"), "--set paper.theta has no effect")
    refused(run("solve", work / "trace", "--method", "paper", "--load-limit", 1.2, "--out", "x"), "its own objective")
    prompts_only = run("solve", work / "trace", "--attention", "dp", "--set", "predictor.lookback=1", "--out", "x")
    refused(prompts_only, "--set predictor.lookback has no effect")
    redundant = run("solve", work / "trace", "--method", "paper", "--redundant-experts", 4, "--out", "x")
    refused(redundant, "no redundant experts")
    copies = run("replay", work / "trace", "--method", "lab.methods.moetuner", "--redundant-experts", 8)
    refused(copies, "no redundant experts")
    for command in (["solve", work / "trace", "--out", "x"], ["replay", work / "trace"]):
        for method in ("least-loaded", "lab.methods.eldr"):
            scheduling = run(*command, "--method", method, "--attention", "tp")
            refused(scheduling, f"method {method} does not apply", "attention groups")


NO_SOLVE = "from semmoe.placement.methods import Method\n\nMETHOD = Method(__name__)\n"
OWN_METHOD = """from pathlib import Path

from semmoe.placement.methods import Method
from semmoe.placement.linear import solve

METHOD = Method(__name__, copies=True)
Path(__file__).with_name("imported").touch()
"""


@pytest.fixture
def own_package(tmp_path, monkeypatch):
    """A package with modules for --method, of which `striped` holds a method and leaves a file when it is imported."""
    name = f"own_{tmp_path.name}"
    folder = tmp_path / name
    folder.mkdir()
    (folder / "striped.py").write_text(OWN_METHOD)
    (folder / "empty.py").touch()
    (folder / "without_solve.py").write_text(NO_SOLVE)
    (folder / "broken.py").write_text('raise RuntimeError("first line\\nsecond line")\n')
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_a_method_is_taken_from_a_module_by_its_dotted_name(own_package, tmp_path):
    trace, method = npz(tmp_path / "t.npz"), f"{own_package}.striped"
    options = ["--method", method, "--ep-size", 2, "--redundant-experts", 2]
    result = run("replay", trace, *options, "--batch-tokens", 50, "--json")
    methods = json.loads(result.stdout)["methods"]
    assert list(methods) == [method]
    assert run("solve", trace, *options, "--out", tmp_path / "plan").exit_code == 0
    assert load_plan(tmp_path / "plan").method == method
    assert load_plan(tmp_path / "plan").settings == {"method": method, "redundant_experts": 2}


@pytest.mark.parametrize(
    ("module", "words"),
    [
        ("absent", "No module named"),
        ("empty", "has no attribute 'METHOD'"),
        ("without_solve", "has no attribute 'solve'"),
        ("broken", "first line second line"),
    ],
)
def test_a_module_without_a_method_is_refused_before_the_work(own_package, tmp_path, module, words):
    method = f"{own_package}.{module}"
    for command in (["solve", "absent", "--out", tmp_path / "plan"], ["replay", "absent"]):
        refused(run(*command, "--method", method), f"method {method} cannot be loaded", words, "PYTHONPATH")
    assert not (tmp_path / "plan").exists()


@pytest.mark.parametrize("method", [".", "..", ".striped", "/etc/x.y", "1.5", "os.system", "os.path"])
def test_names_that_are_no_module_with_a_method_are_refused(method):
    refused(run("replay", "absent", "--method", method), "method")


@pytest.mark.parametrize("method", ["exflow", "os.system", "{package}.striped"])
def test_the_method_of_a_plan_is_shown_and_never_imported(own_package, tmp_path, method):
    """A plan solved before by a method that has moved, and plans whose method names a module."""
    trace, plan = npz(tmp_path / "t.npz"), tmp_path / "plan"
    assert run("solve", trace, "--ep-size", 2, "--method", "eplb", "--out", plan).exit_code == 0
    header = json.loads((plan / "plan.json").read_text())
    header["method"] = header["settings"]["method"] = method.format(package=own_package)
    (plan / "plan.json").write_text(json.dumps(header))
    result = run("replay", trace, "--plan", plan, "--json")
    assert list(json.loads(result.stdout)["methods"]) == ["linear", header["method"]]
    assert run("report", plan, "--out", tmp_path / "report.html").exit_code == 0
    assert not (tmp_path / own_package / "imported").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["replay", "absent"], ["no trace at absent"]),
        (
            ["replay", "{trace}", "--method", "semmoe", "--ep-size", 4, "--redundant-experts", 3],
            ["4 does not divide 35 experts (3 redundant) (nearest: 1 and 5)", "that fit: 0 and 4"],
        ),
        (
            ["replay", "{trace}", "--ep-size", 7],
            ["ep_size 7 does not divide 32 experts (nearest: 4 and 8)", "that fit: 3"],
        ),
        (["replay", "{trace}", "--method", "magic"], ["'magic'"]),
        (["replay", "{trace}", "--profile-share", 1.5], ["--profile-share", "less than or equal to 0.999"]),
        (["solve", "{trace}", "--attention", "hybrid", "--out", "p"], ["dp_size"]),
        (
            ["solve", "{trace}", "--set", "predictor.lookback=9", "--out", "p"],
            ["lookback must lie between 0 and 8, not 9"],
        ),
        (["solve", "{trace}", "--set", "lookback=9", "--out", "p"], ["no setting lookback", "predictor.lookback"]),
        (["solve", "{trace}", "--set", "paper", "--out", "p"], ["no setting paper", "paper.theta"]),
        (["solve", "{trace}", "--set", "seed", "--out", "p"], ["--set seed: '' is not a number"]),
        (["solve", "{trace}", "--set", "paper.theta=nan", "--out", "p"], ["theta must lie between", "not nan"]),
        (
            ["solve", "{trace}", "--set", "cocluster.copy_choice=x", "--out", "p"],
            ["copy_choice must be static or cover"],
        ),
        (["replay", "{trace}", "--plan", "{plan}", "--set", "seed=1"], ["--set has no effect", "--plan decides it"]),
        (["solve", "{trace}", "--load-limit", 0.5, "--out", "p"], ["load_limit", "0.5"]),
        (["replay", "{trace}", "--running", 4], ["--running has no effect", "no requests are scheduled"]),
        (["solve", "{trace}", "--attention", "dp", "--method", "eplb", "--running", 4, "--out", "p"], ["--running"]),
        (["replay", "{trace}", "--plan", "{plan}", "--running", 4], ["--running has no effect"]),
        (["replay", "{trace}", "--running", -1], ["--running", "greater than or equal to 0"]),
        (["profile", "absent", "--out", "t"], ["absent does not exist"]),
        (["profile", MODEL, "--dataset", "absent.jsonl", "--out", "t"], ["no dataset file"]),
        (["generate", MODEL, "--prompt", ""], ["prompt is empty"]),
        (["generate", MODEL, "--prompt", "x", "--max-new-tokens", 0], ["--max-new-tokens"]),
        (["generate", MODEL, "--prompt", "x", "--attention", "dp", "--exchange", "all-reduce"], ["attention-TP"]),
        (["generate", MODEL, "--prompt", "x", "--exchange", "two-level"], ["--exchange", "all-reduce"]),
        (["serve", MODEL, "--shuffle-from", 5, "--dry-run"], ["--shuffle-from has no effect"]),
        (["generate", MODEL, "--prompt", "x", "--shuffle-from", 5], ["--shuffle-from has no effect"]),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, words, work, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused(run(*[str(a).format(trace=work / "trace", plan=work / "plan") for a in arguments]), *words)
    assert not list(tmp_path.iterdir())  # nothing half-written


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", ["holds no prompt"]),
        ("{oops\n", ["holds no usable prompt", "1 of 1 records", "line 1: not valid JSON"]),
        ('{"prompt": "a"}\n' * 8 + '{"b": 1}\n' * 2, ["2 of 10 records", "more than a tenth", "line 9", "'b'"]),
        ('{"url": "/v1/embeddings", "body": {"input": "a"}}\n', ["holds no usable prompt", "/v1/embeddings"]),
    ],
)
def test_bad_datasets_are_named(content, words, tmp_path):
    (tmp_path / "d.jsonl").write_text(content)
    refused(run("profile", MODEL, "--dataset", tmp_path / "d.jsonl", "--out", tmp_path / "t"), *words)
    assert not (tmp_path / "t").exists()


def picky_model(folder):
    """A copy of the shipped model whose chat template takes no system turns."""
    shutil.copytree(MODEL, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("command", ["profile", pytest.param("generate", marks=pytest.mark.slow)])
def test_bad_records_are_left_out_counted_and_told(command, tmp_path):
    model, data = picky_model(tmp_path / "model"), tmp_path / "d.jsonl"
    user, system = {"role": "user", "content": "def f():"}, {"role": "system", "content": "Be brief."}
    talks = [[user], [system, user], [], [user]]
    data.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    most = ["--out", tmp_path / "t"] if command == "profile" else ["--ep-size", 1]
    words = [command, model, "--dataset", data, "--max-new-tokens", 1, *most, "--json"]
    result = run(*words)
    assert result.exit_code == 0, result.output
    counts = {"the model's chat template refuses it": 1, "an empty conversation": 1}
    told = json.loads(result.stdout)
    assert (told["records"], told["left_out"]) == (4, counts)
    line = next(line for line in result.stderr.splitlines() if "left out" in line)
    assert f"{data}: 2 of 4 conversations left out: the model's chat template refuses it (1), an empty" in line
    assert "first: line 2: the model's chat template refuses it: no system turns" in line
    refused(run(*words, "--strict"), "line 2: the model's chat template refuses it: no system turns")
    if command == "profile":  # the prompts that are left decide whether a trace is resumed
        assert "resuming: 2 of 2" in run(*words).stderr


def test_a_token_id_out_of_range_is_named(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": [1, 2, 99999]}\n')
    refused(run("profile", MODEL, "--dataset", tmp_path / "d.jsonl", "--out", tmp_path / "t"), "99999", "4096")
    bad = npz(tmp_path / "t.npz", vocab_size=10)
    refused(run("replay", bad), "out of range for 10 vocabulary")


def test_a_truncated_shard_is_named_and_nothing_is_lost(work, tmp_path):
    shutil.copytree(work / "trace", tmp_path / "trace")
    shard = next((tmp_path / "trace").glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-100])
    refused(run("solve", tmp_path / "trace", "--ep-size", 4, "--out", tmp_path / "plan"), "shard-00000", "truncated")
    assert not (tmp_path / "plan").exists()


def test_a_full_disk_is_one_line_and_leaves_the_old_plan(work, tmp_path):
    shutil.copytree(work / "plan", tmp_path / "plan")
    code = (
        "import resource, sys; from semmoe.cli import main; import numba;"
        "sys.argv = ['semmoe', 'solve', sys.argv[1], '--ep-size', '4', '--seed', '5',"
        " '--out', sys.argv[2], '--force'];"
        "from semmoe import plan as p; real = p.save_plan;"
        "limit = lambda *a: (resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)), real(*a));"
        "p.save_plan = limit; main()"
    )
    command = [sys.executable, "-c", code, str(work / "trace"), str(tmp_path / "plan")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "File too large" in result.stderr
    assert load_plan(tmp_path / "plan").settings["seed"] == 0
    assert [p.name for p in tmp_path.iterdir()] == ["plan"]


def test_every_command_explains_itself():
    top = run("--help").stdout
    assert len(typer.main.get_command(app).commands) <= 16
    for command in ("profile", "trace info", "solve", "replay", "apply", "generate", "demo"):
        assert command.split()[0] in top
        assert "semmoe " + command in run(*command.split(), "--help").stdout.replace("\n", " ")


def test_offline_commands_need_neither_torch_nor_an_engine(tmp_path):
    code = (
        "import sys, importlib.abc\n"
        "class Absent(importlib.abc.MetaPathFinder):\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('torch', 'transformers', 'tokenizers'):\n"
        "            raise ModuleNotFoundError(name, name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from semmoe.cli import main\n"
        "def run(*words):\n"
        "    sys.argv[1:] = words\n"
        "    try:\n"
        "        main()\n"
        "    except SystemExit as end:\n"
        "        return end.code or 0\n"
        "trace, plan = sys.argv[1:]\n"
        "codes = [run('solve', trace, '--ep-size', '2', '--out', plan), run('replay', trace, '--plan', plan)]\n"
        "codes += [run('trace', 'info', trace), run('generate', 'tiny', '--prompt', 'x')]\n"
        "assert codes == [0, 0, 0, 2], codes\n"
    )
    words = [sys.executable, "-c", code, npz(tmp_path / "t.npz"), tmp_path / "plan"]
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert install_hint("transformers") in done.stderr


@pytest.mark.parametrize(
    ("recorded", "command"),
    [
        (None, "pip install 'semmoe[serve]'"),
        (
            '{"url": "file:///home/me/semmoe", "dir_info": {"editable": true}}',
            "pip install -e '/home/me/semmoe[serve]'",
        ),
        ('{"url": "file:///tmp/a%20b.whl", "archive_info": {}}', "pip install '/tmp/a b.whl[serve]'"),
        ('{"url": "https://host/semmoe.whl", "archive_info": {}}', "pip install 'semmoe[serve]'"),
    ],
)
def test_a_missing_extra_is_installed_from_where_semmoe_came(recorded, command, monkeypatch):
    monkeypatch.setattr(PathDistribution, "read_text", lambda self, name: recorded)
    assert install_hint("serve") == command


def test_ctrl_c_elsewhere_promises_no_resuming(work, tmp_path, monkeypatch):
    def interrupt(*arguments, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr("semmoe.solver.solve_problem", interrupt)
    result = run("solve", work / "trace", "--ep-size", 4, "--out", tmp_path / "plan")
    assert result.exit_code == 130
    assert "stopped; nothing was left half-written" in result.stderr
    assert not list(tmp_path.iterdir())


def cpu_seconds(pid: int) -> float:
    """User time that a process has had so far (Linux)."""
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11]) / os.sysconf("SC_CLK_TCK")


@pytest.mark.slow
def test_ctrl_c_leaves_a_usable_trace_and_a_second_run_completes_it(tmp_path):
    texts = [{"prompt": PROMPTS[i % 24] * 6} for i in range(400)]
    (tmp_path / "many.jsonl").write_text("".join(json.dumps(row) + "\n" for row in texts))
    trace = tmp_path / "trace"
    arguments = ["profile", "tiny", "--dataset", tmp_path / "many.jsonl", "--batch-size", 4, "--out", trace]
    # The import of a model's code takes seconds, and is not recording.
    code = "import semmoe.engines.transformers.model; from semmoe.cli import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, arguments)], stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    while not (trace / "trace.json").exists():
        assert process.poll() is None
        time.sleep(0.05)
    begun = cpu_seconds(process.pid)
    while cpu_seconds(process.pid) < begun + 2.5:  # not by the clock: other work may share the cores
        assert process.poll() is None
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "the same command resumes" in errors
    recorded = open_trace(trace).num_requests
    assert 0 < recorded < 400
    assert f"resuming: {recorded} of 400" in run(*arguments).stderr
    assert open_trace(trace).num_requests == 400


def test_a_dry_run_of_serve_leaves_a_servers_folder_as_it_is(tmp_path):
    for name in ("control.json", "activity-rank-00000.json"):
        (tmp_path / name).write_text("{}")
    result = CliRunner().invoke(app, ["serve", str(MODEL), "--control", str(tmp_path), "--dry-run"])
    assert result.exit_code == 0, result.output
    assert "sglang.launch_server" in result.stdout
    assert {p.name for p in tmp_path.iterdir()} == {"control.json", "activity-rank-00000.json"}
