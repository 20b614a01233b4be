"""How long the runtime's parts take on local processes: argsort of rank ids, the shuffled pair, the expert all-to-all.

Argsort: this process, against `torch.argsort(stable=True)`, which gives the permutation only. Pair: shuffled
reduce-scatter + all-gather, against the plain two of the same implementation and against gloo's, interleaved round by
round; a ratio is the median over rounds of the slowest rank's times, with its 95 % bootstrap interval. All-to-all:
dispatch + combine where a share of the rows stays, with the all-reduce of the same rows next to it.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from semmoe.runtime.collectives import Communicator
from semmoe.runtime.dispatch import combine, dispatch
from semmoe.runtime.kernels.on_cpu import order_of_real
from semmoe.runtime.launch import Reporter, run_ranks
from semmoe.runtime.shuffle import shuffle_handle, shuffled_all_gather, take_rows

# torch 2.13 renamed both; earlier versions have the old names only.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

WIDTH = 2048  # fp32 columns of a row: 8 KiB
TOP_K = 1  # one destination a token: local share is then the share of rows that stay


@dataclass(frozen=True)
class Job:
    sizes: tuple[int, ...]
    shares: tuple[float, ...]
    share_bytes: int
    rounds: int
    scratch: str


def _once(job: Callable[[], object]) -> float:
    start = time.perf_counter()
    job()
    return time.perf_counter() - start


def argsort_times(rows: int, size: int, calls: int) -> dict:
    """Calls take turns, so that all meet the same memory."""
    ranks = torch.from_numpy(np.random.default_rng(rows).integers(0, size, rows))
    real = torch.ones(rows, dtype=torch.bool)
    jobs = (lambda: order_of_real(ranks, real, size), lambda: torch.argsort(ranks, stable=True))
    times = [[_once(job) for job in jobs] for _ in range(calls + 1)][1:]
    ours, theirs = (1e6 * statistics.median(of) for of in zip(*times, strict=True))
    return {"rows": rows, "ranks": size, "us": ours, "torch_us": theirs, "ratio": theirs / ours}


def interleaved(comm: Communicator, jobs: dict[str, Callable[[], object]], rounds: int) -> dict[str, np.ndarray]:
    """Seconds (rounds,) of each job on its slowest rank; every round runs all jobs, the first in turn."""
    names, times = list(jobs), np.zeros((rounds, len(jobs)))
    for i in range(-3, rounds):  # three rounds to warm up
        for j in range(len(names)):
            k = (i + j) % len(names)
            dist.barrier(group=comm.group)
            seconds = _once(jobs[names[k]])
            if i >= 0:
                times[i, k] = seconds
    slowest = torch.from_numpy(times)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX, group=comm.group)
    return dict(zip(names, slowest.numpy().T, strict=True))


def paired_ratio(ours: np.ndarray, theirs: np.ndarray, seed: int = 0) -> list[float]:
    """Median of theirs / ours over rounds, and the ends of its 95 % bootstrap interval."""
    ratios = theirs / ours
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
    return [float(x) for x in (np.median(ratios), *np.quantile(medians, (0.025, 0.975)))]


def pair_times(comm: Communicator, size: int, rounds: int) -> dict:
    """Reduce-scatter and all-gather of `size` bytes put in by every rank."""
    tokens = max(size // (4 * WIDTH) // comm.size, 1) * comm.size
    partial = torch.randn(tokens, WIDTH)
    slots = np.repeat(np.arange(comm.size), tokens // comm.size)
    ranks = torch.from_numpy(np.random.default_rng(0).permutation(slots))
    handle = shuffle_handle(ranks, torch.ones(tokens, dtype=torch.bool), comm.size, comm.rank)
    part, whole = partial.new_empty((tokens // comm.size, WIDTH)), torch.empty_like(partial)

    def scatter() -> torch.Tensor:
        return comm.reduce_scatter(take_rows(partial, handle.order))

    def gloo_scatter() -> None:
        reduce_scatter(part, partial, group=comm.group)

    def gloo_pair() -> None:
        gloo_scatter()
        all_gather(whole, part, group=comm.group)

    times = interleaved(
        comm,
        {
            "shuffled": lambda: shuffled_all_gather(comm, [scatter()], handle),
            "plain": lambda: comm.all_gather([comm.reduce_scatter(partial)]),
            "gloo": gloo_pair,
            "srs": scatter,
            "gloo rs": gloo_scatter,
        },
        rounds,
    )
    return {
        "bytes": tokens * WIDTH * 4,
        "ranks": comm.size,
        "us": {name: float(np.median(t)) * 1e6 for name, t in times.items()},
        "shuffled_over_plain": paired_ratio(times["plain"], times["shuffled"]),
        "gloo_over_shuffled": paired_ratio(times["shuffled"], times["gloo"]),
        "gloo_rs_over_srs": paired_ratio(times["srs"], times["gloo rs"]),
    }


def share_times(comm: Communicator, size: int, share: float, rounds: int) -> dict:
    """Dispatch and combine of `size` bytes of rows, `share` of them for this rank's own experts."""
    tokens, rng = size // (4 * WIDTH), np.random.default_rng(comm.rank)
    others = (comm.rank + rng.integers(1, max(comm.size, 2), tokens)) % comm.size
    targets = torch.from_numpy(np.where(np.arange(tokens) < share * tokens, comm.rank, others))[:, None]
    hidden, weights = torch.randn(tokens, WIDTH), torch.ones(tokens, TOP_K)

    def all_to_all() -> None:
        received, handle = dispatch(comm, hidden, targets, weights, targets)
        combine(comm, received.hidden, handle)

    whole = torch.zeros(tokens * comm.size, WIDTH)  # every rank holds all rows and adds its experts' part

    def all_reduce() -> None:
        dist.all_reduce(whole, group=comm.group)

    times = interleaved(comm, {"all-to-all": all_to_all, "all-reduce": all_reduce}, rounds)
    us = {name: float(np.median(t)) * 1e6 for name, t in times.items()}
    return {"share": share, "bytes": size, "ranks": comm.size, "us": us}


def rank_main(rank: int, size: int, job: Job, report: Reporter) -> dict[str, list[dict]]:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(Path(job.scratch) / f"store-{size}"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(minutes=10))
    comm = Communicator(dist.group.WORLD, rank, size)
    results = {
        "pair": [pair_times(comm, bytes_, job.rounds) for bytes_ in job.sizes],
        "share": [share_times(comm, job.share_bytes, share, job.rounds) for share in job.shares],
    }
    dist.barrier()
    dist.destroy_process_group()
    return results


def measure(
    size: int,
    sizes: Sequence[int],
    shares: Sequence[float],
    share_bytes: int,
    rounds: int,
    network: str = "loopback",
    prepare: Callable[[int], None] | None = None,
) -> dict[str, list[dict]]:
    """`pair_times` of each of `sizes` and `share_times` of each of `shares`, on `size` processes; prepare: as of
    `run_ranks`, what puts a process into the network that `network` names."""
    with tempfile.TemporaryDirectory() as scratch:
        job = Job(tuple(sizes), tuple(shares), share_bytes, rounds, scratch)
        preload = ["semmoe.runtime.dispatch"]
        found = run_ranks(size, rank_main, job, lambda what, done: None, preload=preload, prepare=prepare)[0]
    for row in found["pair"] + found["share"]:
        row["network"] = network
    return found
