"""How servers are asked: headers and certificates of a gateway, answers that are no metrics, and secrets."""

import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from test_swap_command import folder  # noqa: F401  a fixture
from typer.testing import CliRunner

from semmoe.cli import app
from semmoe.live import http, watch
from semmoe.live.adapt import Adapter
from semmoe.live.http import make_client

SECRET = "sesame-0123456789"
PAGE = b"""# TYPE vllm:lora_requests_info gauge
vllm:lora_requests_info{max_lora="4",names="a/\\"x\\",b\\\\c",waiting="line\\nbreak"} 1.7e+09
# TYPE sglang:gen_throughput gauge
sglang:gen_throughput{model_name="na\xc3\xafve"} NaN
# TYPE semmoe_active gauge
semmoe_active{engine="sglang",method="semmoe"} 2
# TYPE semmoe_pairs_total counter
semmoe_pairs_total{ep_rank="0",local="true"} 5
"""
# Of localhost, signed by itself in 2026, for a hundred years; the key is of no use elsewhere.
PEM = """-----BEGIN CERTIFICATE-----
MIIBmzCCAUGgAwIBAgIUTb4K6S3SqzzGdV92uZRngJgpjTAwCgYIKoZIzj0EAwIw
FDESMBAGA1UEAwwJbG9jYWxob3N0MCAXDTI2MTEyOTE5NDAyN1oYDzIxMjYxMTA1
MTk0MDI3WjAUMRIwEAYDVQQDDAlsb2NhbGhvc3QwWTATBgcqhkjOPQIBBggqhkjO
PQMBBwNCAATm+IQy0ZQyIi86GyViclizBqnGMPUh1duYNmMJkC+DzxnsUTRvGiqx
B1IGa9NyZQO/FkrTk4/x4XdKb27rCRPEo28wbTAdBgNVHQ4EFgQUfz8oBHW0FErv
UrTuix53ha1kbCMwHwYDVR0jBBgwFoAUfz8oBHW0FErvUrTuix53ha1kbCMwDwYD
VR0TAQH/BAUwAwEB/zAaBgNVHREEEzARgglsb2NhbGhvc3SHBH8AAAEwCgYIKoZI
zj0EAwIDSAAwRQIhAL5UBHVUEqTwxDElxU7XexWE6eBaUNkolYBTtYWTFimuAiBB
6Golpd9KOeOA6S8/EtDseZVdyKfqGSqDgJkvfPpASQ==
-----END CERTIFICATE-----
-----BEGIN PRIVATE KEY-----
MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQg1rPxwHTgK81tW6xS
AZ4MKMQfW1RDJl8lTa5G+i3ra6ahRANCAATm+IQy0ZQyIi86GyViclizBqnGMPUh
1duYNmMJkC+DzxnsUTRvGiqxB1IGa9NyZQO/FkrTk4/x4XdKb27rCRPE
-----END PRIVATE KEY-----
"""


class Gateway:
    """A server that answers each path with a status, headers and a body, and keeps the requests."""

    def __init__(self, answers, key=None, pem=None):
        self.requests = []
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                gateway.requests.append((self.path, dict(self.headers)))
                status, headers, body = answers.get(self.path, (404, {}, b""))
                if key is not None and self.headers.get("X-Key") != key:
                    status, headers, body = 401, {}, b""
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

            def do_POST(self):
                self.rfile.read(int(self.headers["Content-Length"]))
                gateway.requests.append((self.path, dict(self.headers)))
                self.send_response(403)
                self.end_headers()
                self.wfile.write(json.dumps({"detail": f"no right for {self.headers.get('X-Key')}"}).encode())

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        if pem is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(pem)
            self.server.socket = context.wrap_socket(self.server.socket, server_side=True)
        self.url = f"http{'s' if pem else ''}://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()


@pytest.fixture
def gateway():
    """Starts servers, which end with the test."""
    started = []

    def start(*arguments, **more):
        started.append(Gateway(*arguments, **more))
        return started[-1]

    yield start
    for one in started:
        one.server.shutdown()
        one.server.server_close()


def metrics(body, status=200, **headers):
    return {"/metrics": (status, headers, body)}


def run(*words):
    return CliRunner().invoke(app, [*map(str, words)])


def refused(*words):
    """The one line on stderr of a command that ends with exit code 2."""
    result = run(*words)
    assert (result.exit_code, len(result.stderr.strip().splitlines())) == (2, 1), result.output
    assert SECRET not in result.output
    return result.stderr


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (PAGE + b'vllm:broken{a="b} 1\n', "line 9 of the metrics of {url} cannot be read: 'vllm:broken{{a=\"b}} 1'"),
        (PAGE + b'vllm:broken{a="b} 1', "line 9 of the metrics of {url} cannot be read"),
        (b"a 1\nb\x00 2\n" + PAGE, "line 2 of the metrics of {url} cannot be read: 'b\\x00 2'"),
        (b"<!doctype html>\n<p>Sign in", "line 1 of the metrics of {url} cannot be read: '<!doctype html>'"),
        (b"other_total 3\n", "{url} has metrics, but none of semmoe's"),
    ],
)
def test_a_page_that_cannot_be_read_is_named_with_its_line(page, words, gateway):
    server = gateway(metrics(page))
    assert words.format(url=server.url) in refused("watch", server.url, "--once").replace("\n", "")
    with pytest.raises(ValueError, match="metrics"):
        watch.look([server.url], 0.0)


def test_odd_labels_and_values_are_read(gateway):
    """Quotes, backslashes, line ends and other letters in labels, bytes that are no text, NaN, and exponents."""
    seen = watch.look([gateway(metrics(PAGE + b'x{a="\xff"} 1\n')).url], 0.0)
    assert sorted(name for name, _ in seen.totals) == ["active", "pairs"]


def test_a_page_without_end_is_bounded(gateway, monkeypatch):
    monkeypatch.setattr(http, "MAX_ANSWER_BYTES", 1 << 20)
    server = gateway(metrics(PAGE + b"# " + b"x" * (1 << 20)))
    assert "the answer has more than 1 MB" in refused("watch", server.url, "--once")


def test_a_redirect_is_named_and_not_followed(gateway):
    """Another server must not get the headers."""
    other = gateway(metrics(PAGE))
    server = gateway(metrics(b"", 302, Location=f"{other.url}/metrics"))
    line = refused("watch", server.url, "--once", "--header", f"X-Key: {SECRET}")
    assert f"302 Found, a redirect to {other.url}/metrics: give that address" in line
    assert other.requests == []


def look_and_stop(loop):
    loop.server.look()
    raise KeyboardInterrupt


@pytest.mark.parametrize("command", ["watch", "swap", "adapt"])
def test_every_command_sends_the_headers_and_the_key(command, gateway, folder, monkeypatch):  # noqa: F811
    server = gateway(metrics(PAGE), key=SECRET)
    words = [command, server.url, "--control", folder / "control"]
    words += ["--plan", folder / "new"] if command == "swap" else []
    if command == "watch":
        words = [command, server.url, "--once", "--window", "0.1", "--every", "0.1"]
    assert "gives no metrics: 401 Unauthorized" in refused(*words)
    monkeypatch.setenv("SERVER_API_KEY", "own-key")
    monkeypatch.setattr(Adapter, "turn", look_and_stop)
    result = run(*words, "--header", f"X-Key: {SECRET}", "--header", "X-Tenant: a:b", "--json")
    assert SECRET not in result.output
    assert (result.exit_code, "no right for ..." in result.output) == {
        "watch": (0, False), "swap": (1, True), "adapt": (130, False)
    }[command]  # fmt: skip
    sent = server.requests[-1][1]
    assert (sent["X-Key"], sent["X-Tenant"], sent["Authorization"]) == (SECRET, "a:b", "Bearer own-key")
    log = folder / "control" / "adapt.jsonl"
    assert not log.exists() or SECRET not in log.read_text()


@pytest.mark.parametrize(
    "header",
    [SECRET, f": {SECRET}", f"X Key: {SECRET}", f"X-Key: {SECRET}\r\nX-Other: 1", f"X-Key: {SECRET}\n",
     f"X-Key: {SECRET}\u00e9", f"Content-Length: {SECRET}", f"X-Ke\u00fd: {SECRET}"],
)  # fmt: skip
def test_a_header_that_cannot_be_sent_is_refused_before_any_request(header, gateway, folder):  # noqa: F811
    server = gateway(metrics(PAGE))
    for words in (["watch"], ["swap", "--plan", folder / "new"], ["adapt", "--control", folder / "control"]):
        assert "header" in refused(*words, server.url, "--header", header)
    assert server.requests == []


def test_a_key_that_cannot_be_sent_is_not_shown(gateway, folder, monkeypatch):  # noqa: F811
    server = gateway(metrics(PAGE))
    monkeypatch.setenv("SERVER_API_KEY", f"{SECRET}\n")
    assert "the value of header Authorization must be" in refused("swap", server.url, "--plan", folder / "new")
    assert server.requests == []


def test_headers_are_read_from_a_file(gateway, tmp_path):
    """The command line of a process is seen by other users of the machine, a file is not."""
    server = gateway(metrics(PAGE), key=SECRET)
    (tmp_path / "headers").write_text(f"X-Key: {SECRET}\nX-Tenant: a:b\n")
    words = ["watch", server.url, "--once", "--window", "0.1", "--every", "0.1"]
    result = run(*words, "--header", f"@{tmp_path}/headers", "--header", "X-Other: 1")
    assert (result.exit_code, SECRET in result.output) == (0, False)
    sent = server.requests[-1][1]
    assert (sent["X-Key"], sent["X-Tenant"], sent["X-Other"]) == (SECRET, "a:b", "1")
    assert "absent is missing" in refused(*words, "--header", "@absent")


def test_headers_are_not_shown_with_the_client():
    made = make_client([f"X-Key: {SECRET}"])
    assert (SECRET in repr(made), made.headers) == (False, {"x-key": SECRET})
    assert make_client(["Authorization: Basic x"], key="k").headers == {"authorization": "Basic x"}


def test_an_address_with_a_password_is_refused_without_it():
    assert "holds no user or password" in refused("watch", f"http://me:{SECRET}@127.0.0.1:9", "--once")


def test_a_server_behind_another_authority_is_asked_by_its_certificate(gateway, tmp_path, monkeypatch):
    pem = tmp_path / "authority.pem"
    pem.write_text(PEM)
    server = gateway(metrics(PAGE), pem=pem)
    words = ("watch", server.url, "--once", "--window", "0.1", "--every", "0.1")
    assert "CERTIFICATE_VERIFY_FAILED" in refused(*words)
    monkeypatch.setenv("SSL_CERT_FILE", str(pem))  # which OpenSSL reads
    assert run(*words, "--json").exit_code == 0
    assert watch.look([server.url], 0.0).totals
