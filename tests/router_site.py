"""A router before small servers that record what they get: real sockets, real uvicorn, in threads."""

import asyncio
import gzip
import json
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import uvicorn
from waiting import eventually

from semmoe.core import Plan
from semmoe.methods.paper_policies import PaperTable
from semmoe.placement.linear import place
from semmoe.requests.policy import PromptScores
from semmoe.router.proxy import Router
from semmoe.router.server import configuration, listen
from semmoe.router.settings import RouterSettings
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Fingerprint, Topology

VOCAB, MEAN = 4096, 10.0
LOW, HIGH = [1, 2, 3], [4001, 4002, 4003]  # prompts that prefer rank 0 and rank 1


def request_map(ranks=2, **changes):
    """Ids of the lower half prefer rank 0, the others rank 1, a prompt of three by a fifth of its pairs; row V, for
    unknown ids, none.
    """
    scores = np.zeros((VOCAB + 1, ranks), np.float32)
    scores[: VOCAB // 2, 0] = scores[VOCAB // 2 : VOCAB, 1] = 0.2 / np.sqrt(3)
    zeros = np.zeros(ranks, np.float32)
    values = {"token_scores": scores, "token_weights": np.ones(VOCAB + 1, np.float32), "bias": zeros, "prices": zeros,
              "score_spread": 0.0, "mean_length": MEAN}  # fmt: skip
    return PromptScores(**{**values, **changes})


def request_table(ranks=2):
    scores = np.zeros((VOCAB + 1, ranks), np.float32)
    scores[: VOCAB // 2, 0] = scores[VOCAB // 2 : VOCAB, 1] = 1
    return PaperTable(request_scores=scores, request_source=np.ones(VOCAB + 1, np.uint8))


def make_plan(requests=None, ranks=2, tokenizer_hash=""):
    identity = Fingerprint(model="m", architecture_hash="", tokenizer_hash=tokenizer_hash, vocab_size=VOCAB,
                           num_layers=1, num_experts=4, top_k=2)  # fmt: skip
    policy = request_map(ranks) if requests is None else requests
    topology = Topology(ep_size=ranks, dp_size=ranks)
    return Plan(
        topology=topology,
        placement=place(1, 4, ranks),
        tokens=ByPosition(),
        requests=policy,
        fingerprint=identity,
        method="test",
    )


@dataclass
class Seen:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name):
        return dict(self.headers).get(name)


@dataclass
class Engine:
    """An ASGI server that answers as its requests' bodies say, and records them."""

    seen: list[Seen] = field(default_factory=list)
    hung_up: int = 0
    health: int = 200
    go_on: threading.Event = field(default_factory=threading.Event)

    async def __call__(self, scope, receive, send):
        if scope["path"] == "/health":
            return await _answer(send, self.health, b"", [])
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
        target = scope["raw_path"].decode() + ("?" + scope["query_string"].decode() if scope["query_string"] else "")
        self.seen.append(Seen(scope["method"], target, headers, body))
        if scope["path"] == "/gzip":
            more = [(b"content-encoding", b"gzip"), (b"set-cookie", b"a=1"), (b"set-cookie", b"b=2"),
                    (b"connection", b"x-private"), (b"x-private", b"1")]  # fmt: skip
            return await _answer(send, 203, gzip.compress(b"text" * 1000, mtime=0), more)
        return await self._generate(_parsed(body), receive, send)

    async def _generate(self, request, receive, send):
        if request is None:
            return await _answer(send, 400, b'{"error": "no JSON"}', [])
        if request.get("hang"):
            if request.get("stream"):
                await _begin(send)
                await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
            self.hung_up += 1
            return None
        if request.get("break"):
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"1000")]})
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
            return None  # uvicorn closes the connection
        if request.get("stream"):
            await _begin(send)
            await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
            while not self.go_on.is_set():
                await asyncio.sleep(0.005)
            return await send({"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False})
        if request.get("size"):
            return await _answer(send, 200, bytes(request["size"]), [])
        await asyncio.sleep(request.get("delay", 0))
        return await _answer(send, request.get("status", 200), b'{"choices": [{"text": " fine"}]}', [])


def _parsed(body):
    """None: the engine refuses it."""
    try:
        return json.loads(body or b"{}")
    except (ValueError, RecursionError):
        return None


async def _begin(send):
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})


async def _answer(send, status, body, more):
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body)), *more]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@contextmanager
def served(application, port=0):
    """The URL at which an ASGI application is served until the end of the block."""
    config = uvicorn.Config(application, log_level="critical", access_log=False, lifespan="off", ws="none")
    with serving(config, port) as url:
        yield url


@contextmanager
def serving(config, port=0):
    """The URL at which uvicorn serves what `config` says until the end of the block."""
    listener = listen("127.0.0.1", port)
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    eventually(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


@contextmanager
def routed(urls, plan=None, tokenizer=None, **settings):
    """(URL, Router) of a router before `urls`."""
    values = {"health_seconds": 30.0, **settings}
    given = RouterSettings(backends=tuple(urls), **values)
    router = Router(given, plan or make_plan(), tokenizer)
    with serving(configuration(router, given)) as url:
        yield url, router


def is_idle(router):
    """No request has left anything behind."""
    backends = sum(backend.running for backend in router.fleet.backends)
    guests = router.gate.inside == router.gate.running == router.gate.held == 0
    return guests and backends == 0 and np.allclose(router.scheduler.work, 0)
