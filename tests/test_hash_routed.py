"""DeepSeek-V4, whose first layers are hash-routed and whose residual is several streams, through the whole line."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from models import build
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from semmoe.checkpoint import relabel as relabelling
from semmoe.checkpoint.relabel import relabel
from semmoe.cli import app
from semmoe.core import Placement
from semmoe.engines.transformers import generate as gen
from semmoe.engines.transformers import model as models
from semmoe.engines.transformers.batch import cut
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.engines.transformers.recorder import record
from semmoe.placement.linear import vanilla_plan
from semmoe.settings import CoclusterSettings, GenerateSettings, SolveSettings
from semmoe.topology import Topology

SETTINGS = GenerateSettings(max_new_tokens=6, batch_size=3)
EASY = SolveSettings(cocluster=CoclusterSettings(starts=1, steps=10))
DP = Topology.for_attention("dp", 2)


def prompts(seed, count=8, longest=24):
    """Random prompts, some of one length, one of a single token."""
    rng = np.random.default_rng(seed)
    return [
        rng.integers(1, 4096, size).tolist() for size in [1, *np.sort(rng.integers(2, longest, count - 1) // 4 * 4 + 2)]
    ]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return build("deepseek_v4", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def trace(checkpoint, tmp_path_factory):
    model = models.load_model(checkpoint)
    return record(model, checkpoint, prompts(0, 24), tmp_path_factory.mktemp("profile") / "trace")


def tables_of(path):
    """(M, V, K) of the hash-routed layers, which are the first."""
    return np.stack([block.gate.tid2eid.numpy() for block in models.moe_layers(models.load_model(str(path)))[:2]])


def test_a_profile_holds_what_the_models_tables_say(checkpoint, trace):
    found = np.sort(tables_of(checkpoint)[:, trace.token_ids], axis=2)
    assert (found == np.sort(trace.expert_ids[:, :2], axis=2).swapaxes(0, 1)).all()
    assert len(np.unique(found)) == 8


def reordered(f):
    """A plan of another order in every layer."""
    rng = np.random.default_rng(1)
    rows = np.stack([rng.permutation(8) for _ in range(4)]).astype(np.int32)
    return replace(vanilla_plan(f, DP), placement=Placement(physical_to_logical_map=rows, num_experts=8, ep_size=2))


def test_batches_hold_one_length_where_padding_would_shift_windows(checkpoint):
    lengths = [3, 3, 3, 5, 3]
    batches = cut([[7] * n for n in lengths], 2, 4, models.load_model(checkpoint))
    assert [[len(prompt) for prompt in batch.prompts] for batch in batches] == [[3, 3], [3], [5], [3]]


def test_a_model_with_hyper_connections_is_refused_before_anything_loads(checkpoint, monkeypatch):
    plan = vanilla_plan(fingerprint_of(checkpoint), DP)
    monkeypatch.setattr(gen, "run_ranks", lambda *a, **k: pytest.fail("processes were started"))
    with pytest.raises(ValueError, match="'deepseek_v4' has hyper-connections: transformers does not run it") as error:
        gen.generate(checkpoint, prompts(1), [gen.Configuration(name="x", plan=plan)], SETTINGS)
    assert "\n" not in str(error.value)


@torch.inference_mode()
def logits(path):
    ids = torch.randint(1, 4096, (2, 24), generator=torch.Generator().manual_seed(1))
    return models.load_model(str(path))(ids).logits


def test_negative_control_a_table_left_alone_is_another_model(checkpoint, trace, tmp_path, monkeypatch):
    relabel(reordered(trace.fingerprint), checkpoint, tmp_path / "right")
    expected = logits(checkpoint)
    torch.testing.assert_close(logits(tmp_path / "right"), expected, rtol=1e-4, atol=1e-3)
    relabel(reordered(trace.fingerprint), checkpoint, tmp_path / "wrong")
    tensors = load_file(tmp_path / "wrong/model.safetensors")
    old = load_file(checkpoint + "/model.safetensors")
    tables = [name for name in old if name.endswith("tid2eid")]
    assert len(tables) == 2
    save_file(tensors | {name: old[name] for name in tables}, tmp_path / "wrong/model.safetensors", {"format": "pt"})
    assert (logits(tmp_path / "wrong").argmax(-1) != expected.argmax(-1)).float().mean() > 0.1
    monkeypatch.setattr(relabelling, "_renumbered", lambda name, table, order: b"".join(table.chunks()))
    with pytest.raises(RuntimeError, match=r"gate\.tid2eid sends token ids to other experts"):
        relabel(reordered(trace.fingerprint), checkpoint, tmp_path / "refused")
    assert not (tmp_path / "refused").exists()


def test_a_relabelled_models_profile_is_the_plans(checkpoint, trace, tmp_path):
    """New numbers in table, gate and experts: what is recorded is the old routing in the new numbers."""
    plan = reordered(trace.fingerprint)
    relabel(plan, checkpoint, tmp_path / "new")
    model = models.load_model(str(tmp_path / "new"))
    renumbered = record(model, str(tmp_path / "new"), prompts(0, 24), tmp_path / "trace")
    order = plan.placement.physical_to_logical_map
    assert (order[np.arange(4)[:, None], renumbered.expert_ids] == trace.expert_ids).mean() > 0.999  # near-ties
    both = zip(order, tables_of(tmp_path / "new"), tables_of(checkpoint), strict=False)
    assert all((new_to_old[new] == old).all() for new_to_old, new, old in both)


@pytest.mark.dist
@pytest.mark.slow
def test_the_whole_line_on_the_command_line(checkpoint, tmp_path):
    rng = np.random.default_rng(3)
    words = ["the", "of", "a", "to", "in", "is", "for", "that", "with", "on", "by", "this", "from", "or", "an"]
    texts = [" ".join(rng.choice(words, rng.integers(3, 20))) for _ in range(40)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    trace, plan, out = (str(tmp_path / name) for name in ("trace", "plan", "relabelled"))
    data = ["--dataset", str(tmp_path / "prompts.jsonl")]

    def run(*arguments, code=0):
        result = CliRunner().invoke(app, [*arguments, "--json"])
        assert result.exit_code == code, result.output
        return json.loads(result.stdout)

    run("profile", checkpoint, *data, "--max-new-tokens", "4", "--out", trace)
    run("solve", trace, "--attention", "dp", "--ep-size", "2", "--quick", "--out", plan)
    run("replay", trace, "--plan", plan)
    run("apply", plan, "--model", checkpoint, "--to", "checkpoint", "--out", out)
    placed = run("apply", plan, "--model", checkpoint, "--to", "sglang", "--out", str(tmp_path / "location.json"))
    assert "--init-expert-location" in placed["flags"]
