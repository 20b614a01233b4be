"""Measure the speed of every pair of ranks, while all ranks send as they do in an all-to-all.

In step k of G - 1, every rank i sends to rank i + k (modulo G) and receives from rank i - k, so that each ordered pair
is measured once, under the load of the others. Two sizes give each pair a latency and a bandwidth.
"""

import time

import numpy as np
import torch
import torch.distributed as dist

from semmoe.costs.links import PairSpeeds
from semmoe.runtime.collectives import Communicator

SIZES = (1 << 10, 1 << 22)  # bytes of a message
ROUNDS = 5


def measure_pairs(comm: Communicator, device: str, sizes: tuple[int, int] = SIZES) -> PairSpeeds:
    """The speeds of all pairs, known on every rank; each rank measures what it receives."""
    seconds = np.zeros((2, comm.size, comm.size))
    for k in range(1, comm.size):
        for i, size in enumerate(sizes):
            taken = [_step(comm, device, k, size) for _ in range(ROUNDS)]
            seconds[i, (comm.rank - k) % comm.size, comm.rank] = np.median(taken)
    everywhere = torch.from_numpy(seconds).to(device)
    dist.all_reduce(everywhere, group=comm.group)
    return _speeds(everywhere.cpu().numpy(), sizes)


def _step(comm: Communicator, device: str, k: int, size: int) -> float:
    """Seconds until the message from rank - k has arrived."""
    to, origin = (comm.rank + k) % comm.size, (comm.rank - k) % comm.size
    sent, received = torch.zeros((2, size), dtype=torch.uint8, device=device)
    dist.barrier(comm.group)
    started = time.perf_counter()
    *others, last = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, sent, to, comm.group), dist.P2POp(dist.irecv, received, origin, comm.group)]
    )
    last.wait()  # NCCL has one work for both
    if device != "cpu":
        torch.cuda.synchronize()
    taken = time.perf_counter() - started
    for work in others:
        work.wait()
    return taken


def _speeds(seconds: np.ndarray, sizes: tuple[int, int]) -> PairSpeeds:
    """From the seconds (2, G, G) that messages of two sizes took; figures of the diagonal mean nothing."""
    slopes = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
    per_byte = np.maximum(slopes, seconds[1] / sizes[1] / 2) + 1e-14  # noise of the short one cannot do more than halve
    others = ~np.eye(len(per_byte), dtype=bool)
    latency = np.maximum(seconds[0] - sizes[0] * per_byte, 0.0)
    latency = np.maximum(latency - latency[others].min(), 0.0)  # the least is part of the tier's
    np.fill_diagonal(per_byte, per_byte[others].min())
    return PairSpeeds(
        gigabytes_per_second=np.round(1e-9 / per_byte, 6).tolist(), latency_us=np.round(latency * 1e6, 3).tolist()
    )
