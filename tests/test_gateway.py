"""The example's endpoint picker behind a real Envoy, asked as inference gateways ask one: `make test-clusters`."""

import json
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
from ports import free_port, listening
from waiting import eventually

from semmoe.demo import MODEL
from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash
from semmoe.plan import save_plan
from semmoe.router import Scorer
from semmoe.solver import solve
from semmoe.topology import Topology

grpc = pytest.importorskip("grpc", reason="in an environment of its own: make test-clusters")
pytest.importorskip("envoy.service.ext_proc.v3", reason="in an environment of its own: make test-clusters")
pytestmark = pytest.mark.slow

PICKER = Path(__file__).parents[1] / "examples" / "endpoint_picker.py"
ENVOY = Path(sys.executable).with_name("envoy")
LONG = "tell me of rivers. " * 16_000  # many of Envoy's chunks


class Rank(BaseHTTPRequestHandler):
    """Says which address it is, and what it was sent, in two events; the second when it is allowed to."""

    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(b"".join(self._chunks()))
        seen = {"port": self.server.server_port, "body": body, "picked": self.headers.get(HEADER)}
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event(json.dumps(seen))
        self.server.go_on.wait(30)
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")

    def _chunks(self):
        """Envoy, whose picker might have changed the length, sends none."""
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


HEADER = "x-gateway-destination-endpoint"


@contextmanager
def rank():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Rank)
    server.go_on = threading.Event()
    server.go_on.set()
    threading.Thread(target=server.serve_forever, daemon=True).start()
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
        override_host_sources=[{"header": HEADER}], fallback_policy={"policies": [{"typed_extension_config": turns}]},
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
def site(plan, tmp_path_factory):
    """(port of Envoy, port of the picker, the ranks)."""
    folder, picker, listen = tmp_path_factory.mktemp("envoy"), free_port(), free_port()
    with ExitStack() as stack:
        ranks = [stack.enter_context(rank()) for _ in range(2)]
        ports = [server.server_port for server in ranks]
        words = [sys.executable, PICKER, plan[0], MODEL, *(f"localhost:{port}" for port in ports)]
        stack.enter_context(listening(picker, *words, "--listen", f"127.0.0.1:{picker}"))
        (folder / "envoy.json").write_text(json.dumps(gateway(listen, picker, ports)))
        stack.enter_context(
            listening(listen, ENVOY, "-c", folder / "envoy.json", "--concurrency", 1, "--use-dynamic-base-id")
        )
        yield listen, picker, ranks


class Sent:
    """A request through the gateway, of which the first event has come."""

    def __init__(self, port, path, body):
        self._connection = HTTPConnection("127.0.0.1", port, timeout=60)
        self._connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        self._answer = self._connection.getresponse()
        assert self._answer.status == 200, self._answer.read()
        self.seen = json.loads(self._answer.readline().removeprefix(b"data: "))

    def end(self):
        rest = self._answer.read()
        self._connection.close()
        assert rest.endswith(b"data: [DONE]\n\n")
        return self.seen


def completion(port, prompt, **more):
    return Sent(port, "/v1/completions", {"model": "m", "prompt": prompt, **more})


def test_requests_go_to_the_rank_that_the_plan_prefers(site, plan):
    listen, _, ranks = site
    scorer, ports = Scorer(plan[0]), [server.server_port for server in ranks]
    best = [int(scorer(prompt)[0][0]) for prompt in plan[1]]
    assert sorted(set(best)) == [0, 1]
    seen = [completion(listen, prompt).end() for prompt in plan[1]]
    assert [one["port"] for one in seen] == [ports[rank] for rank in best]
    addresses = [f"127.0.0.1:{port}" for port in ports]
    assert {one["picked"] for one in seen} == {",".join(addresses), ",".join(reversed(addresses))}


def test_a_long_conversation_arrives_whole(site, plan):
    body = {"model": "m", "messages": [{"role": "user", "content": LONG}]}
    assert Sent(site[0], "/v1/chat/completions", body).end()["body"] == body


def test_a_rank_that_runs_ahead_is_passed_over(site, plan):
    """Four on one rank and none on the other are two above the mean: a fifth still goes there, a sixth does not."""
    listen, _, ranks = site
    ports, prompt = [server.server_port for server in ranks], plan[1][0]
    best = int(Scorer(plan[0])(prompt)[0][0])
    for server in ranks:
        server.go_on.clear()
    try:
        sent = [completion(listen, prompt) for _ in range(8)]
    finally:
        for server in ranks:
            server.go_on.set()
    went = [one.end()["port"] for one in sent]
    assert went[:5] == 5 * [ports[best]]
    assert went[5] == ports[1 - best]
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
        assert only.dynamic_metadata["envoy.lb"][HEADER] == addresses[1 - best]
        assert ask(channel, ["10.9.9.9:1"]).immediate_response.status.code == 503
        health = health_pb2_grpc.HealthStub(channel)
        for service in ("liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
            told = health.Check(health_pb2.HealthCheckRequest(service=service))
            assert told.status == health_pb2.HealthCheckResponse.SERVING


def test_a_wrong_number_of_addresses_ends_in_a_line(plan):
    words = [sys.executable, PICKER, plan[0], MODEL, "localhost:1"]
    done = subprocess.run([*map(str, words)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "the plan has 2 data-parallel ranks, and 1 addresses came" in done.stderr
