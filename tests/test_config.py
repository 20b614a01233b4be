"""`semmoe --config FILE`, and what `semmoe doctor` says of a model's configuration."""

import json

import pytest
from synthetic import random_trace
from test_apply import failed
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.plan import load_plan
from semmoe.traces.trace import save_trace


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
    config = configured(tmp_path, f'[trace.merge]\nout = "{tmp_path}/joined"\n')
    done = run("--config", config, "trace", "merge", trace, "--json")
    assert json.loads(done.stdout)["out"] == f"{tmp_path}/joined"


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
        ('[solve]\nset = ["paper.theta=0.5"]\n', "--set paper.theta has no effect here"),
    ],
)
def test_what_is_wrong_in_the_file_is_said_in_one_line(tmp_path, trace, text, words):
    failed(run("--config", configured(tmp_path, text), "solve", trace, "--out", tmp_path / "plan"), 2, words)
    assert not (tmp_path / "plan").exists()


def test_a_file_that_is_not_there_is_named(tmp_path, trace):
    failed(run("--config", tmp_path / "none.toml", "solve", trace, "--out", tmp_path / "plan"), 2, "none.toml")


def test_doctor_shows_what_is_supported_of_a_configuration(tmp_path):
    rows = json.loads(run("doctor", "--model", "tiny", "--json").stdout)["supported"]
    assert {(row["engine"], row["use"]) for row in rows} >= {("sglang", "copies"), ("vllm", "tokens shuffled")}
    assert all(row["state"] == "works, by a test" for row in rows)
    config = {"model_type": "deepseek_v4", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    rows = json.loads(run("doctor", "--model", tmp_path, "--engine", "transformers", "--json").stdout)["supported"]
    assert rows == []
    assert "refused" in run("doctor", "--model", tmp_path).stdout
