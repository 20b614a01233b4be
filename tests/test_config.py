"""`semmoe --config FILE`, and `semmoe init`, which writes one from the command of an engine that serves today."""

import json
import shlex

import pytest
from models import build
from synthetic import random_trace
from test_apply import failed
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.engines import deployment
from semmoe.plan import load_plan
from semmoe.topology import Topology
from semmoe.trace import save_trace


def run(*words):
    return CliRunner().invoke(app, list(map(str, words)))


@pytest.fixture
def trace(tmp_path):
    save_trace(random_trace(0, requests=40), tmp_path / "trace")
    return tmp_path / "trace"


def configured(folder, text):
    path = folder / "semmoe.toml"
    path.write_text(text)
    return path


def test_options_of_a_file_hold_where_none_are_given(tmp_path, trace):
    config = configured(tmp_path, '[solve]\nep-size = 2\nattention = "dp"\nquick = true\nredundant-experts = 4\n')
    for given, expected in (([], 2), (["--ep-size", 4], 4)):
        plan = tmp_path / f"plan-{expected}"
        assert run("--config", config, "solve", trace, "--out", plan, *given).exit_code == 0
        topology = load_plan(plan).topology
        assert (topology.ep_size, topology.dp_size) == (expected, expected)
        assert load_plan(plan).placement.redundant_experts == 4


def test_a_required_option_may_stand_in_the_file(tmp_path, trace):
    config = configured(tmp_path, f'[solve]\nep-size = 2\nout = "{tmp_path}/plan"\nquick = true\n')
    assert run("--config", config, "solve", trace).exit_code == 0
    assert load_plan(tmp_path / "plan").topology.ep_size == 2


def test_commands_of_groups_have_tables_of_their_own(tmp_path, trace):
    config = configured(tmp_path, "[trace.sample]\ntokens = 50\n")
    done = run("--config", config, "trace", "sample", trace, "--out", tmp_path / "drawn", "--json")
    assert json.loads(done.stdout)["tokens"] < 70


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[solve", "is not valid TOML"),
        ("[solv]\n", "there is no command solv"),
        ("[record.begin]\n", "there is no command record begin"),
        ("solve = 3\n", "solve must be a table of options, [solve]"),
        ("[solve]\nep_size = 2\n", "solve has no option ep_size"),
        ("[solve]\nhelp = true\n", "solve has no option help"),
        ('[solve]\nep-size = "two"\n', "--ep-size"),
        ("[solve]\nep-size = 0\n", "--ep-size"),
        ("[solve]\ntheta = 0.5\n", "--theta has no effect here"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_in_one_line(tmp_path, trace, text, words):
    failed(run("--config", configured(tmp_path, text), "solve", trace, "--out", tmp_path / "plan"), 2, words)
    assert not (tmp_path / "plan").exists()


def test_a_file_that_is_not_there_is_named(tmp_path, trace):
    failed(run("--config", tmp_path / "none.toml", "solve", trace, "--out", tmp_path / "plan"), 2, "none.toml")


VLLM = "vllm serve m --enable-expert-parallel"
SGLANG = "python -m sglang.launch_server --model-path m --moe-a2a-backend deepep"


@pytest.mark.parametrize(
    ("command", "topology", "copies", "port", "options"),
    [
        (f"{VLLM} -dp 8", Topology(ep_size=8, dp_size=8), 0, 8000, ""),
        (f"{VLLM} -tp 4 --port=9", Topology(ep_size=4), 0, 9, ""),
        (f"{VLLM} -tp 2 -dp 4 -dpl 2 --max-num-seqs 8", Topology(ep_size=8, dp_size=4, num_nodes=2), 0, 8000,
         "-dpl 2 --max-num-seqs 8"),
        (f"""{VLLM} -dp 4 --enable-eplb --eplb-config '{{"num_redundant_experts": 4}}' --host 0.0.0.0 --seed 1""",
         Topology(ep_size=4, dp_size=4), 4, 8000, "--seed 1"),
        (f"{SGLANG} --tp 4", Topology(ep_size=4), 0, 30000, "--moe-a2a-backend deepep"),
        (f"{SGLANG} --tp-size 8 --dp 8 --enable-dp-attention --nnodes 2 --port 7 --ep-num-redundant-experts 16",
         Topology(ep_size=8, dp_size=8, num_nodes=2), 16, 7, "--moe-a2a-backend deepep --nnodes 2"),
        ("sglang serve --model-path m --tp 2 --ep 2 --enable-metrics --dtype float32", Topology(ep_size=2), 0, 30000,
         "--dtype float32"),
    ],
)  # fmt: skip
def test_a_deployment_is_read_from_its_command(command, topology, copies, port, options):
    found = deployment.read(shlex.split(command), 0)
    assert (found.topology, found.redundant, found.port) == (topology, copies, port)
    assert found.options == tuple(options.split())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ("", "give the engine's command after --"),
        ("python server.py", "give the engine's command after --"),
        ("vllm serve m -dp 4", "give --enable-expert-parallel"),
        (VLLM, "more ranks than one"),
        (f"{VLLM} -dp four", "-dp must be a number from 1 on, not 'four'"),
        (f"{VLLM} -dp 4 --eplb-config x", "--eplb-config is not valid JSON"),
        ("python -m sglang.launch_server --tp 4", "semmoe serves with --ep-size 4, as --tp-size"),
        (f"{SGLANG} --tp 4 --ep 2", "semmoe serves with --ep-size 4, as --tp-size"),
        (f"{SGLANG} --tp 4 --dp 2", "--dp-size without --enable-dp-attention starts replicas"),
    ],
)
def test_a_command_that_starts_no_expert_parallelism_is_refused(tmp_path, command, words):
    failed(run("init", "tiny", "--out", tmp_path / "c.toml", "--", *shlex.split(command)), 2, words)
    assert not (tmp_path / "c.toml").exists()


@pytest.mark.parametrize("command", [f"{VLLM} -tp 2 -dp 2", f"{SGLANG} --tp 4 --dp 4 --enable-dp-attention"])
def test_what_init_writes_solves_and_serves(tmp_path, trace, command):
    config, plan = tmp_path / "c.toml", tmp_path / "plan"
    done = run("init", "tiny", "--out", config, "--redundant-experts", 8, "--json", "--", *shlex.split(command))
    told = json.loads(done.stdout)
    assert (told["refused"], told["redundant_experts"]) == ([], 8)
    topology = deployment.read(shlex.split(command), 0).topology
    assert run("--config", config, "solve", trace, "--out", plan, "--quick").exit_code == 0
    assert load_plan(plan).topology == topology
    assert load_plan(plan).placement.redundant_experts == 8
    words = next(words for words in told["commands"] if "serve" in words and "--plan" not in words)
    dry = words.index("--") if "--" in words else len(words)
    shown = run(*words[1:dry], "--control", tmp_path / "control", "--dry-run", *words[dry:])
    assert shown.exit_code == 0, shown.output
    for flag in ("--data-parallel-size 2", "--tensor-parallel-size 2") if "vllm" in command else ("--dp-size 4",):
        assert flag in shown.stdout


def test_what_is_not_supported_is_said_and_nothing_is_written(tmp_path):
    model = build("qwen3_moe", tmp_path)
    config = json.loads((tmp_path / model / "config.json").read_text()) | {"model_type": "mistery_moe"}
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(config))
    done = run("init", tmp_path / "other", "--out", tmp_path / "c.toml", "--", *shlex.split(f"{VLLM} -dp 2"))
    assert done.exit_code == 1
    assert "refused: no plan is served for models of type 'mistery_moe' on vllm" in " ".join(done.stdout.split())
    assert not (tmp_path / "c.toml").exists()


def test_doctor_shows_what_is_supported_of_a_configuration(tmp_path):
    rows = json.loads(run("doctor", "--model", "tiny", "--json").stdout)["supported"]
    assert {(row["engine"], row["use"]) for row in rows} >= {("sglang", "copies"), ("vllm", "tokens shuffled")}
    assert all(row["state"] == "works, by a test" for row in rows)
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = json.loads(run("doctor", "--model", tmp_path, "--engine", "transformers", "--json").stdout)["supported"]
    assert rows == []
    assert "refused" in run("doctor", "--model", tmp_path).stdout
