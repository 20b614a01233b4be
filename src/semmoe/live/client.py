"""Ask a running server to swap its plan or to record, and follow it to the end; or start one and profile with it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from socket import create_server
from typing import Any
from urllib.error import HTTPError, URLError

from semmoe.core import Plan
from semmoe.engines import supervisor
from semmoe.engines.sglang import targets as sglang
from semmoe.live import watch
from semmoe.live.http import PLAIN, Client
from semmoe.live.recorder import files as recorder
from semmoe.live.status import ENDED, SwapStatus, plan_name, read_status, read_statuses, stage
from semmoe.settings import ProfileSettings, RecordSettings, SwapSettings

VLLM_PATH = "/v1/semmoe/swap"
POLL = 0.05  # seconds between two looks at a status
COUNT_POLL = 0.5  # seconds between two looks at the number of recorded requests
STOP_SECONDS = 60.0  # in which ranks end a recording
ANSWER = 30.0  # seconds in which a server answers that only takes an order
COMPLETION_SECONDS = 3600.0  # in which a server completes a prompt, waits included
PASS_PATH = "/health_generate"  # of SGLang: a one-token request, so that a server without requests runs passes
MOST_TOKENS = 1 << 40  # that a rank records
BEGIN_SECONDS = 1.0  # until ranks look for an order to record
START_SECONDS = 3600.0
# Tokens that a prompt finds in the cache of an earlier prompt are not routed again.
UNCACHED = {"sglang": "--disable-radix-cache", "vllm": "--no-enable-prefix-caching"}


class ServerError(RuntimeError):
    """A server refused an order, or failed while it carried it out."""


@dataclass(frozen=True)
class Served:
    """A running server. folder: its control folder; client: how it is asked."""

    url: str
    folder: Path
    client: Client = PLAIN

    def look(self) -> watch.Look:
        """Its counters now. Raises ValueError if it does not answer."""
        return watch.look([self.url], time.monotonic(), self.client)

    def record(self, target: Path, requests: int, timeout: float) -> None:
        """Write a trace of `requests` requests, or of fewer that end within `timeout` seconds.

        Raises ValueError if the server cannot record, records already, or has ended no request.
        """
        end = time.monotonic() + timeout
        with self.recording(target, RecordSettings()) as run:
            while time.monotonic() < end:
                if sum(status.requests for status in recorder.of_run(self.folder, run)) >= requests:
                    break
                time.sleep(COUNT_POLL)

    @contextmanager
    def recording(self, target: Path, settings: RecordSettings) -> Iterator[str]:
        """Record while the block runs, which gets the run's name, and write a trace then."""
        begun, _ = recorder.begin(self.folder, settings)
        try:
            yield begun.run
        except BaseException:  # the block is stopped: recordings hold users' text
            with suppress(ValueError):  # no request was recorded
                recorder.end(self.folder, target, STOP_SECONDS)
            raise
        recorder.end(self.folder, target, STOP_SECONDS)

    def complete(self, prompts: Sequence[Sequence[int]], max_new_tokens: int, at_once: int) -> Iterator[None]:
        """Have the server complete prompts of token ids greedily; yields after each. Raises ServerError."""
        model = self._ask("/v1/models", ANSWER)["data"][0]["id"]
        body = {"model": model, "max_tokens": max_new_tokens, "temperature": 0}
        with ThreadPoolExecutor(at_once) as pool:
            asked = [
                pool.submit(self._ask, "/v1/completions", COMPLETION_SECONDS, {**body, "prompt": list(ids)})
                for ids in prompts
            ]
            try:
                for one in as_completed(asked):
                    one.result()
                    yield
            finally:
                pool.shutdown(cancel_futures=True)

    def swap(self, plan: Plan, settings: SwapSettings) -> SwapStatus:
        """Stage a plan, swap the server to it and return rank 0's last status. Raises ValueError or ServerError."""
        look = self.look()
        engine = watch.view(look, look).active.get("engine", "")  # with its version
        number = stage(plan, self.folder)
        if engine.startswith("vllm"):
            order = {"number": number, "layers_per_pass": settings.layers_per_pass}
            return SwapStatus.model_validate(self._ask(VLLM_PATH, settings.timeout, order))
        if engine.startswith("sglang"):
            return self.swap_sglang(number, settings, plan.requests.by_tables)
        raise ValueError(f"{self.url} is served by {engine or 'an unknown engine'}, whose plan cannot be swapped")

    def swap_sglang(self, number: int, settings: SwapSettings, schedules: bool) -> SwapStatus:
        """Have SGLang swap to a staged plan; schedules: requests are assigned by plans, and follow the experts."""
        found = read_status(self.folder)
        if not found.plan:
            raise ServerError(found.reason)
        self._order({sglang.LAYERS: settings.layers_per_pass, sglang.SWAP: number})
        status = self._ended(found.swaps, settings.timeout)
        if status.state == "done" and schedules:
            self._order({sglang.REQUESTS: number})
        return status

    def _ended(self, before: int, timeout: float) -> SwapStatus:
        """What rank 0 says when a swap has ended on all ranks of this node, or the one that failed.

        before: the number of swaps until then. A swap's steps follow forward passes, so requests of a single token are
        sent meanwhile: an idle server takes about a second to answer each.
        """
        end, passes = time.monotonic() + timeout, ThreadPoolExecutor(1)
        asked = passes.submit(self._run_a_pass)
        try:
            while time.monotonic() < end:
                ranks = read_statuses(self.folder)
                ended = [rank for rank in ranks if rank.swaps > before and rank.state in ENDED]
                failed = [rank for rank in ended if rank.state == "failed"]
                if failed or len(ended) == len(ranks):
                    return (failed or ended)[0]
                if asked.done():
                    asked.result()
                    asked = passes.submit(self._run_a_pass)
                time.sleep(POLL)
        finally:
            passes.shutdown(wait=False, cancel_futures=True)
        states = ", ".join(f"rank {rank.rank} is {rank.state}" for rank in read_statuses(self.folder))
        raise ServerError(f"the swap did not end within {timeout:g} s; {states}")

    def _run_a_pass(self) -> None:
        """Have the server run a pass; it may be too busy to answer. Raises ServerError if it has ended."""
        try:
            self.client.read(self.url + PASS_PATH, ANSWER)
        except URLError as error:
            if isinstance(error.reason, ConnectionRefusedError):
                why = supervisor.reported(self.folder)
                raise ServerError(f"the server has ended{': ' + why if why else ''}") from None
        except (OSError, HTTPException):
            return

    def _order(self, values: dict[str, int]) -> None:
        answers = self._ask("/set_internal_state", ANSWER, {"server_args": values})
        if not (isinstance(answers, list) and answers and all(answers)):
            name = plan_name(values.get(sglang.SWAP, values.get(sglang.REQUESTS, 1)))
            raise ServerError(f"the server refused to swap to plan {name} now: is another swap not over? See its log")

    def _ask(self, path: str, seconds: float, body: dict[str, Any] | None = None) -> Any:
        """The JSON that the server answers to a GET, or to a POST of `body`. Raises ServerError with its words."""
        url, data = self.url + path, None if body is None else json.dumps(body).encode()
        try:
            return json.loads(self.client.read(url, seconds, data) or b"null")
        except HTTPError as error:
            raise ServerError(self.client.hide(_words(error))) from None
        except (OSError, HTTPException) as error:
            raise ServerError(f"{url} does not answer: {self.client.reason(error)}") from None
        except ValueError:
            raise ServerError(f"{url} does not answer with JSON") from None


def _words(error: HTTPError) -> str:
    """The reason that the answer gives."""
    text = error.read(10_000).decode(errors="replace")
    try:
        return str(json.loads(text)["detail"])
    except (ValueError, KeyError, TypeError):
        return f"{error.url} answers {error.code}: {text[:200] or error.reason}"


def profile(
    engine: str, model: str, prompts: Sequence[Sequence[int]], out: Path, settings: ProfileSettings, words: list[str]
) -> Iterator[None]:
    """Write a trace of prompts of token ids to `out`; yields after each prompt. words: the engine's own options.

    The server has a rank for each GPU, or one on a CPU. Raises ValueError or ServerError.
    """
    with _server(engine, model, words) as served, served.recording(out, RecordSettings(max_tokens=MOST_TOKENS)):
        time.sleep(BEGIN_SECONDS)
        yield from served.complete(prompts, max(settings.max_new_tokens, 1), settings.batch_size)


@contextmanager
def _server(engine: str, model: str, words: list[str]) -> Iterator[Served]:
    """Run `semmoe serve` for as long as the block runs."""
    import torch

    with create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = str(torch.accelerator.device_count() or 1)
    command = [sys.executable, "-c", "from semmoe.cli import main; main()", "serve", model, "--engine", engine]
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        served, log = Served(f"http://127.0.0.1:{port}", Path(scratch) / "control"), Path(scratch) / "log"
        command += ["--port", port, "--control", str(served.folder), "--ep-size", ranks, "--attention", "dp"]
        command += ["--", UNCACHED[engine], *words]
        with log.open("wb") as file:
            environment = {**os.environ, "SEMMOE_RECORD": "1"}
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment)
        try:
            _wait(served, process, log)
            yield served
        finally:
            process.terminate()
            process.wait()


def _wait(served: Served, process: subprocess.Popen, log: Path) -> None:
    """Wait until the server serves. Raises ValueError with its last line if it ends before."""
    end = time.monotonic() + START_SECONDS
    while process.poll() is None and time.monotonic() < end:
        try:
            served.client.read(served.url + "/health", 10.0)
            return
        except (OSError, HTTPException):
            time.sleep(1.0)
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    raise ValueError(lines[-1].removeprefix("error: ") if lines else "the engine's server did not start")
