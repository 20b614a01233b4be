"""SGLang servers for the tests: started by `semmoe serve`, asked over HTTP, ended."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

# Small pools and chunks: prompts are cut in chunks, requests wait, decode batches change at every step.
LIMITS = ["--dtype", "float32", "--max-total-tokens", "8192", "--max-running-requests", "16", "--chunked-prefill-size",
          "128", "--mem-fraction-static", "0.1", "--random-seed", "0", "--log-level", "info"]  # fmt: skip
START_SECONDS, NEW_TOKENS = 240, 8


class Server:
    """One server and all of its processes; `log` is what it printed. plain: SGLang's own command, without semmoe's."""

    def __init__(
        self, folder: Path, model: str, *options: str, engine: tuple[str, ...] = (), path: str = "", plain: bool = False
    ) -> None:
        self.port, self.control = free_port(), folder / "control"
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / "server.log"
        serve = ["-c", "from semmoe.cli import main; main()", "serve", model, "--control", str(self.control)]
        serve += ["--port", str(self.port), *options, "--"]
        command = ["-m", "sglang.launch_server", "--model-path", model, "--port", str(self.port), *options]
        words = [sys.executable, "-W", "ignore", *(command if plain else serve), *LIMITS, *engine]
        environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        if path:
            environment["PYTHONPATH"] = os.pathsep.join([path, *filter(None, [os.environ.get("PYTHONPATH")])])
        with self._log.open("w") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, env=environment, start_new_session=True)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait(self) -> "Server":
        """Until it serves; raises with the end of its log if it ends or takes too long."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until and self.process.poll() is None:
            with contextlib.suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=10).ok and "ready to roll" in self.log:
                    return self
            time.sleep(0.3)
        raise RuntimeError(f"the server did not start (exit code {self.process.poll()}):\n{self.log[-4000:]}")

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGTERM)
            self.process.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def generate(self, prompt: list[int], **more: object) -> requests.Response:
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS}
        body = {"input_ids": prompt, "sampling_params": sampling, **more}
        return requests.post(f"{self.url}/generate", json=body, timeout=120)

    def complete(self, prompts: list[list[int]]) -> list[dict]:
        """All at once, as 32 clients would."""
        with ThreadPoolExecutor(32) as pool:
            return [answer.json() for answer in pool.map(self.generate, prompts)]

    def counters(self) -> dict[str, float]:
        """semmoe's counters on the Prometheus endpoint, summed over labels but `local` and `by`."""
        time.sleep(1.5)  # they are published once a second
        totals: dict[str, float] = {}
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            found = re.fullmatch(r"semmoe_(\w+?)(?:_total)?(?:\{(.*)\})? ([0-9.e+-]+)", line)
            if found:
                labels = dict(re.findall(r'(\w+)="([^"]*)"', found[2] or ""))
                kind = labels.get("local") or (labels.get("by", "") if found[1] == "scheduled_requests" else "")
                key = found[1] + (f" {kind}" if kind else "")
                totals[key] = totals.get(key, 0) + float(found[3])
        return totals

    def schedulers(self) -> list[int]:
        """Process ids of the model's ranks."""
        listed = subprocess.run(["ps", "-eo", "pid,pgid,args"], capture_output=True, text=True, check=True).stdout
        rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
        return [int(pid) for pid, group, name in rows if int(group) == self.process.pid and "::scheduler" in name]


def free_port() -> int:
    """With room above it: SGLang takes further ports relative to its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return min(s.getsockname()[1], 60000)
