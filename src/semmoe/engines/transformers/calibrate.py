"""Measure what links and experts cost on this machine, with real collectives and the model's own experts.

All-to-alls of two sizes, there and back, give a tier of links its latency and speed: inside nodes and, where torchrun
started ranks on several nodes, between them. Experts are timed at one size. Every time is that of the slowest rank, as
the median of several rounds. Local processes (gloo) transfer bytes one after the other: `shared` links.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from semmoe.calibration import Experts, Links, Tier
from semmoe.cost import LayerShape, combine_row_bytes, dispatch_row_bytes
from semmoe.engines.transformers.config import expert_size, num_experts
from semmoe.engines.transformers.model import load_model, moe_layers
from semmoe.engines.transformers.parallel import LocalExperts
from semmoe.files import load_json, save_json
from semmoe.placement import linear
from semmoe.runtime.collectives import Communicator, launched_world, world
from semmoe.runtime.dispatch import combine, dispatch
from semmoe.runtime.launch import Reporter, run_ranks
from semmoe.topology import Topology

ROWS = (64, 4096)  # that a rank sends
PAIRS = 1024  # (token, expert) pairs that a rank computes: of 1,024 tokens, if each chooses as many experts as ranks
ROUNDS = 9  # after one that is not counted


@dataclass(frozen=True)
class _Job:
    model: str
    name: str
    scratch: Path  # where rank 0 writes links.json


def calibrate(model: str, ep_size: int, name: str = "this machine") -> Links:
    """Measure `ep_size` local processes with the experts of `model`. Raises ValueError for fewer than two."""
    if ep_size < 2:
        raise ValueError(f"links join ranks: ep_size must be at least 2, not {ep_size}")
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        job = _Job(model, name, Path(scratch))
        run_ranks(ep_size, _rank_main, job, lambda what, done: None, preload=[__name__])
        return load_json(job.scratch / "links.json", Links)


def calibrate_launched(model: str, name: str) -> Links | None:
    """`calibrate` with the ranks that torchrun started; None on all but rank 0."""
    with launched_world() as (comm, device):
        nodes = comm.size // int(os.environ["LOCAL_WORLD_SIZE"])
        links = _measure(comm, device, model, name, Topology(ep_size=comm.size, num_nodes=nodes))
    return None if comm.rank else links


def _rank_main(rank: int, size: int, job: _Job, report: Reporter) -> None:
    with world(rank, size, job.scratch) as (comm, device):
        links = _measure(comm, device, job.model, job.name, Topology(ep_size=size))
        if rank == 0:
            save_json(job.scratch / "links.json", links)


def _measure(comm: Communicator, device: str, path: str, name: str, topology: Topology) -> Links:
    """The links between all ranks, the same on each; every rank must call it."""
    model = load_model(path).to(device)
    width, value_bytes = model.config.hidden_size, model.dtype.itemsize
    shape = LayerShape(hidden_size=width, expert_size=expert_size(model.config), top_k=1)
    rank = _Rank(comm, device, model)
    links = Links(
        name=name,
        kind="measured",
        shared=comm.backend == "gloo",
        source=f"semmoe calibrate, {comm.size} processes, {comm.backend}, torch {torch.__version__}",
        inside_node=Tier(dispatch_latency_us=0, combine_latency_us=0, gigabytes_per_second=1),
        dispatch_bytes_per_value=value_bytes,
        combine_bytes_per_value=value_bytes,
        routing_bytes=4 + value_bytes,  # an int32 id and a weight in the model's type
        experts=Experts(fixed_us=0, teraflops=PAIRS * shape.flops_per_pair / rank.compute(PAIRS) / 1e12),
    )
    row_bytes = dispatch_row_bytes(shape, links) + combine_row_bytes(shape, links)
    moved = [rows * row_bytes * (comm.size if links.shared else 1) for rows in ROWS]
    same, tiers = topology.node_of == topology.node_of[comm.rank], {}
    if topology.num_nodes < comm.size:
        tiers["inside_node"] = fit([rank.exchange(same, rows) for rows in ROWS], moved)
    if topology.num_nodes > 1:
        seconds = [rank.exchange(~same, rows) for rows in ROWS]
        tiers["between_nodes"] = fit(seconds, moved, doublings=np.log2(topology.num_nodes))
    return links.model_copy(update={"inside_node": tiers.get("between_nodes"), **tiers})  # of nodes with one rank


def fit(seconds: Sequence[float], moved: Sequence[float], doublings: float = 1) -> Tier:
    """Return the tier on which these bytes, of two sizes, take these seconds there and back.

    doublings: how often its latency counts. Worked example: 2 and 6 MB take 24 and 64 ms, so 4 MB more take 40 ms: that
    is 0.1 GB/s, and 4 ms are left, 2 ms each way.
    """
    slope = (seconds[1] - seconds[0]) / (moved[1] - moved[0])
    per_byte = max(slope, seconds[1] / moved[1] / 2)  # noise of the small size can at most halve it
    latency_us = max(seconds[0] - moved[0] * per_byte, 0) / 2 / doublings * 1e6
    speed = 1e-9 / per_byte
    return Tier(dispatch_latency_us=latency_us, combine_latency_us=latency_us, gigabytes_per_second=speed)


class _Rank:
    """One rank's part of the measurements, on random hidden states and one choice per token."""

    def __init__(self, comm: Communicator, device: str, model: PreTrainedModel) -> None:
        self._comm, self._device = comm, device
        placed = linear.place(1, num_experts(model.config), comm.size).physical_to_logical_map
        self._held = placed.reshape(comm.size, -1)[comm.rank]
        self._experts = LocalExperts(moe_layers(model)[0].experts, self._held)
        self._width, self._like = model.config.hidden_size, {"dtype": model.dtype, "device": device}

    def exchange(self, reached: np.ndarray, rows: int) -> float:
        """Seconds of a dispatch and a combine in which each rank sends `rows` rows to others `reached` (G,) bool."""
        others = np.flatnonzero(reached & (np.arange(self._comm.size) != self._comm.rank))
        hidden, weights, targets = self._inputs(rows, others)

        def there_and_back() -> None:
            received, handle = dispatch(self._comm, hidden, torch.zeros_like(targets), weights, targets)
            combine(self._comm, received.hidden, handle)

        return self._slowest(there_and_back)

    def compute(self, rows: int) -> float:
        """Seconds of a rank's experts on `rows` rows, all ranks at the same time."""
        hidden, weights, ids = self._inputs(rows, self._held)
        return self._slowest(lambda: self._experts(hidden, ids, weights))

    def _inputs(self, rows: int, choices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states (rows, H), weights (rows, 1), and `choices`, repeated in order (rows, 1)."""
        chosen = torch.from_numpy(choices.astype(np.int64)[np.arange(rows) % len(choices), None]).to(self._device)
        return torch.randn(rows, self._width, **self._like), torch.ones(rows, 1, **self._like), chosen

    def _slowest(self, operation: Callable[[], object]) -> float:
        """Seconds of the slowest rank, as the median of ROUNDS; all ranks begin together."""
        taken = torch.tensor([self._clock(operation) for _ in range(ROUNDS + 1)], dtype=torch.float64)[1:]
        slowest = taken.to(self._device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._comm.group)
        return float(slowest.median())

    def _clock(self, operation: Callable[[], object]) -> float:
        dist.barrier(self._comm.group)
        started = time.perf_counter()
        operation()
        if self._device != "cpu":
            torch.cuda.synchronize()
        return time.perf_counter() - started
