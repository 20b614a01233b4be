"""Engines' servers for the tests: started by `semmoe serve`, asked over HTTP, ended."""

import contextlib
import os
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import pytest
import requests

from semmoe.cli import main

START_SECONDS, SILENT_SECONDS, NEW_TOKENS = 900, 180, 8
# Below those that the system hands out, of which engines take more. Suites of two engines may run at the same time.
PORTS = (11000, 20000) if find_spec("sglang") else (20000, 30000)
_PORTS: set[int] = set()
SEMMOE = ("-c", "from semmoe.cli import main; main()")
FORKED = Path(__file__).parent / "forked"  # a plug-in of all engines


class Server:
    """One server and all of its processes; `log` is what it printed. Each engine has a subclass.

    plain: the engine's own command, without semmoe's. path: of a plug-in that it loads. forks: it forks its processes,
    which takes half the time; otherwise it spawns them, as engines do.
    """

    ENGINE = ""
    PLAIN: tuple[str, ...] = ()  # the engine's own command, up to the model
    LIMITS: tuple[str, ...] = ()  # small pools and chunks: prompts are cut, requests wait, batches change at every step
    READY = ""  # what the log says of a server that serves
    RANK = ""  # in the titles of processes that may be killed

    def __init__(
        self,
        folder: Path,
        model: str,
        *options: str,
        engine: tuple[str, ...] = (),
        path: str = "",
        plain: bool = False,
        forks: bool = True,
        variables: dict[str, str] | None = None,
    ) -> None:
        self.port, self.control, self.model = free_port(), folder / "control", model
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        serve = [*SEMMOE, "serve", model, "--engine", self.ENGINE, "--control", str(self.control)]
        serve += ["--port", str(self.port), *options, "--"]
        command = [*self.PLAIN, model, "--port", str(self.port), *options]
        words = [sys.executable, "-W", "ignore", *(command if plain else serve), *self.LIMITS, *engine]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"} | (variables or {})
        plugins = [str(FORKED)] * forks + [path, os.environ.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, plugins))
        with self._log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> "Server":
        """Until it serves; raises with the end of its log if it ends, or is silent for too long.

        A server that still writes to its log is alive, however loaded the machine.
        """
        started = heard = time.monotonic()
        length = 0
        while self.process.poll() is None:
            now, written = time.monotonic(), self._log.stat().st_size
            heard, length = (now, written) if written > length else (heard, length)
            if now - heard > SILENT_SECONDS or now - started > START_SECONDS:
                break
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=10).ok and self.READY in self.log:
                    return self
            time.sleep(0.3)
        raise RuntimeError(f"the server did not start (exit code {self.process.poll()}):\n{self.log[-4000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            self.process.terminate()
            self.process.wait(timeout=15)
        for pid, _ in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def send(
        self, prompt: list[int], new_tokens: int = NEW_TOKENS, rank: int | None = None, **more
    ) -> requests.Response:
        """One greedy request for token ids; rank: the data-parallel rank that it names."""
        raise NotImplementedError

    def tokens(self, answer: requests.Response) -> list[int]:
        raise NotImplementedError

    def streamed(self, answer: requests.Response) -> list[int]:
        """The tokens of an answer that comes in parts."""
        raise NotImplementedError

    def cached(self, answer: requests.Response) -> int:
        """Prompt tokens that came from the prefix cache."""
        raise NotImplementedError

    def reason(self, answer: requests.Response) -> str:
        """Why the output ends, in the engine's word."""
        raise NotImplementedError

    def send_all(self, prompts: list[list[int]]) -> list[requests.Response]:
        """All at once, as 32 clients would."""
        with ThreadPoolExecutor(32) as pool:
            return list(pool.map(self.send, prompts))

    def complete(self, prompts: list[list[int]]) -> list[list[int]]:
        return [self.tokens(answer) for answer in self.send_all(prompts)]

    def counters(self) -> dict[str, float]:
        """semmoe's counters on the Prometheus endpoint, summed over labels but `local` and `by`."""
        time.sleep(1.5)  # they are published once a second
        totals: dict[str, float] = {}
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            found = re.fullmatch(r"semmoe_(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.e+-]+)", line)
            if found:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                scheduled = found[1].endswith("scheduled_requests")
                kind = labels.get("local") or (labels.get("by", "") if scheduled else "")
                key = found[1] + (f" {kind}" if kind else "")
                totals[key] = totals.get(key, 0) + float(found[3])
        return totals

    def ranks(self) -> list[int]:
        """Process ids that may be killed."""
        return [pid for pid, name in self.processes() if self.RANK in name]

    def processes(self) -> list[tuple[int, str]]:
        """Id and title of all that belong to the server's session: the engine has a process group of its own."""
        listed = subprocess.run(["ps", "-eo", "pid,sid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        return [(int(pid), name) for pid, session, name in rows if int(session) == self.process.pid]


def free_port() -> int:
    """One of PORTS that no other call was given."""
    while True:
        port = random.randrange(*PORTS)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("0.0.0.0", port))
            if port not in _PORTS:
                _PORTS.add(port)
                return port


def cli(*words: str) -> None:
    """The command line, in this process; it must end well."""
    with mock.patch.object(sys, "argv", ["semmoe", *words]), pytest.raises(SystemExit) as done:
        main()
    assert done.value.code in (0, None)


def reason(server: Server) -> str:
    """The last line of a server that `semmoe serve` could not start for a mistake, in spite of the engine's traces."""
    last = refused(server).strip().splitlines()[-1]
    assert server.process.returncode == 2
    assert last.startswith("error: ")
    return last


def refused(server: Server) -> str:
    """The log of a server that must end by itself."""
    try:
        with pytest.raises(RuntimeError, match=r"did not start \(exit code [^N]"):
            server.wait()
    finally:
        server.stop()
    return server.log


def num_parted(answers: list[list[int]], others: list[list[int]]) -> int:
    """How many of the answers to the same prompts differ."""
    return sum(a != b for a, b in zip(answers, others, strict=True))
