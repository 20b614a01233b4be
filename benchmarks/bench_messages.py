"""Messages, rounds and time of the collectives around one MoE layer, against another checkout of semmoe.

    OMP_NUM_THREADS=1 python benchmarks/bench_messages.py --tree OTHER [--tokens 1 16 256] [--hidden 1024]
        [--rate 200mbit] [--rounds 40] [--first] [--smallest]

Two processes over gloo, on loopback and on links held at a rate (network.py; needs root, skipped otherwise). Three
pairs of processes take turns, the first in turn too: one of the other checkout, two of this one, the second as a
placebo. A turn runs LAYERS layers and takes the median of each rank's times, of both ranks the longer; no norm, no
experts: collectives alone. CPU time is that of both. Messages are those that torch was told to send, by rank and layer;
a round is a wait for them. Prints medians, and of ratios the median over rounds with a 90 % bootstrap interval.

Paths: attention-TP with the plan's slices, whose expert ids are gathered with the rows; attention-TP by position,
without ids; attention-DP, every rank with that many tokens of its own. Seven in ten choices of an expert are at home,
half by position.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve()
LAYERS, TOP_K, RANKS = 16, 4, 2
SHUFFLED, POSITION, DP = "attention-TP, shuffled", "attention-TP, by position", "attention-DP"
PATHS = (SHUFFLED, POSITION, DP)
# What no code can go below: a row's attention is summed where its owner is, experts elsewhere need that sum, and their
# results must come back (DP: to the owner; TP: to all ranks, for which combine and all-gather may be one).
LEAST = {SHUFFLED: 3, POSITION: 3, DP: 2}
OLD, NEW, PLACEBO = "other", "this", "this again"


class Counts:
    """What torch was told to send and wait for, whatever semmoe counts itself."""

    def __init__(self) -> None:
        import torch.distributed as dist

        from semmoe.runtime import collectives

        self.messages = self.rounds = 0
        collectives.finish = self._around(collectives.finish, 0, lambda works: bool(works))
        dist.isend = self._around(dist.isend, 1, lambda *a: False)
        dist.all_to_all_single = self._around(dist.all_to_all_single, RANKS - 1, lambda *a: True)

    def _around(self, call: Any, messages: int, waits: Any) -> Any:
        def counted(*given: Any, **named: Any) -> Any:
            self.messages += messages
            self.rounds += waits(*given)
            return call(*given, **named)

        return counted


def layer_of(comm: Any, path: str, tokens: int, hidden: int) -> Any:
    """A function that runs the collectives of one layer."""
    import torch

    from semmoe.runtime import collectives, dispatch

    rng = np.random.default_rng(tokens)
    slots = np.arange(-(-tokens // RANKS) * RANKS) % RANKS
    ranks = rng.permutation(slots)[:tokens] if path == SHUFFLED else np.sort(slots)[:tokens]
    handle = collectives.shuffle_handle(ranks, RANKS, comm.rank)
    rows = tokens if path == DP else len(handle.mine)
    home = rng.random((RANKS, rows, TOP_K))[comm.rank] < (0.5 if path == POSITION else 0.7)
    targets = torch.from_numpy(np.where(home, comm.rank, 1 - comm.rank))
    ids, weights = torch.randint(0, 64, (rows, TOP_K)), torch.rand(rows, TOP_K)
    partial_sums, own = torch.randn(tokens, hidden), torch.randn(rows, hidden)

    def expert_all_to_all(stream: torch.Tensor) -> torch.Tensor:
        received, sent = dispatch.dispatch(comm, stream, ids, weights, targets)
        return dispatch.combine(comm, received.hidden, sent)

    def layer() -> None:
        if path == DP:
            expert_all_to_all(own)
            return
        out = expert_all_to_all(collectives.shuffled_reduce_scatter(comm, partial_sums, handle))
        columns = [out, ids.to(torch.int16)] if path == SHUFFLED else [out]
        collectives.shuffled_all_gathers(comm, columns, handle)

    return layer


def work(rank: int, store: str, network: str) -> None:
    """One process: for every line of input one turn, answered with seconds, messages and rounds per layer."""
    if network:
        from network import Network, enter

        enter(Network(RANKS, "", owner=int(network)), rank)
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    counts = Counts()
    from semmoe.runtime.collectives import Communicator

    dist.init_process_group("gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS)
    comm, layers = Communicator(dist.group.WORLD, rank, RANKS), {}
    for line in sys.stdin:
        path, tokens, hidden = json.loads(line)
        layer = layers.setdefault(line, None) or layer_of(comm, path, tokens, hidden)
        layers[line] = layer
        dist.barrier()
        counts.messages = counts.rounds = 0
        times, used = [time.perf_counter()], time.process_time()
        for _ in range(LAYERS):
            layer()
            times.append(time.perf_counter())
        counted = [n / LAYERS for n in (time.process_time() - used, counts.messages, counts.rounds)]
        print(json.dumps([float(np.median(np.diff(times))), *counted]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


class Pair:
    """The two processes of one checkout."""

    def __init__(self, tree: Path, store: str, network: str) -> None:
        environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}:{HERE.parent}"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, str(HERE), "--worker", str(rank), store, network],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
            )
            for rank in range(RANKS)
        ]  # fmt: skip

    def turn(self, *job: Any) -> list[float]:
        """Seconds of the slower rank, CPU seconds of both, most messages, most rounds: per layer."""
        for process in self._processes:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
        found = np.array([json.loads(process.stdout.readline()) for process in self._processes])
        return [found[:, 0].max(), found[:, 1].sum(), found[:, 2].max(), found[:, 3].max()]

    def close(self) -> None:
        for process in self._processes:
            process.stdin.close()
        for process in self._processes:  # each waits for the others before it ends
            process.wait()


@contextmanager
def pairs(trees: dict[str, Path], network: str) -> Iterator[dict[str, Pair]]:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        found = {}
        for i, (name, tree) in enumerate(trees.items()):
            found[name] = Pair(tree, f"{scratch}/store{i}", network)
            stack.callback(found[name].close)
        yield found


def ratio(ours: np.ndarray, theirs: np.ndarray) -> list[float]:
    """Median of ours / theirs over rounds, and the ends of its 90 % bootstrap interval."""
    ratios = ours / theirs
    drawn = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), axis=1)
    return [float(x) for x in (np.median(ratios), *np.quantile(drawn, (0.05, 0.95)))]


def compare(found: dict[str, Pair], where: str, path: str, tokens: int, a: argparse.Namespace) -> dict[str, Any]:
    names, counts = list(found), {}
    times, used = np.zeros((2, a.rounds, len(found)))
    for i in range(-2, a.rounds):  # two rounds to warm up
        for j in range(len(names)):
            k = (i + j) % len(names)
            at = max(i, 0), k
            times[at], used[at], *counts[names[k]] = found[names[k]].turn(path, tokens, a.hidden)
    by, cpu = dict(zip(names, times.T, strict=True)), dict(zip(names, used.T, strict=True))
    return {
        "network": where, "path": path, "tokens": tokens,
        "us": {name: float(np.median(t)) * 1e6 for name, t in by.items()},
        "cpu_us": {name: float(np.median(t)) * 1e6 for name, t in cpu.items()},
        "messages": {name: c[0] for name, c in counts.items()}, "rounds": {name: c[1] for name, c in counts.items()},
        "least": LEAST[path], "ratio": ratio(by[NEW], by[OLD]), "placebo": ratio(by[PLACEBO], by[NEW]),
    }  # fmt: skip


def measure(a: argparse.Namespace, where: str, network: str = "") -> Iterator[dict[str, Any]]:
    trees = {OLD: a.tree.resolve(), NEW: HERE.parents[1], PLACEBO: HERE.parents[1]}
    with pairs(trees, network) as found:
        for path in PATHS:
            for tokens in a.tokens:
                row = compare(found, where, path, tokens, a)
                show(row)
                yield row


def show(row: dict[str, Any]) -> None:
    per = "  ".join(f"{row[what][OLD]:.0f} -> {row[what][NEW]:.0f}" for what in ("rounds", "messages"))
    of = {name: "{:.3f} [{:.3f}, {:.3f}]".format(*row[name]) for name in ("ratio", "placebo")}
    print(f"{row['network']:16} {row['path']:26} {row['tokens']:5d}  {per}  {row['least']:5d}  "
          f"{row['us'][OLD]:11.0f} {row['us'][NEW]:7.0f}  {of['ratio']}  {of['placebo']}  "
          f"{row['cpu_us'][OLD]:14.0f} {row['cpu_us'][NEW]:7.0f}", flush=True)  # fmt: skip


def measure_slow(a: argparse.Namespace) -> list[dict[str, Any]]:
    from network import NetworkError, slow_network

    try:
        with slow_network(RANKS, a.rate) as network:
            return list(measure(argparse.Namespace(**{**vars(a), "rounds": max(a.rounds // 3, 2)}),
                                str(network), str(network.owner)))  # fmt: skip
    except NetworkError as error:
        print(f"{a.rate}: skipped, {error}", file=sys.stderr)
        return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", type=Path, required=True, help="the other checkout")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 16, 256], help="of the group, or (DP) of a rank")
    parser.add_argument("--hidden", type=int, default=1024, help="fp32 columns of a row")
    parser.add_argument("--rate", default="200mbit", help="of links of the slow network; empty: none")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--first", action="store_true", help="before all else on these cores; needs root")
    parser.add_argument("--smallest", action="store_true", help="few tokens and rounds, to see that it runs")
    parser.add_argument("--note", default="", help="printed with the configuration")
    a = parser.parse_args()
    if a.first:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    if a.smallest:
        a.tokens, a.rounds, a.rate = [1], 2, ""
    print(f"{RANKS} processes on {os.cpu_count()} cores, {platform.machine()}, {LAYERS} layers a turn, "
          f"hidden {a.hidden}, top-{TOP_K}, {a.rounds} rounds{'; ' if a.note else ''}{a.note}")  # fmt: skip
    print(f"{'network':16} {'path':26}tokens  rounds  messages  least   us: before   after  ratio                 "
          f"placebo               CPU us: before   after")  # fmt: skip
    rows = [*measure(a, "loopback"), *(measure_slow(a) if a.rate else [])]
    print(json.dumps(rows))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(int(sys.argv[2]), *sys.argv[3:])
    else:
        main()
