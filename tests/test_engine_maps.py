"""`semmoe import` of maps and counts, which become plans, and refusals of bad files."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
import yaml
from models import build
from test_apply import failed, plan_for
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.placement import eplb
from semmoe.plan import load_plan, save_plan
from semmoe.requests.policy import PromptScores

TINY = fingerprint_of(str(MODEL))
L, E, K = TINY.num_layers, TINY.num_experts, TINY.top_k


def imported(file, out, *options, model=MODEL):
    return CliRunner().invoke(app, ["import", *map(str, (file, "--model", model, "--out", out, *options))])


FILES = {"sglang": "map.json", "ascend": "map.json", "trtllm": "map.yaml", "eplb": "map.npy"}


def applied(plan, model, to, out, *options):
    return CliRunner().invoke(app, ["apply", *map(str, (plan, "--model", model, "--to", to, "--out", out, *options))])


def plan_with_copies(folder, model, copies, *options):
    """A plan of 8 experts in each of two layers on 4 ranks, random; each rank holds an expert of the next one, too."""
    rows = np.stack([np.random.default_rng(l).permutation(8).reshape(4, 2) for l in range(2)])
    rows = np.concatenate([rows, np.roll(rows[..., :1], -1, axis=1)], axis=2) if copies else rows
    np.save(folder / "placed.npy", rows.reshape(2, -1))
    result = imported(folder / "placed.npy", folder / "plan", "--ep-size", 4, *options, model=model)
    assert result.exit_code == 0, result.output
    return folder / "plan"


@pytest.mark.parametrize("copies", [False, True])
@pytest.mark.parametrize("to", FILES)
def test_a_plan_s_map_for_an_engine_is_read_back(tmp_path, to, copies):
    model = build("deepseek_v2", tmp_path)  # its first layer has no experts
    plan = plan_with_copies(tmp_path, model, copies)
    result = applied(plan, model, to, tmp_path / FILES[to])
    assert result.exit_code == 0, result.output
    assert imported(tmp_path / FILES[to], tmp_path / "back", "--ep-size", 4, model=model).exit_code == 0
    before, after = load_plan(plan), load_plan(tmp_path / "back")
    np.testing.assert_array_equal(after.placement.physical_to_logical_map, before.placement.physical_to_logical_map)
    assert (after.topology, after.method) == (before.topology, "map")
    assert not after.requests.by_tables | after.tokens.by_tables


def test_what_each_engine_reads_and_is_started_with(tmp_path):
    """Three decoder layers, of which 1 and 2 have experts; four ranks with two slots and one copy each."""
    model = build("deepseek_v2", tmp_path)
    plan = plan_with_copies(tmp_path, model, True, "--attention", "hybrid", "--dp-size", 2, "--num-nodes", 2)
    rows = load_plan(plan).placement.physical_to_logical_map.tolist()
    flags = {}
    for to, name in FILES.items():
        out = tmp_path / f"{to}-{name}"
        result = applied(plan, model, to, out)
        assert result.exit_code == 0, result.output
        text = " ".join(result.stdout.split())
        out.rename(tmp_path / f"first-{to}")
        flags[to] = json.loads(applied(plan, model, to, out, "--json").stdout)["flags"]
        left = "which copy of an expert a rank uses; which ranks share one of 2 nodes"
        assert f"Not in the file, so left to the engine: {left}" in text
        assert ("attention hybrid (TensorRT-LLM heeds a map in attention-DP only)" in text) == (to == "trtllm")
    assert flags["ascend"][:5] == [
        "--data-parallel-size",
        "2",
        "--tensor-parallel-size",
        "2",
        "--enable-expert-parallel",
    ]
    path = str(tmp_path / "ascend-map.json")
    eplb = {"eplb_config": {"expert_map_path": path, "num_redundant_experts": 4}}
    assert (flags["ascend"][5], json.loads(flags["ascend"][6])) == ("--additional-config", eplb)
    layers = json.loads((tmp_path / "ascend-map.json").read_text())
    assert layers["moe_layer_count"] == 2
    for number, (layer, row) in enumerate(zip(layers["layer_list"], rows, strict=True)):
        devices = [{"device_id": g, "device_expert": row[3 * g : 3 * g + 3]} for g in range(4)]
        assert layer == {"layer_id": number, "device_count": 4, "device_list": devices}
    balancer = yaml.safe_load((tmp_path / "trtllm-map.yaml").read_text())
    assignments = {1: rows[0], 2: rows[1]}
    assert balancer == {"num_slots": 12, "layer_updates_per_iter": 0, "initial_global_assignments": assignments}
    assert yaml.safe_load("\n".join(flags["trtllm"])) == {
        "tensor_parallel_size": 4,
        "moe_expert_parallel_size": 4,
        "enable_attention_dp": True,
        "moe_config": {"load_balancer": str(tmp_path / "trtllm-map.yaml")},
    }
    assert np.load(tmp_path / "eplb-map.npy").tolist() == rows
    assert flags["eplb"] == ["num_replicas=12", "num_nodes=2", "num_gpus=4"]


def test_a_target_that_reads_no_map_and_a_wrong_suffix_are_refused(tmp_path):
    plan = plan_for(MODEL, tmp_path / "plan")
    failed(applied(plan, MODEL, "vllm", tmp_path / "map.json"), 2, "vLLM reads no map", "semmoe serve --engine vllm")
    failed(applied(plan, MODEL, "trtllm", tmp_path / "map.json"), 2, "must end in .yaml")
    failed(applied(plan, MODEL, "eplb", tmp_path / "map.pt"), 2, "must end in .npy")


def test_a_file_says_that_it_lacks_the_tables_for_requests(tmp_path):
    plan = load_plan(plan_for(MODEL, tmp_path / "plain", dp_size=4))
    zeros = np.zeros(4, np.float32)
    weights = np.ones(TINY.vocab_size + 1, np.float32)
    scores = np.zeros((TINY.vocab_size + 1, 4), np.float32)
    tables = PromptScores(
        token_scores=scores, token_weights=weights, bias=zeros, prices=zeros, score_spread=0.1, mean_length=1.0
    )
    save_plan(replace(plan, requests=tables), tmp_path / "plan")
    report = json.loads(applied(tmp_path / "plan", MODEL, "sglang", tmp_path / "a.json", "--json").stdout)
    assert report["left_to_the_engine"] == ["which rank serves a request"]
    text = " ".join(applied(tmp_path / "plan", MODEL, "sglang", tmp_path / "b.json").stdout.split())
    assert "Not in the file, so left to the engine: which rank serves a request." in text


def test_vllm_ascend_has_no_entry_for_an_expert_twice_on_a_rank(tmp_path):
    order = [
        *range(E),
        *range(4),
    ]  # rank 0 holds experts 0 to 8, rank 1 holds 9 to 17, ..., rank 3 holds 27 to 31, 0 to 3
    order[8], order[35] = 0, 8  # rank 0 gets the copy of expert 0
    np.save(tmp_path / "map.npy", order)
    assert imported(tmp_path / "map.npy", tmp_path / "plan", "--ep-size", 4).exit_code == 0
    failed(applied(tmp_path / "plan", MODEL, "ascend", tmp_path / "map.json"), 2, "rank 0 has an expert of MoE layer 0")
    assert applied(tmp_path / "plan", MODEL, "trtllm", tmp_path / "map.yaml").exit_code == 0


@pytest.mark.parametrize("name", ["map.npy", "map.json"])
def test_one_row_stands_for_all_layers(tmp_path, name):
    row, file = np.random.default_rng(0).permutation(E), tmp_path / name
    if file.suffix == ".npy":
        np.save(file, row)
    else:
        file.write_text(json.dumps([row.tolist()]))
    assert imported(file, tmp_path / "plan", "--ep-size", 4, "--attention", "dp").exit_code == 0
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
    "number.json": (b"3", "expected a row of numbers for each layer"),
    "list.json": (json.dumps([list(range(E))] * 2).encode(), "2 layers, but the model has 6"),
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
    """vLLM-Ascend's expert map."""
    per_device = maps.reshape(len(maps), devices, -1)
    layers = [
        {"layer_id": l, "device_count": devices, "device_list": [
            {"device_id": d, "device_expert": per_device[l, d].tolist()} for d in range(devices)]}
        for l in range(len(maps))
    ]  # fmt: skip
    return {"moe_layer_count": len(maps), "layer_list": layers}


def permuted():
    return np.stack([np.random.default_rng(l).permutation(E) for l in range(L)])


def test_the_expert_map_of_vllm_ascend_becomes_a_plan(tmp_path):
    (tmp_path / "expert_map.json").write_text(json.dumps(ascend(permuted(), 4)))
    assert imported(tmp_path / "expert_map.json", tmp_path / "plan", "--ep-size", 4).exit_code == 0
    np.testing.assert_array_equal(load_plan(tmp_path / "plan").placement.physical_to_logical_map, permuted())
    failed(imported(tmp_path / "expert_map.json", tmp_path / "b", "--ep-size", 8), 2, "is of 4 devices")


@pytest.mark.parametrize("place", ["layer_list", "device_list"])
def test_the_lists_of_vllm_ascend_are_read_by_position(tmp_path, place):
    content = ascend(permuted(), 4)
    listed = content[place] if place == "layer_list" else content["layer_list"][0][place]
    listed[0], listed[1] = listed[1], listed[0]
    (tmp_path / "map.json").write_text(json.dumps(content))
    failed(imported(tmp_path / "map.json", tmp_path / "a", "--ep-size", 4), 2, "_id 1 is entry 0 of its list")
    for entry in listed:
        entry.pop("layer_id", entry.pop("device_id", None))  # vLLM-Ascend does not need the numbers
    (tmp_path / "map.json").write_text(json.dumps(content))
    assert imported(tmp_path / "map.json", tmp_path / "b", "--ep-size", 4).exit_code == 0
    expected = permuted()
    if place == "layer_list":
        expected[[0, 1]] = expected[[1, 0]]
    else:
        expected[0, :16] = np.roll(expected[0, :16], 8)
    np.testing.assert_array_equal(load_plan(tmp_path / "b").placement.physical_to_logical_map, expected)


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


def test_the_layers_of_tensorrt_llm_are_decoder_layers(tmp_path):
    model = build("deepseek_v2", tmp_path)  # layers 1 and 2 have experts
    rows = [list(range(8)), list(range(8))[::-1], [1, 0, *range(2, 8)]]
    (tmp_path / "a.yaml").write_text(f"initial_global_assignments: {{3: {rows[0]}, 2: {rows[1]}, 1: {rows[2]}}}")
    assert imported(tmp_path / "a.yaml", tmp_path / "plan", "--ep-size", 4, model=model).exit_code == 0
    placed = load_plan(tmp_path / "plan").placement.physical_to_logical_map.tolist()
    assert placed == [rows[2], rows[1]]  # layer 3 is a draft's
    (tmp_path / "b.yaml").write_text(f"initial_global_assignments: {{0: {rows[0]}, 1: {rows[1]}}}")
    failed(imported(tmp_path / "b.yaml", tmp_path / "b", "--ep-size", 4, model=model), 2, "no row for layer 2")


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
