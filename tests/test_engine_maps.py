"""`semmoe import` of maps and counts, which become plans, and refusals of bad files."""

import json

import numpy as np
import pytest
import torch
from models import build
from test_apply import failed, plan_for
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.placement import eplb
from semmoe.plan import load_plan

TINY = fingerprint_of(str(MODEL))
L, E, K = TINY.num_layers, TINY.num_experts, TINY.top_k


def imported(file, out, *options, model=MODEL):
    return CliRunner().invoke(app, ["import", *map(str, (file, "--model", model, "--out", out, *options))])


@pytest.mark.parametrize("redundant", [0, 8])
def test_a_plan_s_map_for_an_engine_is_read_back(tmp_path, redundant):
    model = build("deepseek_v2", tmp_path)  # its first layer has no experts
    plan = plan_for(model, tmp_path / "plan", redundant, ep_size=4)
    applied = CliRunner().invoke(
        app, ["apply", str(plan), "--model", model, "--to", "sglang", "--out", f"{tmp_path}/map.json"]
    )
    assert applied.exit_code == 0, applied.output
    assert imported(tmp_path / "map.json", tmp_path / "back", "--ep-size", 4, model=model).exit_code == 0
    before, after = load_plan(plan), load_plan(tmp_path / "back")
    np.testing.assert_array_equal(after.placement.physical_to_logical_map, before.placement.physical_to_logical_map)
    assert (after.topology, after.method) == (before.topology, "map")
    assert not after.requests.by_tables | after.tokens.by_tables


def test_one_row_stands_for_all_layers(tmp_path):
    row = np.random.default_rng(0).permutation(E)
    np.save(tmp_path / "map.npy", row)
    assert imported(tmp_path / "map.npy", tmp_path / "plan", "--ep-size", 4, "--attention", "dp").exit_code == 0
    plan = load_plan(tmp_path / "plan")
    assert plan.placement.physical_to_logical_map.tolist() == [row.tolist()] * L
    assert plan.topology.dp_size == 4


def test_counts_become_a_plan_by_eplb(tmp_path):
    counts = np.random.default_rng(0).integers(1, 100, (3, L, E))
    file = tmp_path / "expert_distribution_recorder_1.5.pt"
    torch.save({"rank": 0, "logical_count": torch.from_numpy(counts)}, file)
    result = imported(file, tmp_path / "plan", "--ep-size", 4, "--redundant-experts", 8)
    assert result.exit_code == 0, result.output
    assert "it schedules no request and no token" in " ".join(result.stdout.split())
    placed = load_plan(tmp_path / "plan").placement.physical_to_logical_map
    expected = eplb.place(counts.sum(axis=0).astype(np.float64), 4, 8)
    np.testing.assert_array_equal(placed, expected.physical_to_logical_map)


def named(rows):
    """A map in JSON, as SGLang names it."""
    return json.dumps({"physical_to_logical_map": rows}).encode()


BAD_MAPS = {
    "text.json": (b"nothing", "not valid JSON"),
    "object.json": (b'{"a": 1}', "give an object with physical_to_logical_map or logical_count or layer_list"),
    "list.json": (json.dumps([list(range(E))]).encode(), "give an object with physical_to_logical_map"),
    "ragged.json": (named([[1, 2], [3]]), "all equally long"),
    "words.json": (named(["a"]), "all equally long"),
    "missing.json": (named([0] * E), "is on no rank"),
    "layers.json": (named([list(range(E))] * 3), "3 layers, but the model has 6"),
    "deep.json": (b"[" * 100_000, "not valid JSON"),
    "broken.npy": (b"\x93NUMPY", "holds no array"),
    "broken.pt": (b"nothing", "something else than tensors"),
    "map.txt": (b"", "must be .json"),
}


IDENTITY = np.tile(np.arange(E), (L, 1))


def changed(array, value, dtype=float):
    out = array.astype(dtype)
    out[2, 3] = value
    return out.tolist()


COUNTED = np.full((L, E), 7)
WRONG_VALUES = {
    "counts not a number": ({"logical_count": changed(COUNTED, np.nan)}, "the count of expert 3 of row 2 is nan"),
    "counts infinite": ({"logical_count": changed(COUNTED, np.inf)}, "expert 3 of row 2 is inf"),
    "counts negative": ({"logical_count": changed(COUNTED, -1, int)}, "the count of expert 3 of row 2 is -1"),
    "counts of halves": ({"logical_count": changed(COUNTED, 0.5)}, "expert 3 of row 2 is 0.5, not a whole number"),
    "counts all zero": ({"logical_count": (COUNTED * 0).tolist()}, "nothing was recorded"),
    "counts of a layer": ({"logical_count": [[7] * E] * (L - 1) + [[0] * E]}, "MoE layer 5 has no count"),
    "negative in a step": ({"logical_count": [COUNTED.tolist(), changed(COUNTED, -1, int)]}, "is -1"),
    "counts of a draft": ({"logical_count": [[7] * E] * (L + 1)}, "is the last one that of a draft layer?"),
    "counts with a shared expert": ({"logical_count": [[7] * (E + 1)] * L}, "a fused shared expert?"),
    "map with half an expert": (changed(IDENTITY, 3.5), "the expert of slot 3 of row 2 is 3.5"),
    "map beyond 32 bits": (
        changed(IDENTITY, 2**32 + 3, int),
        f"row 2 is {2**32 + 3}, not a whole number from 0 to 31",
    ),
    "map beyond 40 bits": (changed(IDENTITY, 2**40, int), f"the expert of slot 3 of row 2 is {2**40}"),
    "map of nothing": (changed(IDENTITY, -1, int), "the expert of slot 3 of row 2 is -1"),
    "map with a shared expert": (changed(IDENTITY, E, int), "is it a fused shared expert?"),
    "map of a draft": ([list(range(E))] * (L + 1), "is the last one that of a draft layer?"),
    "map not a number": (changed(IDENTITY, np.nan), "is nan, not a whole number"),
    "deep": ([[[list(range(E))]]], "a row of numbers for each layer"),
    "a cube": ([[list(range(E))]], "expected a row for each layer"),
}


@pytest.mark.parametrize("name", WRONG_VALUES)
def test_wrong_values_are_refused_in_one_line_that_names_them(tmp_path, name):
    content, words = WRONG_VALUES[name]
    (tmp_path / "file.json").write_bytes(json.dumps(content).encode() if isinstance(content, dict) else named(content))
    failed(imported(tmp_path / "file.json", tmp_path / "out", "--ep-size", 4), 2, "file.json", words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
def test_counts_of_every_type_are_read(tmp_path, dtype):
    counts = torch.from_numpy(np.random.default_rng(0).integers(1, 100, (2, L, E))).to(dtype)
    torch.save({"logical_count": counts}, tmp_path / "counts.pt")
    assert imported(tmp_path / "counts.pt", tmp_path / "plan", "--ep-size", 4).exit_code == 0
    expected = eplb.place(counts.double().numpy().sum(axis=0), 4, 0).physical_to_logical_map
    np.testing.assert_array_equal(load_plan(tmp_path / "plan").placement.physical_to_logical_map, expected)


def test_of_a_map_and_counts_the_map_is_taken_and_told(tmp_path):
    (tmp_path / "both.json").write_text(
        json.dumps({"physical_to_logical_map": IDENTITY[:, ::-1].tolist(), "logical_count": COUNTED.tolist()})
    )
    result = imported(tmp_path / "both.json", tmp_path / "plan", "--ep-size", 4)
    assert "the map is taken, as by SGLang" in result.stderr
    np.testing.assert_array_equal(load_plan(tmp_path / "plan").placement.physical_to_logical_map, IDENTITY[:, ::-1])


def ascend(maps, devices):
    """vLLM-Ascend's expert map, layers and devices in any order."""
    per_device = maps.reshape(len(maps), devices, -1)
    layers = [
        {"layer_id": l, "device_count": devices, "device_list": [
            {"device_id": d, "device_expert": per_device[l, d].tolist()} for d in reversed(range(devices))]}
        for l in reversed(range(len(maps)))
    ]  # fmt: skip
    return {"moe_layer_count": len(maps), "layer_list": layers}


def permuted():
    return np.stack([np.random.default_rng(l).permutation(E) for l in range(L)])


def test_the_expert_map_of_vllm_ascend_becomes_a_plan(tmp_path):
    (tmp_path / "expert_map.json").write_text(json.dumps(ascend(permuted(), 4)))
    assert imported(tmp_path / "expert_map.json", tmp_path / "plan", "--ep-size", 4).exit_code == 0
    np.testing.assert_array_equal(load_plan(tmp_path / "plan").placement.physical_to_logical_map, permuted())
    failed(imported(tmp_path / "expert_map.json", tmp_path / "b", "--ep-size", 8), 2, "is of 4 devices")


@pytest.mark.parametrize("broken", [{"layer_list": 3}, {"layer_list": [{}]}, {"layer_list": [{"layer_id": 0,
    "device_list": [{"device_id": 0, "device_expert": [0]}, {"device_id": 1, "device_expert": []}]}]}])  # fmt: skip
def test_a_broken_expert_map_of_vllm_ascend_is_named(tmp_path, broken):
    (tmp_path / "map.json").write_text(json.dumps(broken))
    failed(imported(tmp_path / "map.json", tmp_path / "plan", "--ep-size", 4), 2, "map.json: ")


def test_the_assignments_of_tensorrt_llm_become_a_plan(tmp_path):
    rows = "".join(f"  {layer}: {row}\n" for layer, row in enumerate(permuted().tolist()))
    text = f"num_slots: {E}\nlayer_updates_per_iter: 0\ninitial_global_assignments:\n{rows}"
    (tmp_path / "balancer.yaml").write_text(text)
    assert imported(tmp_path / "balancer.yaml", tmp_path / "plan", "--ep-size", 4).exit_code == 0
    np.testing.assert_array_equal(load_plan(tmp_path / "plan").placement.physical_to_logical_map, permuted())


BAD_YAML = {
    "text": ("a: [", "not valid YAML"),
    "slots": (f"num_slots: 40\ninitial_global_assignments:\n  0: {list(range(E))}\n", "num_slots is 40"),
    "no lists": ("initial_global_assignments:\n  0: 3\n", "must map layer numbers to lists"),
    "names": ("initial_global_assignments:\n  a: [1]\n", "must map layer numbers to lists"),
    "code": ("!!python/object/apply:os.system ['touch written']", "not valid YAML"),
    "itself": (
        "a: &a [0,0,0,0,0,0,0,0]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\ninitial_global_assignments:\n  0: [*b,*b]\n",
        "must map layer numbers to lists",
    ),
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_yaml_that_is_no_assignment_is_refused_in_one_line(tmp_path, name):
    text, words = BAD_YAML[name]
    (tmp_path / "map.yaml").write_text(text)
    failed(imported(tmp_path / "map.yaml", tmp_path / "plan", "--ep-size", 4), 2, words)


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_file_that_is_no_map_is_refused_in_one_line(tmp_path, name):
    content, words = BAD_MAPS[name]
    (tmp_path / name).write_bytes(content)
    failed(imported(tmp_path / name, tmp_path / "out", "--ep-size", 4), 2, words)
    assert not (tmp_path / "out").exists()


def test_pickled_code_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"logical_count": Harmful()}, tmp_path / "harmful.pt")
    failed(imported(tmp_path / "harmful.pt", tmp_path / "out", "--ep-size", 4), 2, "something else than tensors")
    assert not (tmp_path / "written").exists()


def test_a_directory_is_refused(tmp_path):
    failed(imported(tmp_path, tmp_path.parent / "out", "--ep-size", 4), 2, "is a directory: name a file")


def test_options_that_have_no_effect_are_refused(tmp_path):
    (tmp_path / "map.json").write_bytes(named(list(range(E))))
    (tmp_path / "answers.jsonl").write_text("{}")
    failed(imported(tmp_path / "map.json", tmp_path / "a", "--redundant-experts", 8), 2, "--redundant-experts")
    failed(imported(tmp_path / "answers.jsonl", tmp_path / "b", "--ep-size", 8), 2, "--ep-size", "semmoe solve")
