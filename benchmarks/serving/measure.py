"""Rounds: servers that are kept, of which one runs at a time, under the same load one after the other."""

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from serving import guard
from serving.claims import order
from serving.client import Answers, run
from serving.configurations import VANILLA, Planner
from serving.engine import RANKS, Engine
from serving.links import FASTEST, as_tc, nearest, search
from serving.loads import Load, draw
from serving.network import Network, set_rate, slow_network
from serving.pieces import AT_ONCE, MAIN, SHARES, Piece, Settings, Workload
from serving.records import Links, Records, Run, share_of
from serving.server import Server, counters, link_bytes, serving

SETTLE = 1.2  # seconds: counters are published every second
REPEATS = 2  # of a round that was disturbed
Servers = dict[str, Server]


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all pieces of a measurement share; busy: measured although others take the cores."""

    engine: Engine
    settings: Settings
    planner: Planner
    prompts: list[list[int]]  # that plans were not profiled on
    busy: bool
    revision: str = ""


@contextlib.contextmanager
def bench(engine: Engine, s: Settings, seen: list, held_out: list, busy: bool) -> Iterator[Bench]:
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        planner = Planner(seen, Path(scratch))
        yield Bench(engine=engine, settings=s, planner=planner, prompts=held_out, busy=busy, revision=revision())


def revision() -> str:
    """The commit that is measured, and whether files differ from it; nothing outside a checkout."""
    words = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def say(text: str) -> None:
    print(f"  {text}", file=sys.stderr, flush=True)


@contextlib.contextmanager
def kept(b: Bench, names: tuple[str, ...], attention: str, network: Network) -> Iterator[Servers]:
    """Servers that have warmed up and are stopped. Raises ServerError."""
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="semmoe-")))
        servers: Servers = {}
        for place, name in enumerate(names):
            up, begin = b.planner.set_up(name, attention, network.hosts), time.monotonic()
            # Nothing is cached: the same prompts come to every configuration again.
            server = serving(b.engine, up, scratch / str(place), b.engine.UNCACHED, network, place=place)
            servers[name] = stack.enter_context(server)
            servers[name].seat(servers[name].ranks(b.engine.RANK))
            warm_up(b, servers[name])
            servers[name].pause()
            say(f"{attention}, {name}: up and warm after {time.monotonic() - begin:.0f} s")
        yield servers


def warm_up(b: Bench, server: Server) -> None:
    for number in (-2, -1):
        run(server, draw(b.prompts, b.settings.warmup, 1.0, number, at_once=True), b.settings.output_tokens)


@contextlib.contextmanager
def awake(server: Server) -> Iterator[None]:
    """While the block runs, so does the server."""
    server.resume()
    try:
        yield
        time.sleep(SETTLE)
    finally:
        server.pause()


def counted(b: Bench, server: Server, load: Load, network: Network) -> tuple[Answers, dict[str, float], int]:
    """A run, what the ranks counted in it, and the bytes that the links carried."""
    before, sent = counters(server.folder), link_bytes(network)
    with awake(server):
        answers = run(server, load, b.settings.output_tokens)
        sent = link_bytes(network) - sent
    after = counters(server.folder)
    return answers, {name: value - before.get(name, 0) for name, value in after.items()}, sent


def load_of(b: Bench, workload: Workload, links: Links, number: int) -> Load:
    s, length = b.settings, workload.length
    at_once = workload.arrivals == AT_ONCE
    rate = s.length_rate if length else links.at_once if at_once else links.rates[workload.arrivals]
    return draw(b.prompts, rate, s.seconds, number, at_once, length)


def measure(b: Bench, records: Records, piece: Piece) -> None:
    """Measure the rounds of a piece that are missing; raises BusyError, ServerError and NetworkError."""
    links = records.links[piece.attention]
    missing = list(missing_rounds(b, records, piece))
    if not missing:
        return
    with (
        slow_network(piece.ranks, as_tc(links.links[str(MAIN)])) as network,
        kept(b, piece.names, piece.attention, network) as servers,
    ):
        for workload, number in missing:
            set_rate(network, as_tc(links.links[str(workload.share)]))
            load, begin = load_of(b, workload, links, number), time.monotonic()
            runs = undisturbed(b, piece, workload, number, servers, load, network)
            records.add(runs)
            say(f"{piece.name}, {workload}, round {number + 1}: {time.monotonic() - begin:.0f} s; " + told(runs))


def missing_rounds(b: Bench, records: Records, piece: Piece) -> Iterator[tuple[Workload, int]]:
    """Rounds that are not in the file, those of all workloads in turn."""
    have = {w: records.rounds(piece.name, str(w), piece.names, b.busy) for w in piece.workloads}
    for number in range(piece.num_rounds(b.settings)):
        yield from ((workload, number) for workload in piece.workloads if number not in have[workload])


def undisturbed(
    b: Bench, piece: Piece, workload: Workload, number: int, servers: Servers, load: Load, network: Network
) -> list[Run]:
    """A round, again if others disturbed it. Raises BusyError if they do not stop."""
    for _ in range(REPEATS + 1):
        if not b.busy:
            guard.check()
        runs = one_round(b, piece, workload, number, servers, load, network)
        if b.busy or not runs[0].disturbed:
            return runs
        say(f"round {number + 1} was disturbed by {'; '.join(runs[0].disturbed)}")
    raise guard.BusyError("every try of a round was disturbed, the last by " + "; ".join(runs[0].disturbed))


def one_round(
    b: Bench, piece: Piece, workload: Workload, number: int, servers: Servers, load: Load, network: Network
) -> list[Run]:
    before, found = guard.snapshot(), {}
    names = order(piece.names, number)
    for name in names:
        found[name] = counted(b, servers[name], load, network)
    disturbed = guard.since(before)
    return [
        Run(piece=piece.name, workload=str(workload), round=number, name=name, place=names.index(name),
            seconds=answers.seconds, requests=answers.requests, counters=counts, link_bytes=sent, disturbed=disturbed,
            revision=b.revision)
        for name, (answers, counts, sent) in found.items()
    ]  # fmt: skip


def told(runs: list[Run]) -> str:
    """A line for who watches."""
    return ", ".join(f"{r.name} {r.throughput:.1f} requests/s" + (f" ({r.share:.0%})" if r.share else "") for r in runs)


def find_links(b: Bench, attention: str, chosen: dict[str, float] | None = None) -> Links:
    """The links, at which vanilla spends the shares in the all-to-all, and the rates that follow from the slowest.

    chosen: links (Mbit/s) by share that are there already, of another attention.
    """
    with slow_network(RANKS, as_tc(FASTEST)) as network, kept(b, (VANILLA,), attention, network) as servers:
        if not b.busy:
            guard.check()
        probes = Probes(b, attention, servers[VANILLA], network)
        if chosen is None:
            seen = search(probes.share, [share / 100 for share in SHARES], b.settings.probes)
            chosen = {str(share): nearest(seen, share / 100) for share in SHARES}
        shares = {name: round(probes.share(rate), 3) for name, rate in chosen.items()}
        at_once = float(f"{median(probes.throughput(chosen[str(MAIN)]) for _ in range(3)):.3g}")
    return Links(
        attention=attention, links=chosen, shares=shares, at_once=at_once, probes=probes.told,
        rates={name: float(f"{part * at_once:.3g}") for name, part in b.settings.fractions},
    )  # fmt: skip


class Probes:
    """Runs of vanilla on one link after the other, requests all at once."""

    def __init__(self, b: Bench, attention: str, server: Server, network: Network) -> None:
        self._bench, self._attention, self._server, self._network = b, attention, server, network
        self.told: list[tuple[float, float]] = []  # link and share
        self._count = self._bench.settings.warmup
        self._count = max(round(self.throughput(FASTEST) * b.settings.seconds / 2), 8)
        self.told.clear()

    def share(self, rate: float) -> float:
        return self._run(rate)[0]

    def throughput(self, rate: float) -> float:
        return self._run(rate)[1]

    def _run(self, rate: float) -> tuple[float, float]:
        set_rate(self._network, as_tc(rate))
        load = draw(self._bench.prompts, self._count, 1.0, 0, at_once=True)
        answers, counts, _ = counted(self._bench, self._server, load, self._network)
        share = share_of(counts, answers.seconds) or 0.0
        say(f"{self._attention}, links of {rate:g} Mbit/s: {share:.1%} of the time in the all-to-all")
        self.told.append((rate, round(share, 3)))
        return share, self._count / answers.seconds
