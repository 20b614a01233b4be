"""What only GPUs can prove, step by step, in one report to attach to an issue.

    python benchmarks/prove_gpu.py --engine vllm|sglang --model MODEL [--attention dp|tp] [--out FOLDER] [-- OPTIONS]

In the engine's own environment, on a machine with two GPUs; OPTIONS are the engine's (say, `--all2all-backend
deepep_low_latency`). docs/operate.md lists the steps and the missing proofs. Steps that fail early end the
run, so that no GPU is held for nothing. --rehearse runs on a CPU all that does not need one, on the embedded model.
--one-gpu puts both ranks on one GPU, where NCCL can (2.32 does, 2.28 does not): each is started as a node of its own,
and times say nothing. Writes report.md, report.json and every log to FOLDER after each step. Exit code 1 if a step
failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import platform
import re
import shutil
import signal
import statistics
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import aiohttp
from serving.engine import Command, SetUp, engine
from serving.network import Network
from serving.server import counters

from semmoe.live.watch import expected_lar
from semmoe.plan import load_plan
from semmoe.traces.texts import held_out_prompts

ROOT = Path(__file__).parent.parent
RANKS, NEW_TOKENS, ALONE, TOGETHER, CLIENTS = 2, 32, 24, 192, 32
SWAPS = 4
GATHERS = "sends every row to every rank"  # what one GPU has: DeepEP's ranks need one each
MORE_THAN_PLACEBO = 2  # answers of ALONE that may differ beyond those that differ between two runs of the engine
START_SECONDS = 1200
SEMMOE = [sys.executable, "-c", "from semmoe.cli import main; main()"]
PACKAGES = ("semmoe", "torch", "triton", "vllm", "sglang", "deep_ep")


class StepError(Exception):
    """Why a step failed, in one line."""


@dataclass
class Result:
    step: str
    proves: str
    state: str = "passed"  # or failed, or left out
    seconds: float = 0.0
    facts: dict[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass
class Run:
    """What steps share."""

    a: argparse.Namespace
    results: list[Result] = field(default_factory=list)
    answers: dict[str, list[list[int] | str]] = field(default_factory=dict)  # by server
    throughput: dict[str, float] = field(default_factory=dict)  # tokens a second, by server

    @property
    def folder(self) -> Path:
        return self.a.out

    @property
    def plan(self) -> Path:
        return self.folder / "plan"

    @property
    def other(self) -> Path:
        """A plan to swap with."""
        return self.folder / "other"

    def call(self, name: str, words: list[str], seconds: float = 900) -> str:
        """What a command printed, which is kept in a log. Raises StepError."""
        log = self.folder / f"{name}.log"
        with log.open("w") as file:
            done = subprocess.run(words, stdout=file, stderr=subprocess.STDOUT, timeout=seconds, check=False, cwd=ROOT)
        if done.returncode != 0:
            raise StepError(f"exit code {done.returncode}, {last_line(log)}")
        return log.read_text(errors="replace")


Then = Callable[[Run, str, list[str]], dict[str, Any]]


def last_line(log: Path) -> str:
    """The name of a log and what it ends with."""
    return f"{log.name}: {(log.read_text(errors='replace').strip().splitlines() or [''])[-1][:300]}"


def machine(run: Run) -> dict[str, Any]:
    """Raises StepError unless there are two GPUs, memory and room on the disk."""
    import torch

    facts: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    for name in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            facts[name] = version(name)
    facts["free disk GB"] = round(shutil.disk_usage(run.folder).free / 1e9)
    if run.a.rehearse:
        return facts
    facts["GPUs"] = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    needed = 1 if run.a.one_gpu else RANKS
    if len(facts["GPUs"]) < needed:
        raise StepError(f"{len(facts['GPUs'])} GPUs here, {needed} are needed")
    facts["GB of a GPU that are free"] = [round(torch.cuda.mem_get_info(i)[0] / 1e9) for i in range(needed)]
    facts["GPU 0 reads GPU 1"] = needed > 1 and torch.cuda.can_device_access_peer(0, 1)
    facts["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    if "deep_ep" not in facts:
        facts["warning"] = "deep_ep is not installed: rows may be sent to all ranks, and no plan saves a byte then"
    return facts


def doctor(run: Run) -> dict[str, Any]:
    words = [*SEMMOE, "doctor", "--engine", run.a.engine]
    return {"last line": run.call("doctor", words).strip().splitlines()[-1]}


def kernels(run: Run) -> dict[str, Any]:
    """On one GPU: bit for bit, and graphs."""
    tests = ["test_kernels_at_real_shapes.py", "test_shuffler.py"]
    words = ["-m", "pytest", "-q", "-rs", "-k", "gpu or cuda_graph or gpus", *(f"tests/{name}" for name in tests)]
    out = run.call("kernels", [sys.executable, *words])
    passed = re.search(r"(\d+) passed", out)
    if not passed or "skipped" in out:
        raise StepError("some tests were skipped: see kernels.log")
    times = run.call("kernel-times", [sys.executable, "benchmarks/bench_kernels.py", "--tokens", "64", "1024", "8192"])
    hooks = run.call("hook-times", [sys.executable, "benchmarks/bench_captured.py"])
    found = [json.loads(out.strip().splitlines()[-1])["results"] for out in (times, hooks)]
    return {"tests": int(passed[1]), "times": found[0], "what hooks add to a captured pass": found[1]}


def profile(run: Run) -> dict[str, Any]:
    """Routing of the standard library's texts, as the engine itself computes it."""
    limit, new = ("40", "4") if run.a.rehearse else ("300", "32")
    words = [*SEMMOE, "profile", run.a.model, "--engine", run.a.engine, "--limit", limit, "--max-new-tokens", new]
    run.call("profile", [*words, "--out", str(run.folder / "trace"), "--", *_offline(run.a)], START_SECONDS)
    words = [*SEMMOE, "solve", str(run.folder / "trace"), "--ep-size", str(RANKS), "--attention", run.a.attention]
    run.call("solve", [*words, "--out", str(run.plan), "--force"])
    run.call("solve-other", [*words, "--seed", "1", "--out", str(run.other), "--force"])
    return {"the plan expects pairs local": expected_lar(load_plan(run.plan).expected)}


def vanilla(run: Run) -> dict[str, Any]:
    return _served(run, "vanilla", None)


def planned(run: Run) -> dict[str, Any]:
    """Raises StepError if a hook was bypassed, or a swap fails."""
    swaps = run.a.attention == "dp" or "--enforce-eager" in run.a.options  # captured shuffles hold the plan's tables
    facts = _served(run, "plan", run.plan, swap if swaps else None)
    wrong = [reason for reason in facts["degraded"] if not (run.a.one_gpu and GATHERS in reason)]
    if wrong:
        raise StepError(f"degraded: {'; '.join(wrong)}")
    return facts | {"answers that differ from vanilla's so far": _differences(run)}


def _differences(run: Run) -> dict[str, int]:
    """Answers that differ from vanilla's, by server. In swaps every prompt was asked several times."""
    vanilla, others = run.answers["vanilla"], {name: a for name, a in run.answers.items() if name != "vanilla"}
    right = {name: vanilla * (len(answers) // len(vanilla)) for name, answers in others.items()}
    return {name: sum(a != b for a, b in zip(others[name], right[name], strict=True)) for name in others}


def swap(run: Run, url: str, texts: list[str]) -> dict[str, Any]:
    """Answers while the experts move from the plan's places to another plan's and back, twice."""
    texts, first, *others = [texts[i % len(texts)] for i in range(2 * len(texts))], *_controls(run, "plan")

    def move(number: int) -> None:
        plan = run.plan if number % 2 else run.other
        words = [*SEMMOE, "swap", url, "--plan", str(plan), "--control"]
        for folder in others:
            run.call(f"stage-{number}", [*words, str(folder), "--stage-only"])
        run.call(f"swap-{number}", [*words, str(first)])

    with ThreadPoolExecutor(1) as pool:
        moved = pool.map(move, range(SWAPS))
        run.answers["plan, in swaps"] = [told for told, _ in asyncio.run(_ask(url, texts, 1))]
        return {"swaps": len(list(moved))}


def vanilla_again(run: Run) -> dict[str, Any]:
    """The placebo: what two runs of the same thing differ by. Raises StepError if the plan's answers differ by more."""
    facts = _served(run, "vanilla-again", None)
    differ = _differences(run)
    facts |= {f"answers of {len(run.answers['vanilla'])} that differ from vanilla's": differ}
    rates = run.throughput
    facts["tokens a second over vanilla's"] = {name: round(rates[name] / rates["vanilla"], 3) for name in rates}
    if max(differ.values()) > differ["vanilla-again"] + MORE_THAN_PLACEBO:
        raise StepError(f"outputs differ: {differ}")
    return facts


STEPS: list[tuple[str, str, Callable[[Run], dict[str, Any]], bool]] = [
    ("machine", "there is what the rest needs", machine, False),
    ("doctor", "every hook is where it is expected in this engine", doctor, False),
    ("kernels", "Triton's kernels are right on this GPU, a decode pass is replayed from a CUDA graph", kernels, True),
    ("profile and solve", "routing is seen on a GPU, and a plan is made of it", profile, False),
    ("vanilla", "the engine serves the model here; answers and times to compare with", vanilla, False),
    ("plan", "a plan is served with graphs on, nothing is bypassed, pairs are as local as it expects", planned, False),
    ("vanilla again", "outputs are the same, up to what vanilla itself varies; times beside a placebo", vanilla_again,
     False),
]  # fmt: skip


def _offline(a: argparse.Namespace) -> list[str]:
    """Options of the engine that profiles."""
    return _small(a) if a.rehearse else [word for word in a.profile_options.split() if word]


def _small(a: argparse.Namespace) -> list[str]:
    """Options with which an engine fits beside another on a CPU."""
    if a.engine == "vllm":
        return ["--dtype", "float32", "--max-model-len", "2048", "--gpu-memory-utilization", "0.1"]
    return ["--dtype", "float32", "--mem-fraction-static", "0.1", "--max-total-tokens", "8192"]


class OneHost(Network):
    """Nodes that are all this machine."""

    @staticmethod
    def address(host: int) -> str:
        return "127.0.0.1"


def _nodes(a: argparse.Namespace) -> list[Command]:
    """The engine's options by node. On one GPU each rank is a node, since a node's ranks take a GPU each."""
    if not a.one_gpu:
        return [Command([], {})]
    served, up, host = engine(a.engine), SetUp(name="nodes", attention=a.attention), OneHost(RANKS, "loopback")
    return [served.on_node(up, host, node, a.port + 1000) for node in range(RANKS)]


def _controls(run: Run, name: str) -> list[Path]:
    """A server's control folders, by node."""
    return [run.folder / f"{name}-control-{node}" for node in range(len(_nodes(run.a)))]


def _start(run: Run, name: str, plan: Path | None) -> list[subprocess.Popen]:
    """`semmoe serve`, by node, with the plan or without."""
    shared, out = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"} if run.a.one_gpu else {}, []
    for node, (control, own) in enumerate(zip(_controls(run, name), _nodes(run.a), strict=True)):
        words = [*SEMMOE, "serve", run.a.model, "--engine", run.a.engine, "--port", str(run.a.port + node), "--control"]
        words += [str(control), *(["--plan", str(plan)] if plan else []), "--ep-size", str(RANKS)]
        words += [
            "--attention",
            run.a.attention,
            "--",
            *(_small(run.a) if run.a.rehearse else run.a.options),
            *own.words,
        ]
        with (run.folder / f"{name}-{node}.log").open("w") as file:
            environment = os.environ | shared | own.environment
            out.append(subprocess.Popen(words, stdout=file, stderr=file, start_new_session=True, env=environment))
    return out


@contextlib.contextmanager
def _server(run: Run, name: str, plan: Path | None) -> Iterator[str]:
    """The URL of a server. Raises StepError."""
    processes, url, until = _start(run, name, plan), f"http://127.0.0.1:{run.a.port}", time.monotonic() + START_SECONDS
    try:
        while not _healthy(url):
            for node, process in enumerate(processes):
                if process.poll() is not None or time.monotonic() > until:
                    raise StepError(f"the server did not start, {last_line(run.folder / f'{name}-{node}.log')}")
            time.sleep(2)
        yield url
    finally:
        _end(processes)


def _end(processes: list[subprocess.Popen]) -> None:
    for process in processes:
        _signal(process, signal.SIGTERM)
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(60)
        _signal(process, signal.SIGKILL)


def _signal(process: subprocess.Popen, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _healthy(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url + "/health", timeout=10) as answer:
        return answer.status == 200
    return False


def _served(run: Run, name: str, plan: Path | None, then: Then | None = None) -> dict[str, Any]:
    """Answers to prompts one at a time, then many at once; counters of all ranks. then: what else to do."""
    alone, together, clients = (6, 24, 8) if run.a.rehearse else (ALONE, TOGETHER, CLIENTS)
    texts = [text[:1500] for _, _, text in held_out_prompts(per_domain=together)][-together:]
    began = time.monotonic()
    with _server(run, name, plan) as url:
        started = time.monotonic() - began
        run.answers[name] = [told for told, _ in asyncio.run(_ask(url, texts[:alone], 1))]
        before, start = _counted(run, name), time.perf_counter()
        found = asyncio.run(_ask(url, texts, clients))
        seconds = time.perf_counter() - start
        time.sleep(3)  # counters are published every second
        after = _counted(run, name)
        more = then(run, url, texts[:alone]) if then else {}
    grown = {key: after[key] - before.get(key, 0) for key in after}
    run.throughput[name] = sum(len(told) for told, _ in found) / seconds
    pairs = max(grown.get("pairs", 0), 1)
    return {
        "seconds to start": round(started),
        "answers at once": len(found),
        "tokens a second": round(run.throughput[name], 1),
        "median ms of an answer": round(1000 * statistics.median(took for _, took in found)),
        "pairs local": round(grown.get("pairs.local=true", 0) / pairs, 3),
        "rows to other ranks per token": round(grown.get("remote_rows", 0) / max(grown.get("routed_tokens", 0), 1), 3),
        "degraded": [key.partition("reason=")[2] for key in after if key.startswith("degraded.reason=")],
        **more,
    }


def _counted(run: Run, name: str) -> Counter[str]:
    """A server's counters, summed over its nodes."""
    return sum((Counter(counters(folder)) for folder in _controls(run, name)), Counter())


async def _ask(url: str, texts: list[str], clients: int) -> list[tuple[list[int] | str, float]]:
    """Every text's answer and its seconds, from so many clients."""
    waiting, out = iter(enumerate(texts)), {}
    timeout, connector = aiohttp.ClientTimeout(total=600), aiohttp.TCPConnector(force_close=True)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        async with session.get(url + "/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]

        async def client() -> None:
            for i, text in waiting:
                body = {"model": model, "prompt": text, "max_tokens": NEW_TOKENS, "temperature": 0, "seed": 0,
                        "ignore_eos": True, "return_token_ids": True}  # fmt: skip
                start = time.perf_counter()
                async with session.post(url + "/v1/completions", json=body) as answer:
                    told = await answer.json()
                    if answer.status != 200:
                        raise StepError(f"request {i}: {answer.status} {str(told)[:300]}")
                choice = told["choices"][0]
                out[i] = (choice.get("token_ids") or choice["text"], time.perf_counter() - start)

        await asyncio.gather(*(client() for _ in range(clients)))
    return [out[i] for i in range(len(texts))]


def do(run: Run, step: str, proves: str, job: Callable[[Run], dict[str, Any]], needs_gpu: bool) -> Result:
    result, start = Result(step, proves), time.monotonic()
    print(f"{step} ...", flush=True)
    if step in run.a.without or (needs_gpu and run.a.rehearse):
        result.state, result.reason = "left out", "as asked" if step in run.a.without else "it needs a GPU"
    else:
        try:
            result.facts = job(run)
        except (StepError, subprocess.TimeoutExpired) as error:
            result.state, result.reason = "failed", str(error)
    result.seconds = round(time.monotonic() - start, 1)
    print(f"{step}: {result.state}{', ' + result.reason if result.reason else ''} ({result.seconds:.0f} s)", flush=True)
    return result


def write(run: Run) -> None:
    """The report so far."""
    words = f"{run.a.engine}, {run.a.model}, attention {run.a.attention}, {RANKS} ranks"
    lines = [f"# semmoe on {'a CPU, rehearsed' if run.a.rehearse else 'GPUs'}: {words}", "",
             f"Options of the engine: `{' '.join(run.a.options) or 'none'}`", ""]  # fmt: skip
    for result in run.results:
        lines += [f"## {result.step}: {result.state}", "", f"Proves: {result.proves}. {result.seconds:.0f} s.", ""]
        lines += [f"**{result.reason}**", ""] if result.reason else []
        lines += [f"- {name}: {json.dumps(value)}" for name, value in result.facts.items()] + [""]
    (run.folder / "report.md").write_text("\n".join(lines))
    (run.folder / "report.json").write_text(json.dumps([asdict(result) for result in run.results], indent=1) + "\n")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=["sglang", "vllm"], required=True)
    parser.add_argument("--model", default="tiny", help="a directory or a name that the engine loads")
    parser.add_argument("--attention", choices=["dp", "tp"], default="dp")
    parser.add_argument("--out", type=Path, default=Path("gpu-report"))
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--profile-options", default="", help="options of the engine that profiles")
    parser.add_argument("--one-gpu", action="store_true", help="both ranks on one GPU, each a node of its own")
    parser.add_argument(
        "--without", nargs="*", default=[], choices=[name for name, *_ in STEPS], help="steps to leave out"
    )
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("options", nargs="*", help="of the engine that serves, after --")
    a = parser.parse_args()
    if a.model == "tiny" and not (a.rehearse or a.one_gpu):
        parser.error("--model MODEL, say Qwen/Qwen3-30B-A3B-FP8; the embedded model is for --rehearse and --one-gpu")
    a.out = a.out.resolve()
    return a


def main() -> int:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that the servers end too
    run = Run(parse())
    run.folder.mkdir(parents=True, exist_ok=True)
    for step, proves, job, needs_gpu in STEPS:
        run.results.append(do(run, step, proves, job, needs_gpu))
        write(run)
        if run.results[-1].state == "failed":
            break
    print(f"\n{run.folder / 'report.md'}: attach it to an issue, and the logs of what failed")
    return int(any(result.state == "failed" for result in run.results))


if __name__ == "__main__":
    sys.exit(main())
