"""What `semmoe router` adds to a request, beside a bare proxy that does nothing but forward (Starlette and httpx).

    python benchmarks/bench_router.py [--clients 1 16 64] [--requests 1024] [--rounds 5] [--delay-ms 20] [--tokens 256]

One backend, which is no engine: a real uvicorn server that answers every completion with the same bytes after a fixed
time. Backend, proxies and client are processes of their own. The router tokenises each prompt (text of `--tokens`
tokens), schedules it over 8 ranks by scores and prefix affinity, and counts; the bare proxy does none of that. Rounds
are interleaved, direct, bare, router, in turning order; figures are medians over rounds. Prints configuration, bound, a
table and one JSON line.

`added` is latency beyond that of the direct connection at the same percentile and round; CPU is of the proxy's process.
"""

import argparse
import asyncio
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from semmoe.demo import MODEL
from semmoe.tokens.slices import ByPosition

RANKS = 8
ANSWER = json.dumps({"object": "text_completion", "choices": [{"index": 0, "text": " fixed" * 32}]}).encode()
KEEP = 1024  # connections that the bare proxy keeps
COLUMNS = ("direct", "bare", "router")


def backend(delay: float) -> Callable:
    """A stand-in for an engine: the same answer after `delay` seconds."""
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(ANSWER))]

    async def application(scope: dict, receive: Callable, send: Callable) -> None:
        while (await receive()).get("more_body"):
            pass
        if scope["path"] != "/health":
            await asyncio.sleep(delay)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": ANSWER})

    return application


def bare_proxy(url: str) -> Any:
    """The least that Starlette and httpx need to forward a request and stream its answer."""
    import httpx
    from starlette.applications import Starlette
    from starlette.background import BackgroundTask
    from starlette.requests import Request
    from starlette.responses import StreamingResponse
    from starlette.routing import Route

    limits = httpx.Limits(max_connections=KEEP, max_keepalive_connections=KEEP)
    client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)

    async def forward(request: Request) -> StreamingResponse:
        headers = [(name, value) for name, value in request.headers.raw if name != b"host"]
        sent = client.build_request(request.method, request.url.path, headers=headers, content=await request.body())
        answer = await client.send(sent, stream=True)
        return StreamingResponse(
            answer.aiter_raw(), answer.status_code, dict(answer.headers), background=BackgroundTask(answer.aclose)
        )

    return Starlette(routes=[Route("/{path:path}", forward, methods=["GET", "POST"])])


def serve(application: Any) -> None:
    """On any free port, which is printed as `semmoe router` does."""
    import uvicorn

    from semmoe.router.server import listen

    listener = listen("127.0.0.1", 0)
    print(f"http://127.0.0.1:{listener.getsockname()[1]} -> here", flush=True)
    config = uvicorn.Config(application, log_level="error", access_log=False, lifespan="off", timeout_keep_alive=75)
    uvicorn.Server(config).run(sockets=[listener])


async def load(port: int, bodies: list[bytes], clients: int, requests: int) -> dict[str, Any]:
    """So many clients, each with a connection of its own and one request at a time."""
    latencies: list[float] = []
    left = iter(range(requests))

    async def client() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for i in left:
            body, begin = bodies[i % len(bodies)], time.perf_counter()
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head, re.IGNORECASE)
            if not head.startswith(b"HTTP/1.1 200") or length is None:
                raise RuntimeError(f"an answer that should not be: {head[:200]!r}")
            await reader.readexactly(int(length[1]))
            latencies.append(time.perf_counter() - begin)
        writer.close()

    begin = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    seconds = time.perf_counter() - begin
    p50, p99 = np.percentile(np.array(latencies) * 1e3, [50, 99])
    return {"p50_ms": float(p50), "p99_ms": float(p99), "requests_per_second": requests / seconds}


def make_bodies(tokens: int, count: int) -> list[bytes]:
    """Completion requests of held-out text, each of about `tokens` tokens."""
    from semmoe.engines.transformers.tokenizer import load_tokenizer
    from semmoe.texts import held_out_prompts

    tokenizer = load_tokenizer(str(MODEL))
    ids = [token for _, _, text in held_out_prompts(per_domain=64) for token in tokenizer.encode(text)]
    starts = np.linspace(0, len(ids) - tokens - 1, count).astype(int)
    texts = [tokenizer.decode(ids[start : start + tokens]) for start in starts]
    return [json.dumps({"model": "m", "prompt": text, "max_tokens": 32}).encode() for text in texts]


def write_plan(path: Path) -> None:
    """Random scores: what they are costs no time."""
    from semmoe.core import Plan
    from semmoe.engines.transformers.tokenizer import load_tokenizer, tokenizer_hash
    from semmoe.placement.linear import place
    from semmoe.plan import save_plan
    from semmoe.requests.policy import PromptScores
    from semmoe.topology import Fingerprint, Topology

    tokenizer = load_tokenizer(str(MODEL))
    rng, rows, zeros = np.random.default_rng(0), len(tokenizer) + 1, np.zeros(RANKS, np.float32)
    scores = rng.normal(scale=0.02, size=(rows, RANKS)).astype(np.float32)
    requests = PromptScores(token_scores=scores, token_weights=np.ones(rows, np.float32), bias=zeros, prices=zeros,
                          score_spread=0.02, mean_length=32.0)  # fmt: skip
    identity = Fingerprint(model="m", architecture_hash="", tokenizer_hash=tokenizer_hash(tokenizer),
                           vocab_size=rows - 1, num_layers=1, num_experts=RANKS, top_k=2)  # fmt: skip
    plan = Plan(topology=Topology(ep_size=RANKS, dp_size=RANKS), placement=place(1, RANKS, RANKS),
                tokens=ByPosition(), requests=requests, fingerprint=identity, method="random")  # fmt: skip
    save_plan(plan, path)


class Process:
    """A server of this benchmark; ends with the block."""

    def __init__(self, stack: ExitStack, words: list[str]) -> None:
        found = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, text=True)
        self._process = stack.enter_context(found)
        stack.callback(self._process.terminate)
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"{words} did not start")
        self.url = line.split()[0]
        self.port = int(self.url.rsplit(":", 1)[1])

    def cpu_seconds(self) -> float:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def ask(process: Process, bodies: Path, clients: int, requests: int) -> dict[str, float]:
    """One run of the client, in a process of its own."""
    before = process.cpu_seconds()
    words = [__file__, "--role", "client", str(process.port), str(bodies), str(clients), str(requests)]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    return {**found, "cpu_us": (process.cpu_seconds() - before) / requests * 1e6}


def measure(settings: argparse.Namespace, servers: dict[str, Process], bodies: Path) -> list[dict[str, Any]]:
    rows = []
    for clients in settings.clients:
        requests = min(settings.requests, settings.requests * clients // 8) // clients * clients or clients
        rounds: dict[str, list[dict[str, float]]] = {name: [] for name in COLUMNS}
        for i in range(-1, settings.rounds):  # the first warms up
            for j in range(len(COLUMNS)):
                name = COLUMNS[(i + j) % len(COLUMNS)]
                found = ask(servers[name], bodies, clients, requests)
                if i >= 0:
                    rounds[name].append(found)
        rows.append({"clients": clients, "requests": requests, **summary(rounds)})
    return rows


def summary(rounds: dict[str, list[dict[str, float]]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name in COLUMNS:
        out[name] = {key: median(one[key] for one in rounds[name]) for key in rounds[name][0]}
        for key in ("p50_ms", "p99_ms"):
            pairs = zip(rounds[name], rounds["direct"], strict=True)
            out[name][f"added_{key}"] = median(one[key] - direct[key] for one, direct in pairs)
    pairs = list(zip(rounds["router"], rounds["bare"], strict=True))
    compared = ("requests_per_second", "cpu_us")
    out["ratio"] = {key: median(one[key] / bare[key] for one, bare in pairs) for key in compared}
    return out


def print_rows(rows: list[dict[str, Any]], delay_ms: float) -> None:
    print("clients             req/s    bound   p50 ms   added   p99 ms   added  CPU us")
    for row in rows:
        bound = row["clients"] / (delay_ms / 1e3) if delay_ms else float("inf")
        for name in COLUMNS:
            f = row[name]
            speed = f"{row['clients']:7d} {name:8} {f['requests_per_second']:8.0f} {bound:8.0f}"
            middle, tail = (f"{f[key]:8.2f} {f['added_' + key]:7.2f}" for key in ("p50_ms", "p99_ms"))
            print(f"{speed} {middle} {tail} {f['cpu_us']:7.0f}")
        more, cpu = (row["ratio"][key] for key in ("requests_per_second", "cpu_us"))
        print(f"{'':7} router / bare: {more:.2f} of its requests a second, {cpu:.2f} of its CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--requests", type=int, default=1024, help="of one run; fewer where few clients wait")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--delay-ms", type=float, default=20)
    parser.add_argument("--tokens", type=int, default=256)
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        plan, bodies = Path(folder) / "plan", Path(folder) / "bodies.json"
        write_plan(plan)
        bodies.write_text(json.dumps([body.decode() for body in make_bodies(settings.tokens, 64)]))
        direct = Process(stack, [__file__, "--role", "backend", str(settings.delay_ms / 1e3)])
        bare = Process(stack, [__file__, "--role", "bare", direct.url])
        command = ["-c", "from semmoe.cli import main; main()", "router", direct.url, "--port", "0"]
        router = Process(stack, [*command, "--plan", str(plan), "--tokenizer", str(MODEL)])
        time.sleep(1)
        cores = len(os.sched_getaffinity(0))
        print(f"{platform.processor() or platform.machine()}, {cores} core(s), Python {platform.python_version()}; "
              f"backend {settings.delay_ms:g} ms (no engine), prompts of {settings.tokens} tokens, {RANKS} ranks, "
              f"{settings.rounds} rounds")  # fmt: skip
        print("bound: clients / backend time; CPU us: of the proxy's process, a request")
        rows = measure(settings, {"direct": direct, "bare": bare, "router": router}, bodies)
    print_rows(rows, settings.delay_ms)
    print(json.dumps({"benchmark": "router", "cores": cores, **vars(settings), "rows": rows}))


def play(role: str, arguments: list[str]) -> None:
    """One of the other processes."""
    if role == "backend":
        serve(backend(float(arguments[0])))
    elif role == "bare":
        serve(bare_proxy(arguments[0]))
    else:
        port, path, clients, requests = arguments
        bodies = [body.encode() for body in json.loads(Path(path).read_text())]
        print(json.dumps(asyncio.run(load(int(port), bodies, int(clients), int(requests)))))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--role"]:
        play(sys.argv[2], sys.argv[3:])
    else:
        main()
