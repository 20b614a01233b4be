"""`semmoe import` and vLLM's expert map: files of engines as plans and traces, and what is refused of them."""

import base64
import gzip
import io
import json

import numpy as np
import pytest
import torch
from models import build
from test_apply import failed, plan_for
from typer.testing import CliRunner

from semmoe.checkpoint import engine_maps
from semmoe.cli import app
from semmoe.core import DECODE, PREFILL
from semmoe.demo import MODEL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.files import save_arrays, save_json
from semmoe.methods import eplb
from semmoe.plan import load_plan
from semmoe.trace import TraceHeader, open_trace

TINY = fingerprint_of(str(MODEL))
L, E, K = TINY.num_layers, TINY.num_experts, TINY.top_k


def imported(file, out, *options, model=MODEL):
    return CliRunner().invoke(app, ["import", *map(str, (file, "--model", model, "--out", out, *options))])


def routing(tokens, layers=L, experts=E, top_k=K, seed=0):
    """(tokens, layers, K) distinct experts of each token."""
    rng = np.random.default_rng(seed)
    return rng.random((tokens, layers, experts)).argsort(axis=2)[..., :top_k]


def npy(array):
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


def answer(prompt, generated, experts):
    """vLLM's answer to a completion, with the fields that are read and some that are not."""
    choice = {"index": 0, "text": "x", "prompt_token_ids": prompt, "token_ids": generated}
    return {"id": "cmpl-1", "choices": [{**choice, "routed_experts": npy(experts)}], "usage": {}}


@pytest.mark.parametrize(("to", "redundant"), [("vllm-json", 0), ("vllm-json", 8), ("sglang", 8)])
def test_a_plan_s_map_for_an_engine_is_read_back(tmp_path, to, redundant):
    model = build("deepseek_v2", tmp_path)  # its first layer has no experts
    plan = plan_for(model, tmp_path / "plan", redundant, ep_size=4)
    applied = CliRunner().invoke(
        app, ["apply", str(plan), "--model", model, "--to", to, "--out", f"{tmp_path}/map.json"]
    )
    assert applied.exit_code == 0, applied.output
    assert imported(tmp_path / "map.json", tmp_path / "back", "--ep-size", 4, model=model).exit_code == 0
    before, after = load_plan(plan), load_plan(tmp_path / "back")
    np.testing.assert_array_equal(after.placement.physical_to_logical_map, before.placement.physical_to_logical_map)
    assert (after.topology, after.method) == (before.topology, "map")
    assert not after.requests.by_tables | after.tokens.by_tables


def test_vllm_s_file_has_rows_of_moe_layers_alone_and_flags_that_keep_it(tmp_path):
    model = build("deepseek_v2", tmp_path)
    plan, out = plan_for(model, tmp_path / "plan", 8, ep_size=4, dp_size=2), tmp_path / "map.json"
    words = ["apply", str(plan), "--model", model, "--to", "vllm-json", "--out", str(out), "--json"]
    result = json.loads(CliRunner().invoke(app, words).stdout)
    assert json.loads(out.read_text()) == load_plan(plan).placement.physical_to_logical_map.tolist()
    flags = result["flags"]
    assert flags[:4] == ["--tensor-parallel-size", "2", "--data-parallel-size", "2"]
    balancer = json.loads(flags[flags.index("--eplb-config") + 1])
    assert balancer["initial_expert_map_path"] == str(out)
    assert balancer["num_redundant_experts"] == 8
    assert balancer["step_interval"] == 2**31 - 1


def test_one_row_stands_for_all_layers(tmp_path):
    row = np.random.default_rng(0).permutation(E)
    np.save(tmp_path / "map.npy", row)
    assert imported(tmp_path / "map.npy", tmp_path / "plan", "--ep-size", 4, "--attention", "dp").exit_code == 0
    plan = load_plan(tmp_path / "plan")
    assert plan.placement.physical_to_logical_map.tolist() == [row.tolist()] * L
    assert plan.topology.dp_size == 4


@pytest.mark.parametrize("source", ["sglang", "semmoe"])
def test_counts_become_a_plan_by_eplb(tmp_path, source):
    counts = np.random.default_rng(0).integers(1, 100, (3, L, E))
    if source == "sglang":
        file = tmp_path / "expert_distribution_recorder_1.5.pt"
        torch.save({"rank": 0, "logical_count": torch.from_numpy(counts)}, file)
    else:
        file = tmp_path / "counts"
        save_json(file / "counts.json", TraceHeader(fingerprint=TINY, dataset_hash="", settings={}))
        arrays = {"activations": counts.sum(axis=0), "transitions": np.zeros((L - 1, E, E), np.int64)}
        save_arrays(file / "counts.safetensors", {**arrays, "tokens": np.array([9])})
    result = imported(file, tmp_path / "plan", "--ep-size", 4, "--redundant-experts", 8)
    assert result.exit_code == 0, result.output
    assert "it schedules no request and no token" in " ".join(result.stdout.split())
    placed = load_plan(tmp_path / "plan").placement.physical_to_logical_map
    expected = eplb.place(counts.sum(axis=0).astype(np.float64), 4, 8)
    np.testing.assert_array_equal(placed, expected.physical_to_logical_map)


@pytest.mark.parametrize("packed", [False, True])
def test_answers_of_vllm_become_a_trace(tmp_path, packed):
    model = build("deepseek_v2", tmp_path)
    f = fingerprint_of(model)
    first, second = (routing(n, f.num_layers + 1, f.num_experts, f.top_k, n) for n in (5, 3))
    lines = [answer([1, 2, 3], [4, 5, 6], first.astype(np.uint8)), answer([7, 8], [9, 1], second.astype(np.int32))]
    text = "\n".join(map(json.dumps, lines)).encode() + b"\n\n"
    file = tmp_path / ("answers.jsonl.gz" if packed else "answers.jsonl")
    file.write_bytes(gzip.compress(text) if packed else text)
    result = imported(file, tmp_path / "trace", "--json", model=model)
    assert json.loads(result.stdout)["tokens"] == 8
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    assert trace.phase.tolist() == [PREFILL] * 3 + [DECODE] * 2 + [PREFILL] * 2 + [DECODE]
    assert [trace.prompt(r).tolist() for r in range(2)] == [[1, 2, 3], [7, 8]]
    np.testing.assert_array_equal(trace.expert_ids, np.concatenate([first, second])[:, 1:])


def test_first_chunks_of_prompts_are_read_from_sglang_s_records(tmp_path):
    """Physical experts are turned into logical ones; a later chunk and a decoded token are counted and left out."""
    logical = np.stack([np.random.default_rng(l).permutation(E) for l in range(L)])
    ids = routing(7)
    stored = np.full((L, 7, 8), -1, np.int32)  # eight experts of a token, whatever the model's number
    stored[..., :K] = logical.argsort(axis=1)[np.arange(L)[:, None, None], ids.swapaxes(0, 1)]
    prompts = {"forward_mode": 1, "input_ids": [1, 2, 3, 4, 5, 6, 7], "positions": [0, 1, 2, 8, 9, 0, 1],
               "extend_seq_lens": [3, 2, 2], "topk_ids_of_layer": torch.from_numpy(stored)}  # fmt: skip
    decoding = {"forward_mode": 2, "input_ids": [5], "positions": [3], "extend_seq_lens": None,
                "topk_ids_of_layer": torch.from_numpy(stored[:, :1])}  # fmt: skip
    nothing = {**decoding, "input_ids": [], "positions": [], "topk_ids_of_layer": torch.zeros(L, 0, 8)}
    content = {"records": [nothing, prompts, decoding], "last_physical_to_logical_map": torch.from_numpy(logical)}
    torch.save(content, tmp_path / "recorded.pt")
    result = imported(tmp_path / "recorded.pt", tmp_path / "trace")
    assert "2 requests, 5 tokens" in result.stdout
    assert "3 tokens are left out" in result.stdout
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == [1, 2, 3, 6, 7]
    np.testing.assert_array_equal(trace.expert_ids, ids[[0, 1, 2, 5, 6]])
    assert (trace.phase == PREFILL).all()


def test_a_rank_that_routed_a_part_of_the_tokens_gives_no_trace(tmp_path):
    """Attention-TP with an all-to-all, as SGLang records it: the rows of the other ranks are -1."""
    stored = np.full((L, 4, 8), -1, np.int32)
    stored[:, :2, :K] = routing(2).swapaxes(0, 1)
    record = {"forward_mode": 1, "input_ids": [1, 2, 3, 4], "positions": [0, 1, 2, 3], "extend_seq_lens": [4],
              "topk_ids_of_layer": torch.from_numpy(stored)}  # fmt: skip
    identity = torch.arange(E).repeat(L, 1)
    torch.save({"records": [record], "last_physical_to_logical_map": identity}, tmp_path / "recorded.pt")
    failed(imported(tmp_path / "recorded.pt", tmp_path / "trace"), 2, "the routing of no whole prompt")
    assert not (tmp_path / "trace").exists()


BAD_MAPS = {
    "text.json": (b"nothing", "not valid JSON"),
    "object.json": (b'{"a": 1}', "neither physical_to_logical_map, logical_count nor records"),
    "ragged.json": (b"[[1, 2], [3]]", "all equally long"),
    "words.json": (b'["a"]', "all equally long"),
    "missing.json": (json.dumps([0] * E).encode(), "is on no rank"),
    "layers.json": (json.dumps([list(range(E))] * 3).encode(), "3 layers, but the model has 6"),
    "deep.json": (b"[" * 100_000, "not valid JSON"),
    "broken.npy": (b"\x93NUMPY", "is no array"),
    "broken.pt": (b"nothing", "something else than tensors"),
    "map.txt": (b"", "must be .json"),
}


@pytest.mark.parametrize("name", BAD_MAPS)
def test_a_file_that_is_no_map_is_refused_in_one_line(tmp_path, name):
    content, words = BAD_MAPS[name]
    (tmp_path / name).write_bytes(content)
    failed(imported(tmp_path / name, tmp_path / "out", "--ep-size", 4), 2, words)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("record", [3, {"input_ids": [1]}])
def test_records_that_lack_a_field_are_refused(tmp_path, record):
    torch.save({"records": [record], "last_physical_to_logical_map": torch.zeros(L, E)}, tmp_path / "recorded.pt")
    failed(imported(tmp_path / "recorded.pt", tmp_path / "out"), 2, "a record lacks one of extend_seq_lens")


def test_pickled_code_is_not_run(tmp_path):
    class Harmful:
        def __reduce__(self):
            return (open, (str(tmp_path / "written"), "w"))

    torch.save({"logical_count": Harmful()}, tmp_path / "harmful.pt")
    failed(imported(tmp_path / "harmful.pt", tmp_path / "out", "--ep-size", 4), 2, "something else than tensors")
    assert not (tmp_path / "written").exists()


BAD_ANSWERS = {
    "no JSON": ("{", "line 2: no answer of vLLM"),
    "no choices": ("{}", "it has no 'choices'"),
    "a list": ("[]", "line 2: no answer of vLLM"),
    "nothing routed": ('{"choices": [{"token_ids": [1]}]}', "--enable-return-routed-experts"),
    "no prompt": (json.dumps({"choices": [{"token_ids": [1], "routed_experts": "AA=="}]}), "no 'prompt_token_ids'"),
    "too few": (json.dumps(answer([1, 2], [3], routing(5))), "has shape (5, 6, 4), not (2, layers, 4)"),
    "unknown expert": (json.dumps(answer([1], [2], routing(1) + E)), "out of range for 32 experts"),
    "unknown token": (json.dumps(answer([4096], [2], routing(1))), "out of range for 4096 vocabulary entries"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_an_answer_without_routing_is_refused_and_nothing_is_written(tmp_path, name):
    line, words = BAD_ANSWERS[name]
    good = json.dumps(answer([1], [2], routing(1)))
    (tmp_path / "answers.jsonl").write_text(f"{good}\n{line}\n")
    failed(imported(tmp_path / "answers.jsonl", tmp_path / "trace"), 2, words)
    assert not (tmp_path / "trace").exists()


def test_options_that_have_no_effect_are_refused(tmp_path):
    (tmp_path / "map.json").write_text(json.dumps(list(range(E))))
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer([1], [2], routing(1))))
    failed(imported(tmp_path / "map.json", tmp_path / "a", "--redundant-experts", 8), 2, "--redundant-experts")
    failed(imported(tmp_path / "answers.jsonl", tmp_path / "b", "--ep-size", 8), 2, "--ep-size", "semmoe solve")


def test_counts_of_another_model_are_refused(tmp_path):
    other = fingerprint_of(build("qwen3_moe", tmp_path))
    header = TraceHeader(fingerprint=other, dataset_hash="", settings={})
    save_json(tmp_path / "counts" / "counts.json", header)
    arrays = {"activations": np.ones((L, E)), "transitions": np.zeros(1), "tokens": np.ones(1)}
    save_arrays(tmp_path / "counts" / "counts.safetensors", arrays)
    failed(imported(tmp_path / "counts", tmp_path / "plan"), 2, "is of another model or tokenizer")


def test_more_experts_of_a_token_than_sglang_s_records_keep_are_refused():
    many = engine_maps.Found(engine_maps.PASSES)
    with pytest.raises(ValueError, match="keep 8 experts of a token, and the model 9"):
        engine_maps.prompts_of_passes(many, MODEL, TINY.__class__(**{**vars(TINY), "top_k": 9}))
