"""`semmoe picker` behind a real Envoy, as gateways set it and by `deploy/envoy.yaml`: `make test-clusters`."""

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import synthetic
import yaml
from ports import free_port, listening
from typer.testing import CliRunner
from waiting import eventually

from semmoe.cli import app
from semmoe.cli.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash
from semmoe.gateway import Scorer
from semmoe.plan import load_plan, save_plan
from semmoe.solver import solve
from semmoe.topology import Topology

ENVOY = Path(sys.executable).with_name("envoy")
grpc = pytest.importorskip("grpc", reason="in another environment: make test-clusters")
pytest.importorskip("envoy.service.ext_proc.v3", reason="in another environment: make test-clusters")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not ENVOY.exists(), reason="in another environment: make test-clusters"),
]

PICKER = [sys.executable, "-c", "from semmoe.cli import main; main()", "picker"]
DEPLOYED = Path(__file__).parents[1] / "deploy" / "envoy.yaml"
PICKED, NAMED = "x-gateway-destination-endpoint", "x-data-parallel-rank"
LONG = "tell me of rivers. " * 16_000  # many of Envoy's chunks
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


class Rank(BaseHTTPRequestHandler):
    """Says which address it is, and what it was sent, in two events; the second when it is allowed to."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        self._answer(b"".join(self._chunks()).decode(errors="replace"))

    def do_GET(self):
        self._answer("")

    def _answer(self, body):
        seen = {"port": self.server.server_port, "body": body, "path": self.path}
        seen |= {"picked": self.headers.get(PICKED), "rank": self.headers.get(NAMED)}
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event(json.dumps(seen))
        self.server.go_on.wait(30)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunks(self):
        """Envoy, whose picker might have changed the length, sends none."""
        if "Content-Length" in self.headers:
            yield self.rfile.read(int(self.headers["Content-Length"]))
            return
        while size := int(self.rfile.readline(), 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def _event(self, text):
        data = f"data: {text}\n\n".encode()
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def log_message(self, *words):
        """Print nothing."""


@contextmanager
def rank():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rank)
    server.handle_error = lambda *_: None  # a client that hangs up
    server.go_on = threading.Event()
    server.go_on.set()
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def named(name, kind, **fields):
    return {"name": name, "typed_config": {"@type": f"type.googleapis.com/envoy.extensions.{kind}", **fields}}


def endpoints(name, ports):
    where = [{"endpoint": {"address": {"socket_address": {"address": "127.0.0.1", "port_value": p}}}} for p in ports]
    return {"cluster_name": name, "endpoints": [{"lb_endpoints": where}]}


def gateway(listen, picker, ranks):
    """Envoy's configuration, as inference gateways make it: bodies are streamed through the picker both ways."""
    modes = {part: "SEND" for part in ("request_trailer_mode", "response_trailer_mode", "response_header_mode")}
    modes |= {"request_body_mode": "FULL_DUPLEX_STREAMED", "response_body_mode": "FULL_DUPLEX_STREAMED"}
    ask = named(
        "picker", "filters.http.ext_proc.v3.ExternalProcessor",
        grpc_service={"envoy_grpc": {"cluster_name": "picker"}}, processing_mode=modes, message_timeout="10s",
    )  # fmt: skip
    route = {"match": {"prefix": "/"}, "route": {"cluster": "ranks", "timeout": "60s"}}
    manager = named(
        "http", "filters.network.http_connection_manager.v3.HttpConnectionManager", stat_prefix="in",
        http_filters=[ask, named("router", "filters.http.router.v3.Router")],
        route_config={"virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [route]}]},
    )  # fmt: skip
    turns = named("turns", "load_balancing_policies.round_robin.v3.RoundRobin")
    chosen = named(
        "chosen", "load_balancing_policies.override_host.v3.OverrideHost",
        override_host_sources=[{"header": PICKED}], fallback_policy={"policies": [{"typed_extension_config": turns}]},
    )  # fmt: skip
    http2 = named("http2", "upstreams.http.v3.HttpProtocolOptions")["typed_config"]
    http2["explicit_http_config"] = {"http2_protocol_options": {}}
    clusters = [
        {
            "name": "ranks", "type": "STATIC", "load_assignment": endpoints("ranks", ranks),
            "load_balancing_policy": {"policies": [{"typed_extension_config": chosen}]},
        },
        {
            "name": "picker", "type": "STATIC", "load_assignment": endpoints("picker", [picker]),
            "typed_extension_protocol_options": {"envoy.extensions.upstreams.http.v3.HttpProtocolOptions": http2},
        },
    ]  # fmt: skip
    address = {"socket_address": {"address": "127.0.0.1", "port_value": listen}}
    listener = {"name": "in", "address": address, "filter_chains": [{"filters": [manager]}]}
    return {"static_resources": {"listeners": [listener], "clusters": clusters}}


@pytest.fixture(scope="module")
def plan(tmp_path_factory):
    """A plan of two ranks for the shipped model's tokenizer, of which the prompts of two groups prefer one each."""
    trace = synthetic.planted_trace(2, 1, requests_per_group=40)[0]
    identity = replace(trace.fingerprint, tokenizer_hash=tokenizer_hash(load_tokenizer(str(MODEL))))
    path = tmp_path_factory.mktemp("gateway") / "plan"
    save_plan(solve(replace(trace, fingerprint=identity), Topology(ep_size=2, dp_size=2)), path)
    return path, [trace.prompt(request).tolist() for request in range(8)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The shipped model's folder with a chat template."""
    folder = tmp_path_factory.mktemp("model") / "chat"
    shutil.copytree(MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


@contextmanager
def picking(plan, model, ports):
    """The port of a picker before ranks on these ports of this machine."""
    port, addresses = free_port(), [f"localhost:{port}" for port in ports]
    with listening(port, *PICKER, *addresses, "--plan", plan[0], "--tokenizer", model, "--port", port):
        yield port


@contextmanager
def envoy(folder, listen, configuration):
    (folder / "envoy.json").write_text(json.dumps(configuration))
    with listening(listen, ENVOY, "-c", folder / "envoy.json", "--concurrency", 1, "--use-dynamic-base-id"):
        yield


@pytest.fixture(scope="module")
def site(plan, model, tmp_path_factory):
    """(port of Envoy, port of the picker, the ranks)."""
    folder, listen = tmp_path_factory.mktemp("envoy"), free_port()
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank()) for _ in range(2)]
        ports = [server.server_port for server in ranks]
        picker = stack.enter_context(picking(plan, model, ports))
        stack.enter_context(envoy(folder, listen, gateway(listen, picker, ports)))
        yield listen, picker, ranks


def deployed(listen, picker, ports):
    """The configuration of `deploy/`, but for its ports."""
    found = yaml.safe_load(DEPLOYED.read_text())
    assert [one["address"] for one in found["static_resources"]["listeners"]] == [
        {"socket_address": {"address": "127.0.0.1", "port_value": 8080}}
    ]
    found["static_resources"]["listeners"][0]["address"]["socket_address"]["port_value"] = listen
    for cluster, wanted in zip(found["static_resources"]["clusters"], (ports, [picker]), strict=True):
        given = cluster["load_assignment"]
        assert given == endpoints(cluster["name"], [{"ranks": 30000, "picker": 9002}[cluster["name"]]])
        cluster["load_assignment"] = endpoints(cluster["name"], wanted)
    return found


@pytest.fixture(scope="module", params=[1, 2])
def machine(request, plan, model, tmp_path_factory):
    """(port of Envoy, the servers): one of both ranks, or one per rank, by the configuration of `deploy/`."""
    folder, listen = tmp_path_factory.mktemp("machine"), free_port()
    with ExitStack() as stack:
        servers = [stack.enter_context(rank()) for _ in range(request.param)]
        ports = [server.server_port for server in servers]
        picker = stack.enter_context(picking(plan, model, ports))
        stack.enter_context(envoy(folder, listen, deployed(listen, picker, ports)))
        yield listen, servers


class Sent:
    """A request through the gateway, of which the first event has come."""

    def __init__(self, port, path, body=None, **headers):
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        if body is None:
            self._connection.request("GET", path, headers=headers)
        else:
            data = body if isinstance(body, bytes) else json.dumps(body)
            self._connection.request("POST", path, data, {"Content-Type": "application/json", **headers})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.seen = json.loads(self._answer.readline().removeprefix(b"data: "))

    def end(self):
        rest = self._answer.read()
        self._connection.close()
        assert rest.endswith(b"data: [DONE]\n\n")
        return self.seen

    def hang_up(self):
        self._answer.close()
        self._connection.close()


def completion(port, prompt, **headers):
    return Sent(port, "/v1/completions", {"model": "m", "prompt": prompt}, **headers)


@contextmanager
def held(servers):
    """Answers do not end within the block."""
    for server in servers:
        server.go_on.clear()
    try:
        yield
    finally:
        for server in servers:
            server.go_on.set()


def test_requests_go_to_the_rank_that_the_plan_prefers(site, plan):
    listen, _, ranks = site
    scorer, ports = Scorer(plan[0]), [server.server_port for server in ranks]
    best = [int(scorer(prompt)[0][0]) for prompt in plan[1]]
    assert sorted(set(best)) == [0, 1]
    seen = [completion(listen, prompt).end() for prompt in plan[1]]
    assert [one["port"] for one in seen] == [ports[rank] for rank in best]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    assert {one["picked"] for one in seen} == {",".join(addresses), ",".join(reversed(addresses))}
    assert {one["rank"] for one in seen} == {None}


SYSTEM = "Be brief."
BODIES = {
    "/v1/chat/completions": lambda text: {
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": text}]
    },
    "/v1/responses": lambda text: {"instructions": SYSTEM, "input": [{"role": "user", "content": text}]},
    "/v1/messages?beta=true": lambda text: {
        "system": [{"type": "text", "text": SYSTEM, "cache_control": {"type": "ephemeral"}}],
        "messages": [{"role": "user", "content": [{"type": "text", "text": text}]}],
    },
}


@pytest.mark.parametrize("path", BODIES)
def test_conversations_go_by_their_text(site, plan, path):
    listen, _, ranks = site
    tokenizer, scorer = load_tokenizer(str(MODEL)), Scorer(plan[0])
    texts = [tokenizer.decode(prompt) for prompt in plan[1]]
    rendered = [f"system: {SYSTEM}\nuser: {text}\n" for text in texts]
    best = [int(scorer(tokenizer(text, add_special_tokens=False).input_ids)[0][0]) for text in rendered]
    assert sorted(set(best)) == [0, 1]
    seen = [Sent(listen, path, BODIES[path](text)).end() for text in texts]
    assert [one["port"] for one in seen] == [ranks[one].server_port for one in best]
    assert {one["path"] for one in seen} == {path}


def test_a_long_conversation_arrives_whole(site, plan):
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    assert json.loads(Sent(site[0], "/v1/chat/completions", body).end()["body"]) == body


def test_what_is_longer_than_is_read_arrives_whole_and_goes_by_load(site, plan):
    listen, _, ranks = site
    prompt = next(prompt for prompt in plan[1] if int(Scorer(plan[0])(prompt)[0][0]) == 0)
    body = {"prompt": prompt, "padding": "x" * (9 << 20)}
    with held(ranks):
        busy = completion(listen, prompt)
        sent = Sent(listen, "/v1/completions", body)
    assert busy.end()["port"] == ranks[0].server_port
    seen = sent.end()
    assert seen["port"] == ranks[1].server_port
    assert json.loads(seen["body"]) == body


BROKEN = {
    "no JSON": b"{not json",
    "no text": bytes(range(128, 256)),
    "no object": b"[1]",
    "nested": b"[" * 200_000,
    "half a character": json.dumps({"prompt": "\ud800"}).encode(),
    "a large number": b'{"prompt": [1%s]}' % (b"0" * 5000),
    "no conversation": json.dumps({"messages": [{"role": 1, "content": {"a": 1}}], "tools": 7}).encode(),
    "empty": b"",
}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_body_goes_by_load_and_the_picker_goes_on(site, plan, path, kind):
    listen, _, ranks = site
    prompt = next(prompt for prompt in plan[1] if int(Scorer(plan[0])(prompt)[0][0]) == 0)
    with held(ranks):
        busy = completion(listen, prompt)
        sent = Sent(listen, path, BROKEN[kind])
    assert busy.end()["port"] == ranks[0].server_port
    seen = sent.end()
    assert seen["body"] == BROKEN[kind].decode(errors="replace")
    if kind != "no conversation":
        assert seen["port"] == ranks[1].server_port


def test_other_paths_go_by_load(site, plan):
    listen, _, ranks = site
    prompt = next(prompt for prompt in plan[1] if int(Scorer(plan[0])(prompt)[0][0]) == 0)
    with held(ranks):
        busy = completion(listen, prompt)
        sent = [
            Sent(listen, "/v1/models"),
            Sent(listen, "/v1/embeddings", {"input": prompt}),
            Sent(listen, "/v1/models", **{"X-Name": "Gr\u00f6\u00dfe"}),
        ]
    assert busy.end()["port"] == ranks[0].server_port
    assert [one.end()["port"] for one in sent] == [ranks[rank].server_port for rank in (1, 0, 1)]


def test_a_rank_that_runs_ahead_is_passed_over(site, plan):
    """Requests that run on the plan's rank raise its price, until the other rank is chosen.

    They are as long as the longest that the picker has seen.
    """
    listen, _, ranks = site
    ports = [server.server_port for server in ranks]
    best = int(Scorer(plan[0])(plan[1][0])[0][0])
    prompt = plan[1][0] * 500  # an id counts once for the plan
    with held(ranks):
        sent = [completion(listen, prompt) for _ in range(8)]
    went = [one.end()["port"] for one in sent]
    assert went[0] == ports[best]
    assert 4 <= went.count(ports[best]) < 8
    eventually(lambda: completion(listen, prompt).end()["port"] == ports[best])  # those that ended count no more


def test_the_picker_keeps_to_the_addresses_that_a_gateway_can_reach(site, plan):
    from envoy.service.ext_proc.v3 import external_processor_pb2 as messages
    from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    _, picker, ranks = site
    addresses = [f"127.0.0.1:{server.server_port}" for server in ranks]
    best = int(Scorer(plan[0])(plan[1][0])[0][0])

    def ask(channel, allowed):
        head = messages.ProcessingRequest()
        head.request_headers.headers.headers.add(key=":path", raw_value=b"/v1/completions")
        hint = {"x-gateway-destination-endpoint-subset": allowed}
        head.metadata_context.filter_metadata["envoy.lb.subset_hint"].update(hint)
        body = messages.ProcessingRequest()
        body.request_body.body, body.request_body.end_of_stream = json.dumps({"prompt": plan[1][0]}).encode(), True
        return next(ExternalProcessorStub(channel).Process(iter([head, body])))

    with grpc.insecure_channel(f"127.0.0.1:{picker}") as channel:
        only = ask(channel, [addresses[1 - best]])
        (header,) = only.request_headers.response.header_mutation.set_headers
        assert header.header.raw_value.decode() == addresses[1 - best]
        assert only.dynamic_metadata["envoy.lb"][PICKED] == addresses[1 - best]
        assert ask(channel, ["10.9.9.9:1"]).immediate_response.status.code == 503
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            told = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert told.status == health_pb2.HealthCheckResponse.SERVING


def where(seen, servers):
    """The rank to which a request went."""
    return int(seen["rank"]) if len(servers) == 1 else [server.server_port for server in servers].index(seen["port"])


def test_the_configuration_of_one_machine_sends_requests_where_the_plan_has_them(machine, plan):
    listen, servers = machine
    best = [int(Scorer(plan[0])(prompt)[0][0]) for prompt in plan[1]]
    seen = [completion(listen, prompt).end() for prompt in plan[1]]
    assert [where(one, servers) for one in seen] == best
    assert {one["rank"] is None for one in seen} == {len(servers) == 2}
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    assert json.loads(Sent(listen, "/v1/chat/completions", body).end()["body"]) == body
    assert Sent(listen, "/v1/models").end()["path"] == "/v1/models"


def test_on_one_machine_a_request_counts_until_its_answer_ends_or_its_client_is_gone(machine, plan):
    """Answers bypass the picker, which sees when they end. Prompts are as long as the longest that it has seen."""
    listen, servers = machine
    prompt = plan[1][0] * 500  # an id counts once for the plan
    best = int(Scorer(plan[0])(plan[1][0])[0][0])
    with held(servers):
        sent = {best: [], 1 - best: []}
        for _ in range(10):
            one = completion(listen, prompt)
            sent[where(one.seen, servers)].append(one)
        assert len(sent[best]) >= len(sent[1 - best]) > 0
        for one in sent[best]:
            one.hang_up()
        eventually(lambda: where(completion(listen, prompt).seen, servers) == best)
    for one in sent[1 - best]:
        one.end()


def test_a_request_keeps_the_rank_that_it_names(machine, plan):
    listen, servers = machine
    best = int(Scorer(plan[0])(plan[1][0])[0][0])
    assert where(completion(listen, plan[1][0], **{NAMED: str(1 - best)}).end(), servers) == 1 - best
    for other in ("2", "-1", "a"):
        assert where(completion(listen, plan[1][0], **{NAMED: other}).end(), servers) == best


def refused(*words):
    """The line with which the command ends."""
    done = CliRunner().invoke(app, ["picker", *map(str, words)])
    lines = done.stderr.strip().splitlines()
    assert (done.exit_code, len(lines)) == (2, 1), done.stderr
    return lines[0]


def test_mistakes_end_in_a_line(plan, site, tmp_path):
    options = ["--plan", plan[0], "--tokenizer", MODEL]
    words = "the plan has 2 data-parallel ranks, and 3 addresses came: give one for each, or a single server"
    assert words in refused("localhost:1", "localhost:2", "localhost:3", *options)
    assert "an address is given twice" in refused("localhost:1", "127.0.0.1:1", *options)
    for wrong in ("localhost", "http://localhost:1", ":8000", "localhost:0", "localhost:65536", "localhost:x"):
        assert f"'{wrong}' is not an address: give HOST:PORT" in refused(wrong, *options)
    assert "the host of nowhere.invalid:1 is not known" in refused("nowhere.invalid:1", *options)
    trace = synthetic.planted_trace(2, 1, requests_per_group=40)[0]
    save_plan(solve(trace, Topology(ep_size=2, dp_size=2)), tmp_path / "other")
    other = ["--plan", tmp_path / "other", "--tokenizer", MODEL]
    assert "this plan was made for another tokenizer" in refused("localhost:1", *other)
    save_plan(solve(trace, Topology(ep_size=2)), tmp_path / "tp")
    tp = ["--plan", tmp_path / "tp", "--tokenizer", MODEL]
    assert "this plan schedules no requests: solve one with --attention dp or hybrid" in refused("localhost:1", *tp)


def test_a_port_in_use_is_told_in_one_line(plan, site):
    words = [*PICKER, "localhost:1", "--plan", plan[0], "--tokenizer", MODEL, "--port", site[1]]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: cannot listen on 127.0.0.1:{site[1]}: give another --host or --port\n"


def test_it_says_where_it_listens_warns_of_an_open_address_and_ends_when_told(plan):
    words = [*PICKER, "localhost:7", "--plan", plan[0], "--tokenizer", MODEL, "--host", "0.0.0.0", "--port", 0]
    with subprocess.Popen([*map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        line = process.stdout.readline()
        ranks = r"2 ranks \(by header, at localhost:7; plan of semmoe\)"
        assert re.fullmatch(rf"0\.0\.0\.0:[1-9]\d* picks among {ranks}\n", line), line
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert "0.0.0.0 is open to others, and the picker has no authentication" in process.stderr.read()


class Stream:
    """A stream of a gateway's messages, which its test sends, and the answers."""

    def __init__(self, picker):
        self.answers, self._messages = [], asyncio.Queue()
        self._task = asyncio.create_task(picker.Process(self._sent(), self))

    async def _sent(self):
        while (message := await self._messages.get()) is not None:
            yield message

    async def write(self, answer):
        self.answers.append(answer)

    async def send(self, *messages):
        for message in messages:
            self._messages.put_nowait(message)
        for _ in range(10):
            await asyncio.sleep(0)

    async def end(self):
        self._messages.put_nowait(None)
        await self._task

    async def cancel(self):
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


def head(path):
    from envoy.service.ext_proc.v3 import external_processor_pb2 as messages

    message = messages.ProcessingRequest()
    message.request_headers.headers.headers.add(key=":path", raw_value=path)
    return message


def part(data, last=False):
    from envoy.service.ext_proc.v3 import external_processor_pb2 as messages

    return messages.ProcessingRequest(request_body={"body": data, "end_of_stream": last})


def test_bodies_are_held_up_to_bounds_and_nothing_is_left_of_them(plan, monkeypatch):
    from semmoe.gateway import Ranks, picker

    monkeypatch.setattr(picker, "MAX_BODY", 4 * picker.MESSAGE_BYTES)
    monkeypatch.setattr(picker, "MAX_HELD", 6 * picker.MESSAGE_BYTES)
    ranks = Ranks(load_plan(plan[0]))
    made = picker.Picker(ranks, None, ["10.0.0.1:1", "10.0.0.2:1"])

    async def scene():
        first, second, third = Stream(made), Stream(made), Stream(made)
        for stream in (first, second, third):
            await stream.send(head(b"/v1/completions"))
        await first.send(part(b"{"), part(b"{"), part(b"{"))  # many small parts count with their messages
        assert (first.answers, ranks.running.total()) == ([], 0)
        await second.send(part(bytes(2 * picker.MESSAGE_BYTES)), part(b""))  # all together are too long now
        await asyncio.sleep(0.05)
        assert len(second.answers) == 3
        assert [ranks.running[0], ranks.running[1]] == [1, 0]
        await third.send(part(bytes(4 * picker.MESSAGE_BYTES)))  # longer than one may be
        await asyncio.sleep(0.05)
        assert len(third.answers) == 2
        assert [ranks.running[0], ranks.running[1]] == [1, 1]
        await first.cancel()
        await second.end()
        await third.cancel()

    asyncio.run(scene())
    assert ranks.running.total() == 0
    assert made._held == 0
