"""No code of a model directory is run, by any command, whatever is typed at its question."""

import json
import shutil
from dataclasses import replace

import pytest
import transformers
import typer
from synthetic import make_trace
from test_apply import plan_for
from typer.testing import CliRunner

from lab.__main__ import app as lab
from lab.save import save_trace
from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.cli.options import model_path
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.tokenizer import load_tokenizer

CODE = """
from pathlib import Path
Path({written!r}).touch()
from transformers import PreTrainedConfig, PreTrainedTokenizerFast, Qwen3MoeForCausalLM
class OwnConfig(PreTrainedConfig):
    model_type = "own_moe"
class OwnTokenizer(PreTrainedTokenizerFast):
    pass
class OwnModel(Qwen3MoeForCausalLM):
    pass
"""
TOPOLOGY = ["--ep-size", "2"]
COMMANDS = {
    "profile": ["profile", "MODEL", "--out", "OUT"],
    "generate": ["generate", "MODEL", "--limit", "1", *TOPOLOGY],
    "calibrate": ["calibrate", "MODEL", "--out", "OUT", *TOPOLOGY],
    "apply": ["apply", "PLAN", "--model", "MODEL", "--out", "OUT"],
    "import": ["import", "MAP", "--model", "MODEL", "--out", "OUT", *TOPOLOGY],
    "solve": ["solve", "TRACE", "--model", "MODEL", "--out", "OUT", *TOPOLOGY],
    "doctor": ["doctor", "--model", "MODEL"],
    "serve": ["serve", "MODEL", "--plan", "PLAN"],
    "picker": ["picker", "127.0.0.1:1", "--plan", "PLAN", "--tokenizer", "MODEL"],
}


def directory(folder, kind, own):
    """The shipped model with code of its own. kind: its model_type; own: the classes for which `auto_map` names it."""
    path = folder / "model"
    shutil.copytree(MODEL, path)
    (path / "own.py").write_text(CODE.format(written=str(folder / "written")))
    mapped = {name: f"own.{name.replace('Auto', 'Own').replace('ModelForCausalLM', 'Model')}" for name in own}
    for name, changes in (
        ("config.json", {"model_type": kind, "auto_map": mapped}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, mapped["AutoTokenizer"]]}}
         if "AutoTokenizer" in own else {}),
    ):  # fmt: skip
        stated = json.loads((path / name).read_text()) | changes
        if "AutoTokenizer" in own and name == "tokenizer_config.json":
            stated["tokenizer_class"] = "OwnTokenizer"
        (path / name).write_text(json.dumps(stated))
    return path


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    f = fingerprint_of(str(MODEL))
    experts = [[list(range(f.top_k))] * f.num_layers] * 8
    sizes = {"vocab_size": f.vocab_size, "num_experts": f.num_experts}
    save_trace(make_trace([[1, 2, 3, 4], [5, 6, 7, 8]], experts, **sizes), folder / "trace")
    (folder / "map.json").write_text(json.dumps({"physical_to_logical_map": list(range(f.num_experts))}))
    plan = plan_for(str(MODEL), folder / "plan", 0, ep_size=2)
    return {"TRACE": str(folder / "trace"), "MAP": str(folder / "map.json"), "PLAN": str(plan)}


def commands_that_take_a_model():
    """The names of commands of which a parameter is a model's directory."""
    found = typer.main.get_command(app).commands | typer.main.get_command(lab).commands
    return {name for name, one in found.items() if any(_is_model(param) for param in one.params)}


def _is_model(param):
    return getattr(param.callback, "__wrapped__", param.callback) is model_path or param.name == "tokenizer"


def test_every_command_that_takes_a_model_is_walked():
    assert commands_that_take_a_model() == set(COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_runs_the_code_of_a_model_of_unknown_type(name, files, tmp_path):
    model = directory(tmp_path, "own_moe", ("AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"))
    places = {"MODEL": str(model), "OUT": str(tmp_path / "out"), **files}
    group = lab if name == "calibrate" else app
    result = CliRunner().invoke(group, [places.get(word, word) for word in COMMANDS[name]], input="y\n" * 9)
    assert "Do you wish" not in result.output
    assert not (tmp_path / "written").exists()
    if name == "doctor":  # it shows that no plan is served for the model
        assert "refused" in result.output
    else:
        assert result.exit_code in (1, 2), result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_the_code_would_be_run_if_it_were_trusted(tmp_path, monkeypatch):
    """The check of the other tests can fail."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(str(tmp_path / "modules"))
    model = directory(tmp_path, "own_moe", ("AutoConfig",))
    transformers.AutoConfig.from_pretrained(model, trust_remote_code=True)
    assert (tmp_path / "written").exists()


@pytest.mark.parametrize("own", [("AutoConfig",), ("AutoConfig", "AutoModelForCausalLM")])
def test_a_known_type_is_read_by_transformers_own_classes(own, tmp_path):
    model = str(directory(tmp_path, "qwen3_moe", own))
    assert fingerprint_of(model) == replace(fingerprint_of(str(MODEL)), model="model")
    assert type(load_model(model)).__module__.startswith("transformers.")
    assert not (tmp_path / "written").exists()


def test_a_tokenizer_with_code_of_its_own_is_refused(tmp_path):
    model = str(directory(tmp_path, "qwen3_moe", ("AutoTokenizer",)))
    with pytest.raises(ValueError, match="its tokenizer brings the class OwnTokenizer along"):
        load_tokenizer(model)
    with pytest.raises(ValueError, match="OwnTokenizer"):
        fingerprint_of(model)
    assert not (tmp_path / "written").exists()


def test_a_kernel_of_the_hub_is_refused(tmp_path):
    model = directory(tmp_path, "qwen3_moe", ())
    config = json.loads((model / "config.json").read_text()) | {"attn_implementation": "someone/kernel"}
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="names an attention kernel of the hub"):
        fingerprint_of(str(model))


ODD_CONFIGS = {
    "no type": {"model_type": None},
    "a list as type": {"model_type": ["qwen3_moe"]},
    "no experts": {"model_type": "llama", "num_experts": None, "num_local_experts": None},
    "a list of experts": {"num_experts": [32, 32]},
    "half an expert": {"num_experts": 32.5},
    "a word for a size": {"hidden_size": "wide"},
    "no vocabulary": {"vocab_size": None},
    "a vision model": {"model_type": "qwen3_vl_moe", "text_config": 3},
}


@pytest.mark.parametrize("name", ODD_CONFIGS)
def test_an_odd_configuration_is_refused_in_one_line(name, tmp_path):
    model = directory(tmp_path, "qwen3_moe", ())
    config = json.loads((model / "config.json").read_text()) | ODD_CONFIGS[name]
    (model / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="model") as refused:
        fingerprint_of(str(model))
    assert "\n" not in str(refused.value)
