"""The real SGLang over HTTP, in every set-up, on a plan: the plain model's tokens; and what else users may send."""

import json
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import openai
import pytest
import requests
from serving import NEW_TOKENS, Server

from semmoe.cli import main
from semmoe.demo import MODEL
from semmoe.engines.transformers import verify
from semmoe.trace import open_trace

SET_UPS = {  # options of `semmoe serve`, SGLang's own
    "tp1": (["--ep-size", "1"], ()),
    "tp2, placed": (["--plan", "tp2", "--shuffle", "off"], ("--moe-a2a-backend", "none")),
    "tp2, shuffled": (["--plan", "tp2"], ("--enable-mixed-chunk",)),
    "dp2": (["--plan", "dp2"], ()),
    "tp4 dp2": (["--plan", "hybrid"], ()),
}
SCHEDULING = ("dp2", "tp4 dp2")
RECORDING = ("tp1", "tp2, shuffled", "dp2")


@pytest.fixture(scope="module", params=SET_UPS)
def server(request, plans, tmp_path_factory):
    options, engine = SET_UPS[request.param]
    options = [plans.get(word, word) for word in options]
    server = Server(tmp_path_factory.mktemp("server"), str(MODEL), *options, engine=engine)
    server.name = request.param
    try:
        yield server.wait()
    finally:
        server.stop()


def check(model, prompts, reference, outputs):
    agreement = verify.compare_outputs(model, prompts, reference, outputs)
    assert agreement.holds, f"requests {agreement.mismatches} differ"
    assert agreement.identical >= len(reference) - 1, str(agreement)


def test_the_plain_models_tokens(server, model, prompts, reference):
    answers = server.complete(prompts)
    check(model, prompts, reference, [answer["output_ids"] for answer in answers])
    again = server.complete(prompts)  # now from the prefix cache
    check(model, prompts, reference, [answer["output_ids"] for answer in again])
    assert sum(answer["meta_info"]["cached_tokens"] for answer in again) > 0


def test_openai_clients_get_the_same(server, model, prompts, reference, tmp_path):
    from semmoe.engines.transformers.model import load_tokenizer

    tokenizer, client = load_tokenizer(str(MODEL)), openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    for i in (3, 7, 11):
        given = {"model": str(MODEL), "prompt": prompts[i], "max_tokens": NEW_TOKENS, "temperature": 0}
        expected = tokenizer.decode(reference[i], skip_special_tokens=True)
        assert client.completions.create(**given).choices[0].text == expected
        parts = [chunk.choices[0].text for chunk in client.completions.create(**given, stream=True) if chunk.choices]
        assert "".join(parts) == expected


def test_a_request_that_names_its_rank_keeps_it(server, prompts):
    if server.name not in SCHEDULING:
        pytest.skip("one data-parallel rank")
    for rank in (0, 1):
        assert server.generate(prompts[5], routed_dp_rank=rank).json()["meta_info"]["dp_rank"] == rank


def test_activity_is_proven(server):
    assert server.log.count("semmoe: active: engine sglang 0.5.23") == 1
    found = server.counters()
    assert found["active"] == {"tp1": 1, "tp4 dp2": 4}.get(server.name, 2)
    if server.name in SCHEDULING:
        assert found["scheduled_requests plan"] >= 64
        assert found["scheduled_requests named"] == 2
        assert found.get("schedule_failures", 0) == 0
    if server.name in ("tp2, shuffled", "dp2", "tp4 dp2"):
        pairs = found["pairs true"] + found["pairs false"]
        assert pairs == 4 * found["routed_tokens"]
        assert found["pairs true"] / pairs > {"tp4 dp2": 0.3}.get(server.name, 0.54)
        rows, dispatch, combine = found["remote_rows"], 192 * 4 + 4 * (4 + 4), 192 * 4
        assert found["all_to_all_bytes"] == rows * (dispatch + combine)


def test_malformed_requests_do_no_harm(server, prompts, reference):
    before = requests.post(f"{server.url}/generate", data="{not json", timeout=30)
    outside = server.generate([5, 4095, 4096, 1_000_000, 7])
    negative = server.generate([5, -1, 7])
    empty, wrong = server.generate([]), server.generate(prompts[4], sampling_params={"max_new_tokens": -3})
    for answer in (before, outside, negative, empty, wrong):
        assert 400 <= answer.status_code < 500, (answer.status_code, answer.text[:200])
    assert server.generate(prompts[6]).json()["output_ids"] == reference[6]


def test_a_client_that_hangs_up_does_no_harm(server, prompts, reference):
    body = {"input_ids": prompts[2], "sampling_params": {"max_new_tokens": 200, "temperature": 0}, "stream": True}
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=60) as answer:
        next(answer.iter_lines())
    assert server.generate(prompts[6]).json()["output_ids"] == reference[6]


def test_recorded_routing_is_the_plain_models(server, model, texts, tmp_path, capsys):
    """Every token once: prompts in chunks, a prefix that two requests share, tokens that were decoded."""
    if server.name not in RECORDING:
        pytest.skip("as of another set-up")
    given = [text[:90] for text in texts[100:112]]
    given.append(given[0][:60] + given[1][:40])
    run("record", "start", str(server.control))
    time.sleep(0.5)
    answers = [server.generate(given[0]).json(), *server.complete(given[1:])]
    run("record", "stop", str(server.control), "--out", str(tmp_path / "trace"))
    recorded = open_trace(tmp_path / "trace")
    expected = {tuple(p): plain_routing(model, p, a["output_ids"]) for p, a in zip(given, answers, strict=True)}
    assert recorded.num_requests == len(given)
    for r in range(recorded.num_requests):
        rows = slice(recorded.request_offsets[r], recorded.request_offsets[r + 1])
        tokens, routed = expected[tuple(recorded.prompt(r).tolist())]
        cached = len(tokens) - len(recorded.token_ids[rows])
        assert 0 <= cached <= 64
        np.testing.assert_array_equal(recorded.token_ids[rows], tokens[cached:])
        np.testing.assert_array_equal(recorded.expert_ids[rows], routed[cached:])


def test_the_death_of_a_rank_ends_the_server(server, prompts):
    """The last test of each server: every client gets an answer or an error, and no process stays."""
    if server.name not in ("tp2, shuffled", "dp2"):
        pytest.skip("as of another set-up")
    ranks = server.schedulers()
    assert len(ranks) == 2
    body = {"input_ids": prompts[2], "sampling_params": {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}}
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(requests.post, f"{server.url}/generate", json=body, timeout=100)
        time.sleep(1)
        os.kill(ranks[1], signal.SIGKILL)
        error = waiting.exception(timeout=100)
    assert error is not None or waiting.result().status_code >= 400
    assert server.process.wait(timeout=60) != 0


def run(*words: str) -> None:
    import sys
    from unittest import mock

    with mock.patch.object(sys, "argv", ["semmoe", *words]), pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)


def plain_routing(model, prompt, output):
    """Tokens fed to the plain model and their experts (T, L, K), by falling weight."""
    import torch

    from semmoe.engines.transformers.recorder import RoutingRecorder

    fed = torch.tensor([[*prompt, *output[:-1]]])
    with RoutingRecorder(model) as recorder, torch.no_grad():
        recorder.begin(fed, torch.ones_like(fed, dtype=torch.bool), True)
        model(input_ids=fed, use_cache=False)
        return fed[0].numpy(), recorder.take()


def test_serving_is_described(plans, capsys):
    run("serve", str(MODEL), "--plan", plans["dp2"], "--dry-run", "--", "--dtype", "float32")
    said = capsys.readouterr()
    assert "-m sglang.launch_server" in said.out
    assert "--dtype float32" in said.out
    assert "SEMMOE_PLAN=" in said.err
    assert json.loads(json.dumps(said.out))
