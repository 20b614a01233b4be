"""semmoe router on real sockets: what engines and clients get, whatever happens in between."""

import gzip
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx
import pytest
from router_site import HIGH, LOW, Engine, is_idle, make_plan, request_table, routed, served
from typer.testing import CliRunner
from waiting import eventually

from semmoe.cli import app
from semmoe.cli.app import install_hint
from semmoe.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash
from semmoe.placement.linear import vanilla_plan
from semmoe.plan import save_plan
from semmoe.router.prompts import Tokenizer
from semmoe.topology import Topology

COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODEL))


@pytest.fixture(scope="module")
def shared(tokenizer):
    """(URL of a router, Router, the engine behind it), for tests that leave them as they were."""
    engine = Engine()
    with (
        served(engine) as backend,
        routed([backend], tokenizer=Tokenizer(tokenizer), max_body=1 << 16) as (url, router),
    ):
        yield url, router, engine


@pytest.fixture
def site(shared):
    url, router, engine = shared
    engine.seen.clear()
    engine.go_on.clear()
    with httpx.Client(base_url=url, timeout=20) as client:
        yield client, router, engine
    eventually(lambda: is_idle(router))


@pytest.fixture
def start():
    """A function that starts engines and a router before them, for tests that break them."""
    with ExitStack() as stack:

        def run(count=1, plan=None, **settings):
            engines, stops = [Engine() for _ in range(count)], [stack.enter_context(ExitStack()) for _ in range(count)]
            urls = [stop.enter_context(served(engine)) for stop, engine in zip(stops, engines, strict=True)]
            url, router = stack.enter_context(routed(urls, plan, **settings))
            client = stack.enter_context(httpx.Client(base_url=url, timeout=20))
            return client, router, engines, [stop.close for stop in stops]

        yield run


def counted(client, name, **labels):
    """A counter on the router's page."""
    page, wanted = client.get("/metrics").text, {f'{key}="{value}"' for key, value in labels.items()}
    for line in page.splitlines():
        found = re.fullmatch(r"semmoe_router_(\w+)(?:\{(.*)\})? (\S+)", line)
        if found and found[1] == name and wanted <= set((found[2] or "").split(",")):
            return float(found[3])
    return 0.0


# What an engine gets


@pytest.mark.parametrize(("prompt", "rank"), [(LOW, "0"), (HIGH, "1"), ([HIGH, HIGH], "1")])
def test_the_plans_rank_and_the_body_as_it_came(site, prompt, rank):
    client, _, engine = site
    body = b'{ "prompt":%s,  "model": "m" }' % json.dumps(prompt).encode()
    before = counted(client, "scheduled_requests_total", dp_rank=rank, by="plan")
    answer = client.post(COMPLETIONS, content=body, headers={"authorization": "Bearer secret", "x-own": "1"})
    assert (answer.status_code, answer.content) == (200, b'{"choices": [{"text": " fine"}]}')
    seen = engine.seen[-1]
    assert (seen.body, seen.header("x-data-parallel-rank"), seen.header("x-own")) == (body, rank, "1")
    assert seen.header("authorization") == "Bearer secret"
    assert seen.header("host") != client.base_url.netloc.decode()
    assert seen.header("x-override-routed-dp-rank") is None
    assert counted(client, "scheduled_requests_total", dp_rank=rank, by="plan") == before + 1


def test_text_is_tokenised_as_the_engine_does(site, tokenizer):
    client, _, engine = site
    text = tokenizer.decode(HIGH * 4)
    client.post(COMPLETIONS, json={"prompt": text})
    assert engine.seen[-1].header("x-data-parallel-rank") == "1"
    assert counted(client, "schedule_failures_total") == 0


def test_sglangs_own_endpoint_gets_both_fields(site):
    client, _, engine = site
    client.post("/generate", json={"input_ids": HIGH, "sampling_params": {"max_new_tokens": 4}})
    assert engine.seen[-1].header("x-data-parallel-rank") == "1"
    assert engine.seen[-1].header("x-override-routed-dp-rank") == "1"


@pytest.mark.parametrize(
    ("fields", "body", "by"),
    [
        ({"x-data-parallel-rank": "0"}, {"prompt": HIGH}, "named"),
        ({}, {"prompt": HIGH, "routed_dp_rank": 0}, "named"),
        ({"x-data-parallel-rank": "7"}, {"prompt": HIGH}, "engine"),
        ({"x-data-parallel-rank": "none"}, {"prompt": HIGH}, "engine"), ({}, {"prompt": {"no": 1}}, "engine"),
    ],
)  # fmt: skip
def test_a_rank_that_a_request_names_is_kept_and_without_a_prompt_the_engine_chooses(site, fields, body, by):
    client, _, engine = site
    rank = "0" if by == "named" else "any"
    before = counted(client, "scheduled_requests_total", by=by, dp_rank=rank)
    client.post(COMPLETIONS, json=body, headers=fields)
    sent = [value for name, value in engine.seen[-1].headers if name == "x-data-parallel-rank"]
    assert sent == list(fields.values())
    assert counted(client, "scheduled_requests_total", by=by, dp_rank=rank) == before + 1


def test_backends_that_are_ranks_get_no_field(start):
    client, _, engines, _ = start(2, backend_ranks="urls")
    for prompt, fields in ((LOW, {}), (HIGH, {}), (HIGH, {"x-data-parallel-rank": "0"})):
        client.post(COMPLETIONS, json={"prompt": prompt}, headers=fields)
    assert [len(engine.seen) for engine in engines] == [2, 1]
    assert all(seen.header("x-data-parallel-rank") is None for engine in engines for seen in engine.seen)


def test_the_papers_tables_deal_in_rounds(start):
    client, _, (engine,), _ = start(plan=make_plan(request_table()))
    for _ in range(4):
        client.post(COMPLETIONS, json={"prompt": LOW})
    assert [seen.header("x-data-parallel-rank") for seen in engine.seen] == ["0", "1", "0", "1"]


def test_a_shared_prefix_stays_on_its_rank_and_backend(start):
    """Two replicas of two ranks: other prompts of 64 known tokens follow the first, for which all were equal."""
    client, _, engines, _ = start(2)
    prefix = [5000] * 64  # of no preference
    for end in range(4):
        client.post(COMPLETIONS, json={"prompt": [*prefix, *[5000 + end] * 16]})
    assert sorted(len(engine.seen) for engine in engines) == [0, 4]
    ranks = {seen.header("x-data-parallel-rank") for engine in engines for seen in engine.seen}
    assert len(ranks) == 1
    assert counted(client, "cached_tokens_total") == 3 * 64
    assert counted(client, "prompt_tokens_total") == counted(client, "unknown_tokens_total") == 4 * 80


# What passes through


def test_compressed_bytes_status_and_fields_pass_as_they_are(site):
    client, _, engine = site
    with client.stream("GET", "/gzip?a=%20b&a=2&%C3%A4", headers={"connection": "x-hop", "x-hop": "1"}) as answer:
        raw = b"".join(answer.iter_raw())
    assert raw == gzip.compress(b"text" * 1000, mtime=0)
    assert (answer.status_code, answer.headers["content-encoding"]) == (203, "gzip")
    assert answer.headers.get_list("set-cookie") == ["a=1", "b=2"]
    assert "x-private" not in answer.headers
    assert engine.seen[-1].target == "/gzip?a=%20b&a=2&%C3%A4"
    assert engine.seen[-1].header("x-hop") is None
    assert engine.seen[-1].header("via") == "1.1 semmoe"
    assert counted(client, "requests_total", endpoint="other", status="203") >= 1


def test_a_path_is_not_decoded_and_head_has_no_body(site):
    client, _, engine = site
    answer = client.head("/v1/models/a%2Fb")
    assert (answer.status_code, answer.content, answer.headers["content-length"]) == (200, b"", "32")
    assert (engine.seen[-1].method, engine.seen[-1].target) == ("HEAD", "/v1/models/a%2Fb")
    assert client.request("DELETE", "/v1/files/1").status_code == 200
    assert (engine.seen[-1].method, engine.seen[-1].body) == ("DELETE", b"")


@pytest.mark.parametrize("path", ["/v1/embeddings", COMPLETIONS])
def test_a_body_in_chunks(site, path):
    client, _, engine = site
    parts = [b'{"prompt": [4001, ', b"4002", b"]}"]
    assert client.post(path, content=iter(parts)).status_code == 200
    assert engine.seen[-1].body == b"".join(parts)
    scheduled = path == COMPLETIONS
    assert (engine.seen[-1].header("x-data-parallel-rank") == "1") is scheduled
    assert (engine.seen[-1].header("content-length") == "24") is scheduled  # elsewhere it is streamed on


def test_what_is_no_json_is_for_the_engine_to_refuse(site):
    client, _, engine = site
    for body in (b'{"prompt": [1, 2', b"[" * 40_000, b"\xff\xfe", b""):
        answer = client.post(COMPLETIONS, content=body)
        assert answer.status_code == (400 if body else 200)
        assert engine.seen[-1].body == body


def test_an_error_of_the_engine_stays_as_it_is(site):
    client, _, _ = site
    answer = client.post(COMPLETIONS, json={"prompt": LOW, "status": 429})
    assert (answer.status_code, answer.json()["choices"][0]["text"]) == (429, " fine")


def test_events_arrive_one_by_one(site):
    client, router, engine = site
    with client.stream("POST", COMPLETIONS, json={"prompt": LOW, "stream": True}) as answer:
        lines = answer.iter_lines()
        assert next(lines) == "data: 1"
        assert router.scheduler.work[0] > 0  # it runs, and the engine has not gone on
        engine.go_on.set()
        assert [line for line in lines if line] == ["data: [DONE]"]
    assert answer.headers["content-type"] == "text/event-stream"
    eventually(lambda: router.scheduler.work[0] == 0)


# What is refused


def test_a_body_over_the_limit_reaches_no_engine(site):
    client, _, engine = site
    long = b'{"prompt": "%s"}' % (b"a" * (1 << 16))
    for content in (long, iter([long[:1000], long[1000:]])):
        answer = client.post(COMPLETIONS, content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert engine.seen == []


def connect(client):
    """A socket to the router."""
    return socket.create_connection((client.base_url.host, client.base_url.port), timeout=20)


def answer_to(client, request):
    """(status, body) of the answer to bytes, which ends with the connection."""
    with connect(client) as raw:
        raw.sendall(request)
        head, _, body = read_all(raw).partition(b"\r\n\r\n")
    return int(head.split()[1]), body


def read_all(raw):
    parts = []
    while part := raw.recv(65536):
        parts.append(part)
    return b"".join(parts)


def head_of(path, *fields):
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: a", *fields, "", ""]).encode()


BOTH_WAYS = pytest.mark.parametrize("path", [COMPLETIONS, "/v1/embeddings"])


@BOTH_WAYS
def test_a_body_over_the_limit_is_refused_on_both_ways(site, path):
    client, _, _ = site
    for content in (b"a" * (1 + (1 << 16)), iter([b"a" * (1 << 16), b"a"])):
        answer = client.post(path, content=content)
        assert (answer.status_code, answer.json()["error"]["type"]) == (413, "invalid_request_error")
    assert client.post(path, content=b" " * (1 << 16)).status_code in (200, 400)  # the engine's answer


@BOTH_WAYS
@pytest.mark.parametrize("settings", [{"body_seconds": 0.2}, {"stall_seconds": 0.2}])
def test_a_body_that_does_not_come_is_not_waited_for(start, path, settings):
    client, router, (engine,), _ = start(**settings)
    status, body = answer_to(client, head_of(path, "content-length: 10") + b"{")
    assert (status, json.loads(body)["error"]["type"]) == (408, "timeout_error")
    eventually(lambda: is_idle(router))
    assert [seen.target for seen in engine.seen if seen.target == COMPLETIONS] == []
    assert client.post(path, json={"prompt": LOW}).status_code == 200


@BOTH_WAYS
def test_a_body_that_trickles_in_is_ended_too(start, path):
    client, router, _, _ = start(body_seconds=1, stall_seconds=20)
    with connect(client) as slow:
        slow.sendall(head_of(path, "content-length: 1000"))
        sent, begun = 0, time.monotonic()
        while router.fleet.backends[0].running or router.gate.inside or not sent:
            assert time.monotonic() < begun + 10, "it is still waited for"
            slow.sendall(b" ")
            sent += 1
            time.sleep(0.05)
        assert b" 408 " in slow.recv(1000)
    assert 1 < sent < 200
    assert time.monotonic() - begun >= 1
    eventually(lambda: is_idle(router))


def test_a_slow_body_in_time_is_served(start):
    client, _, (engine,), _ = start(body_seconds=5, stall_seconds=1)
    with connect(client) as slow:
        slow.sendall(head_of("/v1/embeddings", "content-length: 4", "connection: close"))
        for byte in (b"{", b" ", b" ", b"}"):
            time.sleep(0.1)
            slow.sendall(byte)
        assert b" 200 " in read_all(slow)
    assert engine.seen[-1].body == b"{  }"


@pytest.mark.parametrize("sent", [b"", b"GET /v1/mod", b"GET /v1/models HTTP/1.1\r\nhost: a\r\n"])
def test_a_head_that_does_not_come_is_not_waited_for(start, sent):
    client, _, (engine,), _ = start(head_seconds=0.3)
    with connect(client) as slow:
        slow.sendall(sent)
        assert read_all(slow) == b""
    assert engine.seen == []


def test_a_head_that_does_not_come_on_a_kept_connection_is_not_waited_for(start):
    client, _, (engine,), _ = start(head_seconds=0.5)
    with connect(client) as slow:
        for delay in (0, 0.6):  # a request itself may take longer, and so may the pause before the next
            body = json.dumps({"delay": delay}).encode()
            slow.sendall(head_of(COMPLETIONS, f"content-length: {len(body)}") + body)
            answer = b""
            while not answer.endswith(b'" fine"}]}'):
                answer += slow.recv(65536)
            time.sleep(0.6)
        slow.sendall(b"GET /v1/mo")
        begin = time.monotonic()
        assert read_all(slow) == b""
    assert time.monotonic() - begin < 10
    assert len(engine.seen) == 2


@BOTH_WAYS
def test_an_answer_that_nobody_reads_is_not_held(start, path):
    client, router, _, _ = start(unread_seconds=0.3)
    with connect(client) as slow:
        body = json.dumps({"prompt": LOW, "size": 32 << 20}).encode()
        slow.sendall(head_of(path, f"content-length: {len(body)}") + body)
        eventually(lambda: not is_idle(router))
        eventually(lambda: is_idle(router))
        assert len(read_all(slow)) < 32 << 20  # what the kernel had taken
    assert len(client.post(path, content=body).content) == 32 << 20  # whoever reads gets all of it


@BOTH_WAYS
@pytest.mark.parametrize("order", [1, -1])
def test_a_body_of_two_lengths_is_refused(site, path, order):
    client, _, engine = site
    fields = ["content-length: 4", "transfer-encoding: chunked"][::order]
    hidden = b"0\r\n\r\nGET /hidden HTTP/1.1\r\nhost: a\r\n\r\n"
    status, body = answer_to(client, head_of(path, *fields) + hidden)
    assert status == 400
    error = json.loads(body)["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", 400)
    assert "both" in error["message"]
    assert body.count(b"\n") == 0
    assert engine.seen == []


@pytest.mark.parametrize(
    "target", ["http://other/v1/models", "http://other/metrics", "HTTP://other", "other:80", "*", "http:/v1/models"]
)
def test_a_target_that_is_no_path_is_refused(site, target):
    client, _, engine = site
    status, body = answer_to(client, f"GET {target} HTTP/1.1\r\nhost: a\r\n\r\n".encode())
    assert (status, json.loads(body)["error"]["code"]) == (400, 400)
    assert engine.seen == []


def test_the_engine_is_never_told_another_host(site):
    client, router, engine = site
    answer_to(client, b"GET //other/v1/models HTTP/1.1\r\nhost: other\r\nconnection: close\r\n\r\n")
    assert (engine.seen[-1].target, engine.seen[-1].header("host")) == (
        "//other/v1/models",
        router.fleet.backends[0].host.decode(),
    )


def test_all_bodies_together_have_a_limit(start):
    client, router, (engine,), _ = start(max_body=1000, max_held=1500)
    with ThreadPoolExecutor(1) as threads, connect(client) as slow:
        slow.sendall(head_of(COMPLETIONS, "content-length: 1000") + b" " * 500)
        eventually(lambda: router.gate.held == 500)  # what has come counts, not what was announced
        body = json.dumps({"prompt": LOW, "delay": 1.0}).encode().ljust(900)
        first = threads.submit(client.post, COMPLETIONS, content=body)
        eventually(lambda: len(engine.seen) == 1)
        assert router.gate.held == 1400
        refused = client.post(COMPLETIONS, content=body)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert refused.json()["error"]["type"] == "overloaded_error"
        assert client.post("/v1/embeddings", content=b"{}".ljust(900)).status_code == 200  # streamed, not held
        assert first.result().status_code == 200
        eventually(lambda: router.gate.held == 500)
        assert client.post(COMPLETIONS, content=b"{}".ljust(900)).status_code == 200
    eventually(lambda: is_idle(router))


def test_a_full_router_says_when_to_come_back(start):
    client, router, (engine,), _ = start(max_in_flight=1, queue=1, queue_seconds=0.4)
    with ThreadPoolExecutor(2) as threads:
        first = threads.submit(client.post, COMPLETIONS, json={"prompt": LOW, "delay": 1.0})
        eventually(lambda: len(engine.seen) == 1)
        second = threads.submit(client.post, COMPLETIONS, json={"prompt": LOW})
        eventually(lambda: router.gate.inside == 2)
        refused = client.post(COMPLETIONS, json={"prompt": LOW})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert client.get("/v1/models").status_code == 200  # what is not scheduled does not wait
        assert counted(client, "queued") == 1
        assert second.result().status_code == 503  # waited too long
        assert first.result().status_code == 200
    assert counted(client, "requests_total", endpoint=COMPLETIONS, status="503", backend="none") == 2
    assert client.post(COMPLETIONS, json={"prompt": LOW}).status_code == 200
    eventually(lambda: is_idle(router))


def test_the_queue_is_served_in_turn(start):
    client, router, (engine,), _ = start(max_in_flight=1, queue=8)
    with ThreadPoolExecutor(6) as threads:
        asked = []
        for i in range(6):
            asked.append(threads.submit(client.post, COMPLETIONS, json={"prompt": LOW, "delay": 0.05, "number": i}))
            eventually(lambda i=i: router.gate.inside + len(engine.seen) > i)
            eventually(lambda: router.gate.running == 1 or not router.gate.inside)
        assert [one.result().status_code for one in asked] == [200] * 6
    assert sorted(json.loads(seen.body)["number"] for seen in engine.seen) == list(range(6))
    eventually(lambda: is_idle(router))


# Requests assigned together


@pytest.mark.parametrize("backends", [1, 2])
def test_requests_of_a_window_are_assigned_together_and_wait_no_longer_than_it(start, monkeypatch, backends):
    client, router, engines, _ = start(backends, window_ms=150)
    together, windows = router.scheduler.choose_together, []
    monkeypatch.setattr(
        router.scheduler, "choose_together", lambda prompts, *more: windows.append(prompts) or together(prompts, *more)
    )

    def ask(prompt):
        begun = time.monotonic()
        assert client.post(COMPLETIONS, json={"prompt": prompt}).status_code == 200
        return time.monotonic() - begun

    with ThreadPoolExecutor(8) as threads:
        waited = list(threads.map(ask, [LOW, HIGH] * 4))
    assert sum(map(len, windows)) == 8
    assert max(map(len, windows)) > 1
    assert 0.1 < max(waited) < 10  # far below what a window that nobody ends would take; the machine may be loaded
    seen = [
        (json.loads(seen.body)["prompt"], seen.header("x-data-parallel-rank")) for one in engines for seen in one.seen
    ]
    assert sorted(seen) == sorted([(LOW, "0"), (HIGH, "1")] * 4)
    assert [counted(client, "scheduled_requests_total", dp_rank=rank, by="plan") for rank in "01"] == [4, 4]
    eventually(lambda: is_idle(router))


def test_requests_that_name_a_rank_or_have_no_prompt_are_not_held(start):
    client, router, (engine,), _ = start(window_ms=9_000)
    for body in ({"prompt": LOW, "routed_dp_rank": 1}, {"messages": 3}):
        assert client.post(COMPLETIONS, json=body, timeout=5).status_code == 200
    assert len(engine.seen) == 2
    eventually(lambda: is_idle(router))


def test_a_client_that_hangs_up_in_a_window_is_never_sent(start):
    client, router, (engine,), _ = start(window_ms=400)
    with pytest.raises(httpx.ReadTimeout):
        client.post(COMPLETIONS, json={"prompt": HIGH}, timeout=0.1)
    eventually(lambda: router.gate.inside == 0)
    assert client.post(COMPLETIONS, json={"prompt": LOW}).status_code == 200
    assert [json.loads(seen.body)["prompt"] for seen in engine.seen] == [LOW]
    eventually(lambda: is_idle(router))


def test_a_window_whose_schedule_fails_costs_nobody_an_answer(start, monkeypatch):
    client, router, _, _ = start(window_ms=50)

    def fail(*_):
        raise KeyError("a secret prompt")

    monkeypatch.setattr(router.scheduler, "choose_together", fail)
    with ThreadPoolExecutor(3) as threads:
        answers = list(threads.map(lambda _: client.post(COMPLETIONS, json={"prompt": LOW}).status_code, range(3)))
    assert answers == [200] * 3
    assert counted(client, "schedule_failures_total") == 3
    eventually(lambda: is_idle(router))


# Clients that hang up


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_hangs_up_ends_its_request_at_the_engine(site, stream):
    client, router, engine = site
    before = engine.hung_up
    with pytest.raises(httpx.ReadTimeout), client.stream(
        "POST", COMPLETIONS, json={"prompt": LOW, "hang": True, "stream": stream}, timeout=0.3
    ) as answer:  # fmt: skip
        list(answer.iter_raw())
    eventually(lambda: engine.hung_up == before + 1)
    eventually(lambda: is_idle(router))
    eventually(lambda: counted(client, "requests_total", status="499") >= 1)


def test_a_client_that_hangs_up_in_the_queue_is_never_sent(start):
    client, router, (engine,), _ = start(max_in_flight=1, queue=4)
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(client.post, COMPLETIONS, json={"prompt": LOW, "delay": 0.8})
        eventually(lambda: len(engine.seen) == 1)
        with pytest.raises(httpx.ReadTimeout):
            client.post(COMPLETIONS, json={"prompt": HIGH}, timeout=0.1)
        eventually(lambda: router.gate.inside == 1)
        assert first.result().status_code == 200
    eventually(lambda: is_idle(router))
    assert len(engine.seen) == 1


def test_a_client_that_hangs_up_while_it_sends(site):
    client, router, engine = site
    for path in (COMPLETIONS, "/v1/files"):
        with socket.create_connection((client.base_url.host, client.base_url.port)) as slow:
            slow.sendall(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 10\r\n\r\n{{".encode())
            eventually(lambda: not is_idle(router))
        eventually(lambda: is_idle(router))
    assert [seen.target for seen in engine.seen if seen.target == COMPLETIONS] == []


# Backends that fail


def test_a_backend_that_is_gone_costs_nobody_an_answer(start):
    client, router, engines, stops = start(2)
    prompt = {"prompt": [5000] * 64}
    client.post(COMPLETIONS, json=prompt)
    chosen = 0 if engines[0].seen else 1
    stops[chosen]()
    assert client.post(COMPLETIONS, json=prompt).status_code == 200  # its prefix prefers the one that is gone
    assert len(engines[1 - chosen].seen) == 1
    assert counted(client, "retries_total") == 1
    assert counted(client, "healthy", backend=router.fleet.backends[chosen].url) == 0
    assert client.get("/router/ready").status_code == 200
    assert client.post(COMPLETIONS, json=prompt).status_code == 200
    assert counted(client, "retries_total") == 1  # nobody tries it again
    eventually(lambda: is_idle(router))


def test_without_a_backend_nothing_is_ready_and_with_one_again_it_is(start):
    client, router, (engine,), (stop,) = start(health_seconds=0.1, health_timeout=1.0)
    port = int(router.fleet.backends[0].url.rsplit(":", 1)[1])
    assert client.get("/router/ready").status_code == 200
    stop()
    refused = client.post(COMPLETIONS, json={"prompt": LOW})
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
    assert refused.json()["error"]["type"] == "unavailable_error"
    assert client.get("/router/ready").status_code == 503
    assert client.get("/router/health").status_code == 200
    assert client.get("/v1/models").status_code == 503
    with served(engine, port=port):
        eventually(lambda: client.get("/router/ready").status_code == 200)
        assert client.post(COMPLETIONS, json={"prompt": LOW}).status_code == 200
    eventually(lambda: is_idle(router))


def test_one_bad_look_does_not_end_a_backend_and_three_do(start):
    client, router, (engine,), _ = start(health_seconds=0.05)
    engine.health = 500
    eventually(lambda: router.fleet.backends[0]._failures >= 1)
    assert client.get("/router/ready").status_code == 200 or router.fleet.backends[0]._failures >= 3
    eventually(lambda: client.get("/router/ready").status_code == 503)
    assert router.fleet.backends[0]._failures >= 3
    engine.health = 200
    eventually(lambda: client.get("/router/ready").status_code == 200)


class Rude:
    """A server that is healthy, reads requests and closes on them."""

    def __init__(self):
        self.requests = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                if connection.recv(65536).startswith(b"GET /health"):
                    connection.sendall(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
                else:
                    self.requests += 1

    def close(self):
        self._listener.close()


def test_what_was_sent_is_not_sent_again(tokenizer):
    rude, engine = Rude(), Engine()
    with served(engine) as other, routed([rude.url, other]) as (url, router), httpx.Client(base_url=url) as client:
        answers = [client.post(COMPLETIONS, json={"prompt": [5000] * 64}) for _ in range(2)]
        assert {answer.status_code for answer in answers} <= {200, 502}
        failed = [answer for answer in answers if answer.status_code == 502]
        assert len(failed) == rude.requests >= 1
        assert failed[0].json()["error"]["type"] == "backend_error"
        assert len(engine.seen) == 2 - len(failed)
        assert counted(client, "retries_total") == 0
        eventually(lambda: is_idle(router))
    rude.close()


def test_an_answer_that_breaks_off_does_not_look_whole(site):
    client, router, _ = site
    with pytest.raises(httpx.RemoteProtocolError):
        client.post(COMPLETIONS, json={"prompt": LOW, "break": True})
    eventually(lambda: is_idle(router))
    assert counted(client, "requests_total", endpoint=COMPLETIONS, status="502") >= 1


def test_a_failure_of_the_schedule_costs_nobody_an_answer(start, monkeypatch, caplog):
    client, router, (engine,), _ = start()

    def fail(*_):
        raise KeyError("a secret prompt")

    monkeypatch.setattr(router.scheduler, "choose", fail)
    for _ in range(2):
        assert client.post(COMPLETIONS, json={"prompt": LOW}).status_code == 200
    assert engine.seen[-1].header("x-data-parallel-rank") is None
    assert counted(client, "schedule_failures_total") == 2
    assert counted(client, "scheduled_requests_total", by="engine", dp_rank="any") == 2
    assert "KeyError" in caplog.text
    assert "secret" not in caplog.text


@pytest.mark.parametrize("window_ms", [0, 30])
def test_nothing_is_left_of_requests_of_every_kind(start, window_ms):
    client, router, engines, _ = start(
        2, window_ms=window_ms, max_in_flight=6, queue=4, queue_seconds=0.3, max_body=4096
    )
    kinds = [
        {"prompt": LOW}, {"prompt": HIGH, "delay": 0.1}, {"prompt": LOW, "hang": True}, {"prompt": LOW, "break": True},
        {"prompt": HIGH, "hang": True, "stream": True}, {"prompt": "x" * 9000}, {"prompt": None}, {"status": 500},
        {"prompt": LOW, "n": 3, "max_tokens": 2, "routed_dp_rank": 1},
    ]  # fmt: skip

    def ask(i):
        try:
            return client.post(COMPLETIONS, json=kinds[i % len(kinds)], timeout=0.5).status_code
        except httpx.HTTPError as error:
            return type(error).__name__

    with ThreadPoolExecutor(12) as threads:
        outcomes = set(threads.map(ask, range(72)))
    assert {200, 413, 500, 503, "ReadTimeout", "RemoteProtocolError"} <= outcomes
    eventually(lambda: is_idle(router))
    assert sum(len(engine.seen) for engine in engines) >= 9


# The command


def command(*arguments):
    return CliRunner().invoke(app, ["router", *(str(argument) for argument in arguments)])


@pytest.fixture(scope="module")
def plan_path(tokenizer, tmp_path_factory):
    path = tmp_path_factory.mktemp("router") / "plan"
    save_plan(make_plan(tokenizer_hash=tokenizer_hash(tokenizer)), path)
    return path


def test_the_command_serves_and_stops(plan_path):
    engine = Engine()
    words = [
        sys.executable,
        "-c",
        "from semmoe.cli import main; main()",
        "router",
        "--plan",
        str(plan_path),
        "--tokenizer",
        "tiny",
        "--port",
        "0",
    ]
    with served(engine) as backend, subprocess.Popen(
        [*words, backend], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    ) as process:  # fmt: skip
        line = process.stdout.readline()
        found = re.match(r"(http://127\.0\.0\.1:\d+) -> (\S+) \(2 ranks each, by header; plan of test\)", line)
        assert found, line + process.stderr.read()
        with httpx.Client(base_url=found[1], timeout=20) as client:
            eventually(lambda: client.get("/router/ready").status_code == 200)
            answer = client.post(COMPLETIONS, json={"prompt": HIGH})
            assert answer.status_code == 200
            assert counted(client, "added_seconds_count") == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) in (0, -signal.SIGTERM)
    assert engine.seen[-1].header("x-data-parallel-rank") == "1"


def test_mistakes_end_in_one_line(plan_path, tmp_path, tokenizer):
    def refused(*arguments):
        result = command(*arguments)
        lines = [line for line in result.stderr.splitlines() if "error:" in line]
        assert (result.exit_code, len(lines)) == (2, 1), result.output
        return lines[0]

    save_plan(vanilla_plan(make_plan().fingerprint, Topology(ep_size=2)), tmp_path / "vanilla")
    save_plan(make_plan(tokenizer_hash="other"), tmp_path / "other")
    url = "http://127.0.0.1:1"
    assert "is no backend" in refused("localhost:8000", "--plan", plan_path)
    assert "more than a host and a port" in refused(f"{url}/v1", "--plan", plan_path)
    assert "given twice" in refused(url, url + "/", "--plan", plan_path)
    assert "the plan has 2 ranks, and there are 1 URLs" in refused(
        url, "--plan", plan_path, "--backend-ranks", "urls"
    )  # fmt: skip
    assert "schedules no requests" in refused(url, "--plan", tmp_path / "vanilla")
    assert "another tokenizer" in refused(url, "--plan", tmp_path / "other", "--tokenizer", MODEL)
    assert "'--max-in-flight'" in refused(url, "--plan", plan_path, "--max-in-flight", 0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert "cannot listen on" in refused(url, "--plan", plan_path, "--port", taken.getsockname()[1])


def test_an_open_address_and_a_missing_tokenizer_are_warned_of(plan_path, monkeypatch):
    monkeypatch.setattr("semmoe.router.server.run", lambda *_: None)
    result = command("http://127.0.0.1:1", "--plan", plan_path, "--host", "0.0.0.0", "--port", 0)
    assert result.exit_code == 0, result.output
    assert "asks nobody who they are" in result.stderr
    assert "only prompts sent as ids" in result.stderr
    result = command("http://127.0.0.1:1", "--plan", plan_path, "--tokenizer", "tiny", "--port", 0)
    assert "warning" not in result.stderr


def test_a_missing_extra_is_named(plan_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = command("http://127.0.0.1:1", "--plan", plan_path)
    assert result.exit_code == 2
    assert f"this command needs uvicorn: {install_hint('serve')}" in result.stderr


def test_the_command_explains_itself_and_costs_other_commands_nothing():
    output = command("--help").output
    assert "Example" in output
    assert "--max-in-flight" in output
    code = "import sys, semmoe.cli; print({'uvicorn', 'httpcore', 'prometheus_client', 'torch'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
