"""`semmoe apply` as people and scripts meet it, and the files that it writes for engines."""

import hashlib
import json
import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from models import build
from typer.testing import CliRunner

from semmoe.checkpoint import relabel as relabelling
from semmoe.checkpoint.directory import open_checkpoint
from semmoe.checkpoint.engine_maps import write_sglang
from semmoe.checkpoint.relabel import RECORD, Record
from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.core import Placement, Plan
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.model import load_model
from semmoe.plan import load_plan, save_plan
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology


def run(*arguments):
    return CliRunner().invoke(app, ["apply", *map(str, arguments)])


def failed(result, code, *words):
    """The exit code and one line on stderr that says what is wrong; no traceback."""
    lines = [line for line in result.stderr.splitlines() if "error:" in line]
    assert result.exit_code == code, result.output
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0]


def plan_for(path, folder, redundant=0, **topology):
    """A plan directory with random placement for the model at `path`."""
    f, rng = fingerprint_of(str(path)), np.random.default_rng(0)
    size = f.num_experts // f.num_groups
    rows = []
    for _ in range(f.num_layers):
        order = np.concatenate([g * size + rng.permutation(size) for g in rng.permutation(f.num_groups)])
        rows.append(np.concatenate([order, rng.permutation(f.num_experts)[:redundant]]))
    topology = Topology(**({"ep_size": 4} | topology))
    placement = Placement(
        physical_to_logical_map=np.array(rows, np.int32), num_experts=f.num_experts, ep_size=topology.ep_size
    )
    plan = Plan(
        topology=topology,
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=topology.dp_size),
        fingerprint=f,
        method="test",
        trace_hash="1234",
    )  # fmt: skip
    save_plan(plan, folder)
    return folder


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan for the embedded model."""
    return plan_for(MODEL, tmp_path_factory.mktemp("plans") / "plan")


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """A model whose first layer is dense."""
    return build("deepseek_v3", tmp_path_factory.mktemp("models"))


def test_a_checkpoint_is_written_and_reported(plan, tmp_path):
    result = run(plan, "--model", "tiny", "--to", "checkpoint", "--out", tmp_path / "new", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["verification"] == {"layers": [0, 3, 5]}
    assert report["layers"] == 6
    assert report["tensors_renamed"] > 0
    assert report["tensors_permuted"] == 6  # the gates
    assert report["bytes"] == (MODEL / "model.safetensors").stat().st_size
    assert report["left_out"] == []
    assert report["seconds"] > 0
    record = Record.model_validate_json((tmp_path / "new" / RECORD).read_text())
    assert [layer.experts for layer in record.layers] == load_plan(plan).placement.physical_to_logical_map.tolist()
    files = (plan / "plan.json").read_bytes() + (plan / "plan.safetensors").read_bytes()
    assert record.plan_hash == hashlib.sha256(files).hexdigest()
    assert (record.method, record.trace_hash, record.ep_size) == ("test", "1234", 4)
    ids = torch.arange(1, 33)[None]
    with torch.inference_mode():
        old, new = load_model(str(MODEL))(ids).logits, load_model(str(tmp_path / "new"))(ids).logits
    torch.testing.assert_close(new, old, rtol=1e-4, atol=1e-4)


def test_the_summary_is_for_people(plan, tmp_path):
    result = run(plan, "--model", MODEL, "--out", tmp_path / "new")
    assert result.exit_code == 0, result.output
    assert "6 MoE layers relabelled" in result.stdout
    assert "verified: the bytes of every router, and of every expert in layers 0, 3, 5" in result.stdout
    assert "writing, MB" in result.stderr


def test_sglang_gets_a_row_for_every_decoder_layer(deepseek, tmp_path):
    plan = plan_for(deepseek, tmp_path / "plan", redundant=4, dp_size=2)
    result = run(plan, "--model", deepseek, "--to", "sglang", "--out", tmp_path / "map.json", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["flags"] == [
        "--tp-size", "4", "--ep-size", "4", "--dp-size", "2", "--enable-dp-attention",
        "--init-expert-location", str(tmp_path / "map.json"), "--ep-num-redundant-experts", "4",
    ]  # fmt: skip
    rows = json.loads((tmp_path / "map.json").read_text())
    placed = load_plan(plan).placement.physical_to_logical_map.tolist()
    assert rows == {"physical_to_logical_map": [[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3], *placed]}
    text = run(plan, "--model", deepseek, "--to", "sglang", "--out", tmp_path / "two.json").stdout
    assert "--ep-num-redundant-experts 4" in text
    assert "--moe-a2a-backend" in text


def test_a_configuration_cannot_ask_for_any_number_of_rows(plan, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    config = json.loads((MODEL / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 10**12}))
    with pytest.raises(ValueError, match="1000000000000 layers"):
        write_sglang(load_plan(plan), tmp_path / "model", tmp_path / "map.json")


def test_redundant_experts_go_to_sglang_only(deepseek, tmp_path):
    plan = plan_for(deepseek, tmp_path / "plan", redundant=4)
    failed(run(plan, "--model", deepseek, "--out", tmp_path / "new"), 2, "4 redundant", "--to sglang")
    assert not (tmp_path / "new").exists()


def test_what_is_there_is_not_overwritten(plan, tmp_path):
    (tmp_path / "map.json").write_text("mine")
    failed(run(plan, "--model", MODEL, "--to", "sglang", "--out", tmp_path / "map.json"), 2, "exists")
    failed(run(plan, "--model", MODEL, "--to", "sglang", "--out", tmp_path / "map"), 2, "must end in .json")
    failed(run(plan, "--model", MODEL, "--out", tmp_path), 2, "exists: choose another")
    failed(run(plan, "--model", MODEL, "--out", MODEL), 2, "input of this command")
    assert (tmp_path / "map.json").read_text() == "mine"


def test_mistakes_are_one_line(plan, deepseek, tmp_path):
    out = tmp_path / "new"
    failed(run(tmp_path / "absent", "--model", MODEL, "--out", out), 2, "no plan")
    failed(run(plan, "--model", tmp_path / "absent", "--out", out), 2, "does not exist")
    for to, name in (("checkpoint", out), ("sglang", tmp_path / "new.json")):
        failed(run(plan, "--model", deepseek, "--to", to, "--out", name), 2, "another model or tokenizer")
    assert run(plan, "--model", MODEL, "--to", "nonsense", "--out", out).exit_code == 2
    assert not out.exists()


@pytest.mark.parametrize("fault", ["header", "truncated", "absent"])
def test_a_damaged_model_is_one_line_and_leaves_nothing(fault, plan, tmp_path):
    shutil.copytree(MODEL, tmp_path / "model")
    shard = tmp_path / "model" / "model.safetensors"
    if fault == "absent":
        shard.unlink()
    else:
        shard.write_bytes(b"\xff" * 64 if fault == "header" else shard.read_bytes()[:-10])
    for to, out in (("checkpoint", "new"), ("sglang", "map.json")):
        failed(run(plan, "--model", tmp_path / "model", "--to", to, "--out", tmp_path / out), 2, "model")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_a_failed_verification_is_exit_code_1_and_leaves_nothing(plan, tmp_path, monkeypatch):
    real = relabelling.write_relabelled

    def forget(source, layers, orders, target, progress):
        return real(source, layers, np.sort(orders, axis=1), target, progress)

    monkeypatch.setattr(relabelling, "write_relabelled", forget)
    failed(run(plan, "--model", MODEL, "--out", tmp_path / "new"), 1, "not the same model")
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_leaves_nothing(plan, tmp_path):
    code = (
        "import resource, sys; from semmoe.cli import main;"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (100000, 100000));"
        "import signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN); sys.argv[0] = 'semmoe'; main()"
    )
    command = [sys.executable, "-c", code, "apply", str(plan), "--model", "tiny", "--out", str(tmp_path / "new")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 1, result.stderr
    assert "Traceback" not in result.stderr
    assert "File too large" in result.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("to", ["checkpoint", "sglang"])
def test_without_torch_sizes_are_checked_and_that_is_said(to, plan, tmp_path):
    code = (
        "import sys, importlib.util as u; real = u.find_spec\n"
        "u.find_spec = lambda name, *rest: None if name == 'transformers' else real(name, *rest)\n"
        "from semmoe.cli import main\n"
        "sys.argv[0] = 'semmoe'\n"
        "try: main()\n"
        "finally: assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    out = tmp_path / ("new" if to == "checkpoint" else "map.json")
    command = [sys.executable, "-c", code, "apply", str(plan), "--model", "tiny", "--to", to, "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "transformers is not installed" in result.stderr
    assert out.exists()
    if to == "checkpoint":
        assert open_checkpoint(out).tensors.keys() == open_checkpoint(MODEL).tensors.keys()
