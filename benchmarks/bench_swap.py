"""What requests see of a swap: the longest wait between two tokens, and tokens a second while it runs.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_swap.py FILE --engine sglang|vllm [--attention dp|tp]
        [--link loopback|200mbit] [--rounds 7] [--clients 16] [--busy]
    python benchmarks/bench_swap.py FILE --report

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1); a link that is not loopback needs root. One
server of two ranks on a plan with eight redundant experts; clients that stream without a pause. A round has windows of
10 seconds, in an order that turns: nothing happens; nothing again, the placebo; a swap of all layers at once; a swap of
one layer between two passes. Every swap is to a plan whose copies are elsewhere, at random, so that about half of the
experts move: far more than what a plan that follows the traffic moves. What a window is judged by lies in the five
seconds from the swap on, in the others in the same five.

Beside it, in each round on a server of its own: SGLang's rebalance of experts (`--enable-eplb`), every 60 passes, which
is at least once in five seconds; and at the end the time from the order to stop an engine to the first answer of the
next: a restart. Rounds are refused while other processes take the cores. FILE: JSON lines that are only added to.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from subprocess import run as run_process
from typing import Any

import numpy as np
from serving import guard
from serving.claims import claim, estimate, order, paired_ratios
from serving.engine import Engine, ServerError, SetUp, add_engine, engine
from serving.network import Network, NetworkError, slow_network
from serving.server import Server, make_plan, prompts, serving

from semmoe.cli.demo import MODEL
from semmoe.plan import load_plan, save_plan

STREAM = Path(__file__).parent / "serving" / "stream.py"
SECONDS, AT, LASTS, OUTPUT = 10.0, 3.0, 5.0, 64  # of a window; a swap is asked for at AT, and judged for LASTS
CALM, AGAIN, AT_ONCE, IN_STEPS, EPLB = "nothing", "nothing again", "swap", "swap, a layer a pass", "SGLang's rebalance"
LAYERS = {AT_ONCE: 0, IN_STEPS: 1}
COPIES = 8
EPLB_OPTIONS = {"enable_eplb": True, "eplb_rebalance_num_iterations": 60, "ep_dispatch_algorithm": "static",
                "ep_num_redundant_experts": COPIES, "deepep_mode": "normal"}  # fmt: skip


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    add_engine(parser, required=False)
    parser.add_argument("--attention", choices=["dp", "tp"], default="dp")
    parser.add_argument("--link", default="loopback", help="`loopback`, or a rate in tc's units: 200mbit")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--restarts", type=int, default=3, help="how often an engine is stopped and started again")
    parser.add_argument("--busy", action="store_true", help="measure although others take the cores")
    parser.add_argument("--report", action="store_true", help="tables of what the file holds")
    a = parser.parse_args()
    if not (a.report or a.engine):
        parser.error("name an engine")
    return a


class Windows:
    """One server's windows; every swap goes to another plan than the one before."""

    def __init__(self, server: Server, plans: list[Path], served: list[list[int]], a: argparse.Namespace) -> None:
        self.server, self._plans, self._prompts, self._a = server, plans, served, a
        self._swaps = 0

    def window(self, name: str, number: int) -> dict[str, Any]:
        """Figures of a window; raises ServerError."""
        return figures(self.stream(name, number, SECONDS))

    def stream(self, name: str, number: int, seconds: float) -> dict[str, Any]:
        """What clients that begin requests for so many seconds see; raises ServerError."""
        job = {"url": self.server.url, "model": str(MODEL), "prompts": self._prompts[number::97],
               "clients": self._a.clients, "seconds": seconds, "output_tokens": OUTPUT, "plan": "", "at": AT,
               "folder": str(self.server.folder), "layers": LAYERS.get(name, 0)}  # fmt: skip
        if name in LAYERS:
            job["plan"] = str(self._plans[self._swaps % len(self._plans)])
            self._swaps += 1
        words = [*self.server.prefix, sys.executable, str(STREAM)]
        done = run_process(words, input=json.dumps(job), capture_output=True, text=True, check=False)
        self.server.check()
        if done.returncode:
            raise ServerError(f"the client failed\n{done.stderr[-2000:]}\n{self.server.log(0)}")
        return json.loads(done.stdout)


def figures(found: dict[str, Any]) -> dict[str, Any]:
    """Of requests that had a token in the judged seconds: waits (ms) that end in them, and tokens a second."""
    begin = found["swap"].get("asked", AT)
    inside = (begin, begin + LASTS)
    waits = [(b - a, i) for times in found["requests"] for i, (a, b) in enumerate(pairwise(times))
             if inside[0] <= b <= inside[1] or a <= inside[0] <= b]  # fmt: skip
    came = sum(inside[0] <= at <= inside[1] for times in found["requests"] for at in times[1:])
    swap = found["swap"]
    return {
        "longest_wait_ms": round(1000 * max(wait for wait, i in waits if i), 1),  # between two tokens
        "longest_first_ms": round(1000 * max((wait for wait, i in waits if not i), default=0.0), 1),
        "tokens_per_s": came / LASTS, "requests": len(found["requests"]),
        "swap": {"asked_to_ended": swap["ended"] - swap["asked"], **swap["status"]} if swap else {},
    }  # fmt: skip


def random_plans(path: Path, folder: Path, number: int = 4) -> list[Path]:
    """Plans like the one at `path`, their slots in another order, at random."""
    plan, out = load_plan(path), []
    for seed in range(number):
        rows = np.random.default_rng(seed).permuted(plan.placement.physical_to_logical_map, axis=1)
        placement = replace(plan.placement, physical_to_logical_map=rows, static_dispatch=None)
        out.append(folder / f"random-{seed}")
        save_plan(replace(plan, placement=placement), out[-1])
    return out


@contextmanager
def network_of(a: argparse.Namespace) -> Iterator[Network | None]:
    with ExitStack() as stack:
        yield None if a.link == "loopback" else stack.enter_context(slow_network(2, a.link))


def measure(served: Engine, a: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    """Every window of every round; then restarts. Raises BusyError, ServerError, NetworkError."""
    seen, held_out = prompts()
    first = make_plan(seen, a.attention, COPIES, scratch)
    plans = random_plans(first, scratch)
    up = SetUp(name="plan", attention=a.attention, plan=first)
    eplb = SetUp(name="eplb", attention=a.attention)
    with network_of(a) as network:
        with ExitStack() as stack:
            own = serving(served, up, scratch / "plan", dict(served.UNCACHED), network)
            servers = {AT_ONCE: Windows(stack.enter_context(own), plans, held_out, a)}
            servers |= dict.fromkeys((CALM, AGAIN, IN_STEPS), servers[AT_ONCE])
            if a.engine == "sglang":
                servers[AT_ONCE].server.pause()
                other = serving(served, eplb, scratch / "eplb", served.UNCACHED | EPLB_OPTIONS, network, place=1)
                servers[EPLB] = Windows(stack.enter_context(other), [], held_out, a)
                servers[EPLB].server.pause()
            yield from rounds(servers, a)
        yield from restarts(served, up, network, held_out, a, scratch)


def rounds(servers: dict[str, Windows], a: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for windows in set(servers.values()):
        windows.server.resume()
        windows.stream(CALM, 0, 5.0)  # warm
        windows.server.pause()
    number = 0
    while number < a.rounds:
        if not a.busy:
            guard.check()
        before, out = guard.snapshot(), []
        for name in order(list(servers), number):
            windows = servers[name]
            windows.server.resume()
            out.append({"round": number, "window": name, **windows.window(name, number)})
            windows.server.pause()
            print(f"  round {number + 1}, {name}: {out[-1]}", file=sys.stderr, flush=True)
        disturbed = guard.since(before)
        if disturbed and not a.busy:
            print(f"  round {number + 1} was disturbed by {'; '.join(disturbed)}", file=sys.stderr, flush=True)
            continue
        yield from out
        number += 1


def restarts(
    served: Engine, up: SetUp, network: Network | None, held_out: list, a: argparse.Namespace, scratch: Path
) -> Iterator[dict[str, Any]]:
    """From the order to stop an engine to the first answer of the next."""
    begin = 0.0
    for number in range(a.restarts + 1):
        with serving(served, up, scratch / "again", dict(served.UNCACHED), network) as server:
            Windows(server, [], held_out, a).stream(CALM, number, 0.1)
            if number:
                yield {"restart": number - 1, "seconds": time.monotonic() - begin}
            begin = time.monotonic()


def report(path: Path) -> None:
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for key in sorted({line["of"] for line in lines}):
        own = [line for line in lines if line["of"] == key]
        print(f"\n{key}")
        names = list(dict.fromkeys(line["window"] for line in own if "window" in line))
        print(f"  {'window':24}{'longest wait, ms':>18}{'at most':>10}{'/ nothing':>22}{'tokens/s':>10}"
              f"{'/ nothing':>22}{'claim':>22}{'the swap, s':>13}")  # fmt: skip
        for name in names:
            print(row(own, name))
        seconds = [line["seconds"] for line in own if "restart" in line]
        if seconds:
            print(f"  restart, from the order to stop to the first answer: median {median(seconds):.1f} s of "
                  f"{len(seconds)}, {min(seconds):.1f} to {max(seconds):.1f}")  # fmt: skip


def row(own: list[dict[str, Any]], name: str) -> str:
    def by_round(window: str, figure: str) -> dict[int, float]:
        return {line["round"]: line[figure] for line in own if line.get("window") == window}

    out, waits = f"  {name:24}", by_round(name, "longest_wait_ms")
    out += f"{median(waits.values()):18.0f}{max(waits.values()):10.0f}"
    for figure in ("longest_wait_ms", "tokens_per_s"):
        found = estimate(paired_ratios(by_round(name, figure), by_round(CALM, figure)))
        placebo = estimate(paired_ratios(by_round(AGAIN, figure), by_round(CALM, figure)))
        if figure == "tokens_per_s":
            out += f"{median(by_round(name, figure).values()):10.0f}"
        out += f"{found!s:>22}" if name != CALM else f"{'':22}"
    out += f"{claim(found, [placebo]) if name not in (CALM, AGAIN) else '':>22}"
    swaps = [line["swap"]["asked_to_ended"] for line in own if line.get("window") == name and line["swap"]]
    return out + (f"{median(swaps):13.2f}" if swaps else "")


def main() -> int:
    a = parse()
    if a.report:
        report(a.file)
        return 0
    served = engine(a.engine)
    of = (f"{served}, attention-{a.attention.upper()}, {a.link}, {a.clients} clients, 2 ranks on {os.cpu_count()} "
          f"cores, {platform.machine()}" + (", busy" if a.busy else ""))  # fmt: skip
    try:
        with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch, a.file.open("a", encoding="utf-8") as file:
            for line in measure(served, a, Path(scratch)):
                file.write(json.dumps({"of": of, **line}) + "\n")
                file.flush()
    except (ServerError, NetworkError, guard.BusyError, ValueError) as error:
        print(f"bench_swap.py: {error}", file=sys.stderr)
        return 1
    report(a.file)
    return 0


if __name__ == "__main__":
    sys.exit(main())
