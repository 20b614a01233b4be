"""`semmoe import` of answers with the routing of tokens, which become traces."""

import base64
import gzip
import io
import json

import numpy as np
import pytest
from models import build
from test_apply import failed
from test_engine_maps import E, K, L, imported

from semmoe.core import DECODE, PREFILL
from semmoe.engines.transformers.config import fingerprint_of
from semmoe.traces.trace import open_trace


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


def sglang(prompt, sampled, experts, **meta):
    """An answer of SGLang's /generate, with the prompt's ids kept beside it."""
    encoded = base64.b64encode(np.ascontiguousarray(experts, "<i4").tobytes()).decode()
    return {"text": "x", "output_ids": sampled, "meta_info": {"routed_experts": encoded, **meta}, "input_ids": prompt}


def lines(path, *answers):
    path.write_text("".join(json.dumps(one) + "\n" for one in answers))
    return path


def test_answers_of_sglang_become_a_trace(tmp_path):
    """Rows of all decoder layers, of which the first has no experts; answers alone and in a list."""
    model = build("deepseek_v2", tmp_path)
    f = fingerprint_of(model)
    first, second = (routing(n, f.num_layers + 1, f.num_experts, f.top_k, n) for n in (5, 3))
    answers = [sglang([1, 2, 3], [4, 5, 6], first), [sglang([7, 8], [9, 1], second)]]
    result = imported(lines(tmp_path / "answers.jsonl", *answers), tmp_path / "trace", "--json", model=model)
    assert json.loads(result.stdout)["requests"] == 2
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == [1, 2, 3, 4, 5, 7, 8, 9]
    np.testing.assert_array_equal(trace.expert_ids, np.concatenate([first, second])[:, 1:])


def test_a_prompt_alone_has_one_row_fewer(tmp_path):
    file = lines(tmp_path / "answers.jsonl", sglang([1, 2, 3], [], routing(2)))
    assert imported(file, tmp_path / "trace").exit_code == 0
    assert open_trace(tmp_path / "trace").token_ids.tolist() == [1, 2]


@pytest.mark.parametrize("form", ["npy", "lists", "sglang"])
def test_the_rows_of_a_cached_prefix_may_be_omitted(tmp_path, form):
    prompt, sampled, experts = [1, 2, 3, 4], [5, 6], routing(3)
    one = sglang(prompt, sampled, experts, cached_tokens=2) if form == "sglang" else answer(prompt, sampled, experts)
    if form == "lists":
        one["choices"][0]["routed_experts"] = experts.tolist()
    assert imported(lines(tmp_path / "answers.jsonl", one), tmp_path / "trace").exit_code == 0
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == [3, 4, 5]
    assert trace.phase.tolist() == [PREFILL, PREFILL, DECODE]
    assert trace.prompt(0).tolist() == prompt
    np.testing.assert_array_equal(trace.expert_ids, experts)


@pytest.mark.parametrize("form", ["npy", "sglang"])
def test_an_answer_without_a_row_of_the_prompt_is_left_out(tmp_path, form):
    """The last token of a prompt is always computed: of four prompt tokens and two that ran, two rows are too few."""
    makes = sglang if form == "sglang" else answer
    file = lines(tmp_path / "answers.jsonl", makes([1, 2, 3, 4], [5, 6, 7], routing(2)))
    failed(imported(file, tmp_path / "trace"), 2, "routed_experts has 2 rows for 6 tokens that ran")
    file = lines(tmp_path / "answers.jsonl", makes([1, 2, 3, 4], [5, 6, 7], routing(3)))
    assert imported(file, tmp_path / "trace").exit_code == 0


def test_ids_without_a_shape_are_rows_of_all_decoder_layers_where_they_can_be(tmp_path):
    """The ids of as many rows as there are MoE layers could also be those of one row more, of MoE layers alone."""
    model = build("deepseek_v2", tmp_path)
    f = fingerprint_of(model)
    depth = f.num_layers + 1
    experts = routing(f.num_layers, depth, f.num_experts, f.top_k)
    assert len(experts) * depth % f.num_layers == 0
    prompt = list(range(1, 2 + f.num_layers + depth))
    file = lines(tmp_path / "answers.jsonl", sglang(prompt, [1], experts))
    assert imported(file, tmp_path / "trace", model=model).exit_code == 0
    np.testing.assert_array_equal(open_trace(tmp_path / "trace").expert_ids, experts[:, 1:])


def with_twins(experts, count):
    """Routing whose first `count` tokens name an expert twice."""
    broken = experts.copy()
    broken[:count, 0, 1] = broken[:count, 0, 0]
    return broken


def test_tokens_that_name_an_expert_twice_are_left_out_and_counted(tmp_path):
    experts = routing(150)
    file = lines(tmp_path / "answers.jsonl", answer(list(range(150)), [7], with_twins(experts, 1)))
    result = imported(file, tmp_path / "trace", "--json")
    told = json.loads(result.stdout)
    assert (told["tokens"], told["impossible_tokens"]) == (149, 1)
    trace = open_trace(tmp_path / "trace")
    assert trace.token_ids.tolist() == list(range(1, 150))
    assert trace.prompt(0).tolist() == list(range(150))
    assert trace.left_out == 0  # nothing is left to leave out
    assert "1 tokens are left out: they name an expert twice" in imported(file, tmp_path / "again").stderr


@pytest.mark.parametrize("experts", [with_twins(routing(150), 2), np.zeros((150, L, K), int)])
def test_more_than_one_percent_of_them_is_an_error(tmp_path, experts):
    file = lines(tmp_path / "answers.jsonl", answer(list(range(150)), [7], experts))
    failed(imported(file, tmp_path / "trace"), 2, "name an expert twice in a layer")
    assert not (tmp_path / "trace").exists()


def test_tokens_with_the_experts_of_another_are_warned_about(tmp_path):
    experts = routing(10)
    experts[4:8] = experts[0]
    file = lines(tmp_path / "answers.jsonl", answer(list(range(10)), [11], experts))
    result = imported(file, tmp_path / "trace")
    assert "5 of 10 tokens (50%) have in every layer the experts of another token" in " ".join(result.stderr.split())
    assert open_trace(tmp_path / "trace").num_tokens == 10


BAD_ANSWERS = {
    "no JSON": ("{", "Expecting property name"),
    "no choices": ("{}", "it has no 'choices'"),
    "a number": ("3", "not iterable"),
    "nothing routed": ('{"choices": [{"token_ids": [1]}]}', "--enable-return-routed-experts"),
    "no prompt": (json.dumps({"choices": [{"token_ids": [1], "routed_experts": "AA=="}]}), "no 'prompt_token_ids'"),
    "no prompt of SGLang": (json.dumps({"meta_info": {"routed_experts": "AA=="}, "output_ids": [1]}), "no 'prompt"),
    "too many": (json.dumps(answer([1, 2], [3], routing(5))), "5 rows for 2 tokens"),
    "too few": (json.dumps(answer([1, 2], [3, 4, 5], routing(1))), "1 rows for 4 tokens"),
    "unknown expert": (json.dumps(answer([1], [2], routing(1) + E)), "not a whole number from 0 to 31"),
    "large expert": (json.dumps(answer([1], [2], routing(1) + 2**32)), "not a whole number from 0 to 31"),
    "half an expert": (json.dumps(answer([1], [2], routing(1) + 0.5)), "not a whole number"),
    "unknown token": (
        json.dumps(answer([4096], [2], routing(1))),
        "is 4096, not a whole number from 0 to 4095",
    ),
    "half a token": (json.dumps(answer([1.5], [2], routing(1))), "not a whole number"),
    "another top-k": (json.dumps(answer([1], [2], routing(1, top_k=3))), "not (1, layers, 4)"),
    "no base64": ('{"choices": [{"prompt_token_ids": [1], "token_ids": [1], "routed_experts": "?"}]}', "line 2"),
}


@pytest.mark.parametrize("name", BAD_ANSWERS)
def test_a_line_that_is_no_answer_is_left_out_and_counted(tmp_path, name):
    line, words = BAD_ANSWERS[name]
    good = json.dumps(answer([1], [2], routing(1)))
    (tmp_path / "answers.jsonl").write_text(f"{good}\n{line}\n")
    result = imported(tmp_path / "answers.jsonl", tmp_path / "trace")
    assert result.exit_code == 0, result.output
    assert "1 of 2 records left out" in result.stderr
    assert "line 2: " in result.stderr
    assert words in result.stderr
    assert open_trace(tmp_path / "trace").num_requests == 1
    failed(imported(tmp_path / "answers.jsonl", tmp_path / "strict", "--strict"), 2, "line 2", words)
    assert not (tmp_path / "strict").exists()


def test_a_file_without_an_answer_or_with_many_bad_lines_is_refused(tmp_path):
    failed(imported(lines(tmp_path / "a.jsonl", {}, {}), tmp_path / "trace"), 2, "2 of 2 records left out")
    good = [answer([1], [2], routing(1))] * 17
    failed(imported(lines(tmp_path / "b.jsonl", *good, {}, {}), tmp_path / "trace"), 2, "2 of 19 records left out")
    assert not (tmp_path / "trace").exists()
    assert imported(lines(tmp_path / "c.jsonl", *good, *good, {}, {}), tmp_path / "trace").exit_code == 0


def test_an_array_that_claims_more_than_it_holds_allocates_nothing(tmp_path):
    header = b"{'descr': '<i8', 'fortran_order': False, 'shape': (1000000000000, 6, 4), }".ljust(117) + b"\n"
    content = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header
    one = answer([1], [2], routing(1))
    one["choices"][0]["routed_experts"] = base64.b64encode(content).decode()
    result = imported(lines(tmp_path / "a.jsonl", one, answer([1], [2], routing(1))), tmp_path / "trace")
    assert "1 of 2 records left out" in result.stderr
