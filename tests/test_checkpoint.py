"""Relabelled checkpoints compute the same and verify themselves; files from others are read with suspicion."""

import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from models import COMMON, CONFIGS, LATENT, UNTRIED, fill_tables, without_top_k
from safetensors.numpy import load_file
from safetensors.torch import load_file as load_torch
from safetensors.torch import save_file as save_torch

from semmoe.checkpoint import relabel as relabelling
from semmoe.checkpoint.directory import open_checkpoint
from semmoe.checkpoint.layout import find_moe_layers
from semmoe.checkpoint.relabel import RECORD, Record, relabel, write_relabelled
from semmoe.checkpoint.shards import CHUNK_BYTES, Tensor, read_shard, write_shard
from semmoe.cli.demo import MODEL
from semmoe.core import Placement, Plan
from semmoe.engines.transformers.config import fingerprint_of, load_config
from semmoe.engines.transformers.tokenizer import load_tokenizer
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

MODELS = CONFIGS | UNTRIED | {
    "hunyuan_v1_moe": lambda: transformers.HunYuanMoEV1Config(
        **without_top_k(), num_hidden_layers=3, num_key_value_heads=2, head_dim=16, num_experts=8,
        moe_topk=[2] * 3, moe_intermediate_size=[48] * 3, intermediate_size=48,
    ),
    "deepseek_v3_one_group": lambda: transformers.DeepseekV3Config(
        **COMMON, **LATENT, n_routed_experts=8, n_group=1, topk_group=1, routed_scaling_factor=1.0,
    ),
}  # fmt: skip


def build(architecture, folder):
    """A sharded checkpoint with random weights, correction biases included."""
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MODELS[architecture]())
    for name, buffer in [*model.named_buffers(), *model.named_parameters()]:
        if name.endswith(("e_score_correction_bias", "router.bias", "expert_bias")):
            buffer.data.normal_(std=0.2)
    fill_tables(model)
    model.save_pretrained(folder / "model", max_shard_size="300KB")
    load_tokenizer(str(MODEL)).save_pretrained(folder / "model")
    return folder / "model"


def plan_of(f, orders, ep_size=4):
    placement = Placement(
        physical_to_logical_map=np.asarray(orders, np.int32), num_experts=f.num_experts, ep_size=ep_size
    )
    return Plan(
        topology=Topology(ep_size=ep_size),
        placement=placement,
        tokens=ByPosition(),
        requests=RoundRobin(num_groups=1),
        fingerprint=f,
        method="test",
    )


def random_orders(f, seed=0):
    """(L, E): gate groups move whole, experts at random inside them."""
    rng, size = np.random.default_rng(seed), f.num_experts // f.num_groups
    rows = [
        np.concatenate([g * size + rng.permutation(size) for g in rng.permutation(f.num_groups)])
        for _ in range(f.num_layers)
    ]
    return np.stack(rows)


def fingerprint(layers, experts, **changes):
    sizes = {"vocab_size": 100, "num_layers": layers, "num_experts": experts, "top_k": 2}
    return Fingerprint(model="synthetic", architecture_hash="", tokenizer_hash="", **(sizes | changes))


@torch.inference_mode()
def logits(path):
    ids = torch.randint(1, 4096, (4, 24), generator=torch.Generator().manual_seed(1))
    return transformers.AutoModelForCausalLM.from_pretrained(path, config=load_config(str(path)))(ids).logits


def record_of(path):
    return Record.model_validate_json((path / RECORD).read_text())


@pytest.mark.parametrize("architecture", list(MODELS))
def test_a_relabelled_model_computes_the_same(architecture, tmp_path):
    model = build(architecture, tmp_path)
    before = {p.name: p.read_bytes() for p in model.iterdir()}
    f = fingerprint_of(str(model))
    orders = random_orders(f)
    done = relabel(plan_of(f, orders), model, tmp_path / "out", plan_hash="abc")
    assert done.tensors_renamed + done.tensors_permuted > 0
    assert (len(done.verification["layers"]), done.left_out) == (done.layers, [])
    expected, got = logits(model), logits(tmp_path / "out")
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
    assert (got.argmax(-1) == expected.argmax(-1)).all()
    assert [layer.experts for layer in record_of(tmp_path / "out").layers] == orders.tolist()
    assert {p.name: p.read_bytes() for p in model.iterdir()} == before  # the source is not touched
    names = {p.name for p in (tmp_path / "out").iterdir()}
    assert names == {*before, "semmoe_relabelling.json"}
    for name in names - {"semmoe_relabelling.json"}:
        if not name.startswith("model"):
            assert (tmp_path / "out" / name).read_bytes() == before[name]


FORMATS = {  # what published checkpoints of each kind have for one expert, or for all: name -> (dtype, shape)
    "fp8": {"{p}_proj.weight": (torch.float8_e4m3fn, (6, 4)), "{p}_proj.weight_scale_inv": (torch.float32, (1, 1))},
    "awq": {"{p}_proj.qweight": (torch.int32, (6, 2)), "{p}_proj.qzeros": (torch.int32, (1, 2)),
            "{p}_proj.scales": (torch.float16, (1, 4))},
    "gptq": {"{p}_proj.qweight": (torch.int32, (6, 2)), "{p}_proj.qzeros": (torch.int32, (1, 2)),
             "{p}_proj.scales": (torch.float16, (1, 4)), "{p}_proj.g_idx": (torch.int32, (6,))},
    "compressed-tensors": {"{p}_proj.weight_packed": (torch.int32, (6, 2)),
                           "{p}_proj.weight_scale": (torch.float16, (6, 1)),
                           "{p}_proj.weight_shape": (torch.int64, (2,))},
}  # fmt: skip
MXFP4 = {"gate_up_proj_blocks": (torch.uint8, (8, 6, 2, 3)), "gate_up_proj_scales": (torch.uint8, (8, 6, 2)),
         "gate_up_proj_bias": (torch.bfloat16, (8, 6)), "down_proj_blocks": (torch.uint8, (8, 4, 2, 3)),
         "down_proj_scales": (torch.uint8, (8, 4, 2)), "down_proj_bias": (torch.bfloat16, (8, 4))}  # fmt: skip


def random_tensor(dtype, shape, generator):
    count = int(np.prod(shape)) * dtype.itemsize
    if dtype.is_floating_point and dtype.itemsize > 1:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 256, (count,), dtype=torch.uint8, generator=generator).view(dtype).reshape(shape)


def synthetic(kind, path, experts=8, dense=1, layers=3, prediction=True):
    """A checkpoint with the tensor names of published ones, experts strewn over two shards."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(dense, layers + int(prediction)):
        mlp = f"model.layers.{layer}.mlp"
        router = "router" if kind == "mxfp4" else "gate"
        tensors[f"{mlp}.{router}.weight"] = random_tensor(torch.bfloat16, (experts, 16), generator)
        if kind == "mxfp4":
            tensors[f"{mlp}.router.bias"] = random_tensor(torch.bfloat16, (experts,), generator)
            tensors |= {f"{mlp}.experts.{n}": random_tensor(*spec, generator) for n, spec in MXFP4.items()}
            continue
        tensors[f"{mlp}.gate.e_score_correction_bias"] = random_tensor(torch.float32, (experts,), generator)
        tensors[f"{mlp}.shared_experts.up_proj.weight"] = random_tensor(torch.bfloat16, (experts, 3), generator)
        for e in range(experts):
            for p in ("gate", "up", "down"):
                for name, spec in FORMATS[kind].items():
                    tensors[f"{mlp}.experts.{e}.{name.format(p=p)}"] = random_tensor(*spec, generator)
    tensors |= {"model.layers.0.mlp.up_proj.weight": random_tensor(torch.bfloat16, (experts, 5), generator)}
    return write_checkpoint(path, tensors, layers, experts)


def write_checkpoint(path, tensors, layers, experts, shards=2, **config):
    path.mkdir()
    files = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for file in set(files.values()):
        save_torch({n: t for n, t in tensors.items() if files[n] == file}, path / file, metadata={"format": "pt"})
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": files}))
    sizes = {"num_hidden_layers": layers, "num_experts": experts, "num_experts_per_tok": 2, "vocab_size": 100}
    (path / "config.json").write_text(json.dumps(sizes | config))
    return path


def all_tensors(path):
    files = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    loaded = {file: load_torch(path / file) for file in set(files.values())}
    assert {n for tensors in loaded.values() for n in tensors} == set(files)
    return {name: loaded[file][name].flatten().view(torch.uint8).numpy().tobytes() for name, file in files.items()}


@pytest.mark.parametrize("kind", [*FORMATS, "mxfp4"])
def test_quantised_experts_move_with_all_that_is_theirs(kind, tmp_path):
    model = synthetic(kind, tmp_path / "model")
    f = fingerprint(layers=2, experts=8)
    orders = random_orders(f)
    relabel(plan_of(f, orders), model, tmp_path / "out")
    old, new = all_tensors(model), all_tensors(tmp_path / "out")
    assert old.keys() == new.keys()
    for name in old:
        expected = old[name]
        layer = next((i for i in (1, 2) if name.startswith(f"model.layers.{i}.mlp.")), None)
        if layer is not None and ".shared_experts." not in name:
            order = orders[layer - 1]
            before, _, after = name.partition(".experts.")
            number, _, part = after.partition(".")
            if number.isdigit():
                expected = old[f"{before}.experts.{order[int(number)]}.{part}"]
            else:
                size = len(expected) // 8
                expected = b"".join(expected[e * size : (e + 1) * size] for e in order)
        assert new[name] == expected, name


def small(path, experts=4, layers=1, packed=False, **extra):
    """One MoE layer (or more) of tiny float tensors in one shard, plus `extra` tensors by name."""
    generator, tensors = torch.Generator().manual_seed(0), {}
    for layer in range(layers):
        mlp = f"model.layers.{layer}.mlp"
        tensors[f"{mlp}.gate.weight"] = torch.randn(experts, 8, generator=generator)
        if packed:
            tensors[f"{mlp}.experts.gate_up_proj"] = torch.randn(experts, 3, 8, generator=generator)
            tensors[f"{mlp}.experts.down_proj"] = torch.randn(experts, 8, 3, generator=generator)
        else:
            for e in range(experts):
                tensors[f"{mlp}.experts.{e}.up_proj.weight"] = torch.randn(3, 8, generator=generator)
    tensors |= extra
    return write_checkpoint(path, {n: t for n, t in tensors.items() if t is not None}, layers, experts, shards=1)


def refused(tmp_path, words, *, model=None, orders=((1, 0, 3, 2),), out=None, **extra):
    """relabel raises ValueError with `words` and writes nothing."""
    model = model or small(tmp_path / "model", **extra)
    experts = len(set(orders[0]))
    plan = plan_of(fingerprint(len(orders), experts), orders, ep_size=2)
    present = set(tmp_path.iterdir())
    with pytest.raises(ValueError, match=words):
        relabel(plan, model, out or tmp_path / "out")
    assert set(tmp_path.iterdir()) == present


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"model.layers.0.mlp.gate.weight": None}, r"layers\.0\.mlp\.gate\.weight is missing"),
        ({"model.layers.0.mlp.experts.2.up_proj.weight": None}, r"layers\.0\.mlp\.experts\.2 is missing"),
        ({"model.layers.0.mlp.experts.4.up_proj.weight": torch.ones(3, 8)}, r"experts\.4\.up_proj.*4 experts"),
        ({"model.layers.0.mlp.experts.3.down_proj.weight": torch.ones(3)}, r"experts\.0\.down_proj\.weight is missing"),
        ({"model.layers.0.mlp.token_table": torch.ones(4, 2)}, r"mlp\.token_table.*does not know"),
        ({"model.layers.0.mlp.moe_statics.bias": torch.ones(1, 4)}, r"moe_statics\.bias.*does not know"),
        ({"model.layers.0.mlp.gate.tid2eid": torch.ones(9, 2)}, r"gate\.tid2eid is F32.*not a table"),
        ({"model.layers.0.mlp.gate.tid2eid": torch.full((9, 2), 4)}, r"gate\.tid2eid: expert id 4 is out of range"),
        ({"model.layers.0.mlp.experts.up_proj_scale": torch.ones(1)}, r"up_proj_scale has shape \[1\].*leading"),
        ({"model.layers.0.mlp.gate.bias": torch.ones(4, dtype=torch.uint8)}, r"gate\.bias is U8.*quantised router"),
        ({"model.layers.0.mlp.router.weight": torch.ones(4, 8)}, r"another router weight"),
        ({"encoder.layers.0.mlp.experts.0.w1": torch.ones(1)}, "more than one stack"),
    ],
)
def test_what_no_rule_knows_is_refused_by_name(extra, words, tmp_path):
    refused(tmp_path, words, **extra)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_of_token_ids_gets_the_new_numbers(dtype, tmp_path):
    """Order 2 0 3 1: old expert 2 is now 0, so a token id of old experts (2, 1) has new experts (0, 3)."""
    old = torch.tensor([[2, 1], [0, 3], [3, 3]], dtype=dtype)
    model = published(tmp_path / "model", old)
    relabel(plan_of(fingerprint(1, 4), [[2, 0, 3, 1]], 2), model, tmp_path / "out")
    new = load_torch(tmp_path / "out/model-00001-of-00001.safetensors")
    assert new["layers.0.ffn.gate.tid2eid"].tolist() == [[0, 3], [1, 2], [2, 2]]
    assert new["layers.0.ffn.gate.tid2eid"].dtype == dtype
    assert (new["mtp.0.ffn.gate.tid2eid"] == old).all()


def published(path, table):
    """Names as DeepSeek publishes them; a layer for multi-token prediction has a table too."""
    tensors = {"layers.0.ffn.gate.weight": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    tensors |= {f"layers.0.ffn.experts.{e}.w1.weight": torch.full((3, 8), float(e)) for e in range(4)}
    tensors |= {"layers.0.ffn.gate.tid2eid": table, "mtp.0.ffn.gate.tid2eid": table.clone()}
    return write_checkpoint(path, tensors, 1, 4, shards=1, scoring_func="sqrtsoftplus")


def test_layers_for_prediction_and_shared_experts_stay(tmp_path):
    extra = {
        "model.layers.1.mlp.experts.0.up_proj.weight": torch.ones(2),  # beyond num_hidden_layers
        "mtp.layers.0.mlp.experts.0.up_proj.weight": torch.ones(2),
        "model.layers.0.mlp.shared_expert.up_proj.weight": torch.ones(4, 2),
        "model.layers.0.mlp.shared_expert_gate.weight": torch.ones(1, 4),
    }
    model = small(tmp_path / "model", **extra)
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out")
    old, new = all_tensors(model), all_tensors(tmp_path / "out")
    assert all(old[name] == new[name] for name in extra)
    assert old != new


def test_plans_that_are_no_renumbering_are_refused(tmp_path):
    refused(tmp_path, "2 redundant experts", orders=[[1, 0, 3, 2, 0, 1]])
    model = tmp_path / "model"
    refused(tmp_path, "1 MoE layers, the plan has 2", model=model, orders=[[1, 0, 3, 2]] * 2)
    refused(tmp_path, "num_experts is 2 .* and 4", model=model, orders=[[1, 0]])
    f = fingerprint(3, 8, num_groups=4)
    orders = random_orders(f)
    orders[1] = [0, 2, 1, 3, 4, 5, 6, 7]
    with pytest.raises(ValueError, match="MoE layer 1 of this plan splits a gate group"):
        relabel(plan_of(f, orders), model, tmp_path / "out")


def test_out_is_never_the_source_nor_anything_else(tmp_path):
    model = small(tmp_path / "model")
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "x").write_text("x")
    refused(tmp_path, "an input of this command", model=model, out=model)
    refused(tmp_path, "an input of this command", model=model, out=model / "new")
    refused(tmp_path, "an input of this command", model=model, out=tmp_path)
    refused(tmp_path, "exists: choose another", model=model, out=tmp_path / "used")
    refused(tmp_path, "is a file", model=model, out=tmp_path / "used" / "x")
    (tmp_path / "empty").mkdir()
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "empty")
    refused(tmp_path, "relabelled already", model=tmp_path / "empty")


def test_other_weights_are_left_out_and_everything_else_is_copied(tmp_path):
    model = small(tmp_path / "model")
    for name in (
        "original/consolidated.safetensors",
        "pytorch_model.bin",
        "chat/template.jinja",
        ".git/HEAD",
        "code.py",
    ):
        (model / name).parent.mkdir(exist_ok=True)
        (model / name).write_text(name)
    (model / "linked.txt").symlink_to(model / "code.py")
    done = relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out")
    assert done.left_out == ["original/consolidated.safetensors", "pytorch_model.bin"]
    assert (tmp_path / "out/chat/template.jinja").read_text() == "chat/template.jinja"
    assert (tmp_path / "out/linked.txt").read_text() == "code.py"
    assert not (tmp_path / "out/linked.txt").is_symlink()
    assert not (tmp_path / "out/.git").exists()
    shutil.rmtree(model / "original")
    (model / "model.safetensors.index.json").unlink()
    refused(tmp_path, "convert the model to safetensors", model=model, out=tmp_path / "other")


def hub_snapshot(tmp_path):
    """A model as the hub's cache has it: a snapshot whose files are links to blobs beside the snapshots."""
    repository = tmp_path / "models--a--b"
    snapshot, blobs = repository / "snapshots/1234", repository / "blobs"
    blobs.mkdir(parents=True)
    snapshot.parent.mkdir()
    small(snapshot)
    (snapshot / "code.py").write_text("pass")
    for number, path in enumerate(sorted(snapshot.iterdir())):
        path.rename(blobs / str(number))
        path.symlink_to(f"../../blobs/{number}")
    return snapshot


@pytest.mark.parametrize("linked", [False, True])
def test_a_snapshot_of_the_hubs_cache_is_copied_through_its_links(tmp_path, linked):
    model = hub_snapshot(tmp_path)
    if linked:  # the folder itself may be a link too
        (tmp_path / "model").symlink_to(model)
        model = tmp_path / "model"
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out")
    assert (tmp_path / "out/code.py").read_text() == "pass"
    assert not any(path.is_symlink() for path in (tmp_path / "out").rglob("*"))


@pytest.mark.timeout(20)
def test_nothing_from_outside_the_model_is_copied(tmp_path):
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets/key.txt").write_text("secret")
    models = [hub_snapshot(tmp_path), small(tmp_path / "model")]
    (tmp_path / "models--a--b/refs").write_text("not a blob")
    targets = [tmp_path / "secrets/key.txt", tmp_path / "secrets", "../../refs", "/dev/zero", "gone", "notes"]
    for model in models:
        for target in targets:
            (model / "notes").symlink_to(target)
            refused(tmp_path, "notes is (a link out of|neither a file nor)", model=model)
            (model / "notes").unlink()
    (models[1] / "deep").mkdir()
    (models[1] / "deep/inside").symlink_to(models[1] / "deep")
    refused(tmp_path, "deep/inside is neither a file nor", model=models[1])


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", ["pipe", "quantize_config.json", "model-00001-of-00001.safetensors"])
def test_a_pipe_in_a_model_is_not_waited_for(tmp_path, name):
    model = small(tmp_path / "model")
    (model / name).unlink(missing_ok=True)
    os.mkfifo(model / name)
    refused(tmp_path, name, model=model)


def test_adapters_on_experts_are_refused(tmp_path):
    model = small(tmp_path / "model")
    for targets in (["q_proj", "gate_proj"], "all-linear", ["mlp.experts.gate_up_proj"], ".*router.*"):
        (model / "adapter_config.json").write_text(json.dumps({"target_modules": targets}))
        refused(tmp_path, "LoRA adapter", model=model)
    (model / "adapter_config.json").write_text(json.dumps({"target_modules": ["q_proj", "o_proj"]}))
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out")


def test_quantisation_rules_for_single_experts_are_refused(tmp_path):
    model = small(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())

    def ignore(*modules):
        (model / "config.json").write_text(json.dumps(config | {"quantization_config": {"ignore": modules}}))

    ignore("model.layers.0.mlp.experts.2.up_proj")
    refused(tmp_path, r"single experts \(layers\.0\.mlp\.experts\.2\.up_proj\)", model=model)
    ignore(r"re:.*layers\.0\.mlp\.experts\.2\..*")
    refused(tmp_path, "single experts", model=model)
    every = [f"model.layers.0.mlp.experts.{e}.up_proj" for e in range(4)]
    ignore(*every, "model.layers.1.mlp.experts.0.up_proj")  # all of a layer, and one of a layer that stays
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out")


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("moved", ["gate", "experts", "one expert"])
def test_verification_fails_where_gate_and_experts_part(packed, moved, tmp_path, monkeypatch):
    """Negative control: a relabelling that forgets a part is caught, and nothing is left behind."""
    model = small(tmp_path / "model", layers=2, packed=packed)

    def write(source, layers, orders, target, progress):
        left_out = write_relabelled(source, layers, orders, target, progress)
        tensors = load_file(target / "model-00001-of-00001.safetensors")
        original = load_file(source.shards[0].path)
        part = {"gate": "experts", "experts": "gate", "one expert": "experts"}[moved]
        names = [name for name in tensors if f"layers.1.mlp.{part}" in name]
        for name in names if moved != "one expert" else names[:1]:
            tensors[name] = original[name]
        save_torch({n: torch.from_numpy(t) for n, t in tensors.items()}, target / "model-00001-of-00001.safetensors")
        return left_out

    monkeypatch.setattr(relabelling, "write_relabelled", write)
    with pytest.raises(RuntimeError, match="not the same model"):
        relabel(plan_of(fingerprint(2, 4), [[1, 2, 3, 0]] * 2, 2), model, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_router_of_every_layer_is_verified(tmp_path, monkeypatch):
    """Of six layers the experts of 0, 3 and 5 are compared; a router that kept its rows is found at layer 1, too."""
    model = small(tmp_path / "model", layers=6)
    plan = plan_of(fingerprint(6, 4), [[1, 2, 3, 0]] * 6, 2)
    assert relabel(plan, model, tmp_path / "out").verification["layers"] == [0, 3, 5]

    def write(source, layers, orders, target, progress):
        left_out = write_relabelled(source, layers, orders, target, progress)
        tensors, original = (load_torch(p / "model-00001-of-00001.safetensors") for p in (target, model))
        tensors["model.layers.1.mlp.gate.weight"] = original["model.layers.1.mlp.gate.weight"]
        save_torch(tensors, target / "model-00001-of-00001.safetensors")
        return left_out

    monkeypatch.setattr(relabelling, "write_relabelled", write)
    with pytest.raises(RuntimeError, match=r"row 0 of model\.layers\.1\.mlp\.gate\.weight is not the old expert 1"):
        relabel(plan, model, tmp_path / "wrong")


@given(seed=st.integers(0, 10**6), experts=st.sampled_from([2, 4, 12]), packed=st.booleans())
def test_a_relabelling_and_its_inverse_give_the_same_bytes(seed, experts, packed, tmp_path_factory):
    folder = tmp_path_factory.mktemp("inverse")
    model = small(folder / "model", experts=experts, layers=2, packed=packed)
    orders = random_orders(fingerprint(2, experts), seed)
    for source, target, order in (("model", "there", orders), ("there", "back", np.argsort(orders, axis=1))):
        (folder / target).mkdir()
        opened = open_checkpoint(folder / source)
        layers = find_moe_layers(opened, experts)
        assert write_relabelled(opened, layers, order, folder / target, lambda done: None) == []
    shard = "model-00001-of-00001.safetensors"
    assert (folder / "back" / shard).read_bytes() == (model / shard).read_bytes()
    assert all_tensors(folder / "back") == all_tensors(model)
    assert load_file(folder / "there" / shard).keys() == load_file(model / shard).keys()


def raw(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


MALFORMED = {
    "empty": b"",
    "short": b"\x01\x00",
    "endless header": struct.pack("<Q", 2**63) + b"{}",
    "header beyond the file": struct.pack("<Q", 100) + b"{}",
    "not JSON": raw(b"{oops"),
    "not UTF-8": raw(b'{"\xff": 1}'),
    "not an object": raw([1]),
    "nested": raw(b"[" * 100_000),
    "a name twice": raw(b'{"a": 1, "a": 2}'),
    "escape codes": raw({"\x1b[2J": entry()}, bytes(8)),
    "half a character": raw(b'{"\\ud800": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}'),
    "metadata": raw({"__metadata__": {"a": 1}}),
    "unknown type": raw({"a": entry("F33")}, bytes(8)),
    "type no string": raw({"a": entry(["F32"])}, bytes(8)),
    "negative shape": raw({"a": entry(shape=(-2,))}, bytes(8)),
    "true shape": raw({"a": entry(shape=(True, 2))}, bytes(8)),
    "float shape": raw({"a": entry(shape=(2.0,))}, bytes(8)),
    "shape no list": raw({"a": entry() | {"shape": 2}}, bytes(8)),
    "many dimensions": raw({"a": entry(shape=(1,) * 100 + (2,))}, bytes(8)),
    "huge shape": raw({"a": entry(shape=(2**62, 2**62))}, bytes(8)),
    "outside": raw({"a": entry(offsets=(8, 16))}, bytes(8)),
    "backwards": raw({"a": entry(shape=(0,), offsets=(8, 0))}, bytes(8)),
    "three offsets": raw({"a": entry(offsets=(0, 4, 8))}, bytes(8)),
    "size": raw({"a": entry(shape=(3,))}, bytes(8)),
    "overlap": raw({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)),
    "gap": raw({"a": entry(), "b": entry(offsets=(12, 20))}, bytes(20)),
    "tail": raw({"a": entry()}, bytes(9)),
    "extra key": raw({"a": entry() | {"x": 1}}, bytes(8)),
    "missing key": raw({"a": {"dtype": "F32"}}, bytes(8)),
    "entry no object": raw({"a": 5}),
}


@pytest.mark.parametrize("fault", list(MALFORMED))
def test_malformed_files_are_refused_by_name(fault, tmp_path):
    model = small(tmp_path / "model")
    (model / "model-00001-of-00001.safetensors").write_bytes(MALFORMED[fault])
    refused(tmp_path, "model-00001-of-00001.safetensors is not a valid", model=model)


@given(data=st.binary(max_size=60), tail=st.binary(max_size=20))
def test_any_bytes_are_read_or_refused(data, tail, tmp_path_factory):
    path = tmp_path_factory.mktemp("raw") / "x.safetensors"
    path.write_bytes(struct.pack("<Q", len(data)) + data + tail)
    with pytest.raises(ValueError):
        read_shard(path)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"a": "../../etc/passwd"}, "weight_map must name"),
        ({"a": "/etc/x.safetensors"}, "weight_map must name"),
        ({"a": 3}, "weight_map must name"),
        ({}, "weight_map must name"),
        ([], "weight_map must name"),
        ({"a": "model-00009-of-00009.safetensors"}, "missing"),
        ({"a": "model-00001-of-00001.safetensors"}, "says that a is in"),
    ],
)
def test_a_bad_index_is_refused(files, words, tmp_path):
    model = small(tmp_path / "model")
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    refused(tmp_path, words, model=model)


def test_a_tensor_in_two_shards_is_refused(tmp_path):
    model = small(tmp_path / "model")
    index = json.loads((model / "model.safetensors.index.json").read_text())
    shutil.copy(model / "model-00001-of-00001.safetensors", model / "model-2.safetensors")
    index["weight_map"]["model.layers.0.mlp.gate.weight"] = "model-2.safetensors"
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    refused(tmp_path, "is in both", model=model)


def test_bytes_are_read_in_chunks_and_a_file_that_becomes_shorter_is_an_error(tmp_path):
    data = np.random.default_rng(0).bytes(CHUNK_BYTES + 1234)
    (tmp_path / "a").write_bytes(data)
    stored = Tensor(tmp_path / "a", "U8", (len(data) - 5,), 5, len(data) - 5)
    chunks = list(stored.chunks())
    assert b"".join(chunks) == data[5:]
    assert [len(chunk) for chunk in chunks] == [CHUNK_BYTES, 1229]
    (tmp_path / "a").write_bytes(data[:-1])
    with pytest.raises(OSError, match="shorter"):
        list(stored.chunks())


def test_a_header_may_name_tensors_in_another_order_than_their_bytes(tmp_path):
    header = {"last": entry(offsets=(8, 16)), "empty": entry(shape=(0,), offsets=(8, 8)), "first": entry()}
    (tmp_path / "a").write_bytes(raw(header, bytes(range(16))))
    done = []
    write_shard(read_shard(tmp_path / "a"), tmp_path / "b", {"first": "renamed"}, {}, done.append)
    written = load_file(tmp_path / "b")
    assert {name: array.tobytes() for name, array in written.items()} == {
        "renamed": bytes(range(8)),
        "empty": b"",
        "last": bytes(range(8, 16)),
    }
    assert sum(done) == (tmp_path / "a").stat().st_size


def test_the_record_names_the_plan_and_the_layers(tmp_path):
    model = small(tmp_path / "model")
    relabel(plan_of(fingerprint(1, 4), [[1, 0, 3, 2]], 2), model, tmp_path / "out", plan_hash="abc")
    record = record_of(tmp_path / "out")
    assert (record.plan_hash, record.ep_size, record.layers[0].layer) == ("abc", 2, 0)
    assert [layer.experts for layer in record.layers] == [[1, 0, 3, 2]]


def test_a_plan_with_the_identity_changes_nothing(tmp_path):
    model = small(tmp_path / "model")
    plan = plan_of(fingerprint(1, 4), [[0, 1, 2, 3]], 2)
    done = relabel(replace(plan, method="linear"), model, tmp_path / "out")
    assert (done.tensors_renamed, done.tensors_permuted) == (0, 0)
    assert all_tensors(tmp_path / "out") == all_tensors(model)
