"""Measure what links and experts cost on this machine, with real collectives and the model's own experts.

`lab.calibration` measures more, and checks itself.

All-to-alls of two sizes, there and back, give a tier of links its latency and speed: inside nodes and, where torchrun
started ranks on several nodes, between them. Experts are timed at one size. Every time is that of the slowest rank, as
the median of several rounds. Local processes (gloo) transfer bytes one after the other: `shared` links.
"""

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from semmoe.costs.links import Experts, Links, Tier
from semmoe.costs.timing import LayerShape
from semmoe.engines.transformers.config import expert_size, num_experts
from semmoe.engines.transformers.model import load_model, moe_layers, text_config
from semmoe.engines.transformers.parallel import LocalExperts
from semmoe.placement import linear
from semmoe.runtime.collectives import Communicator, launched_world, world
from semmoe.runtime.dispatch import combine, dispatch
from semmoe.runtime.launch import Reporter, run_ranks
from semmoe.topology import Topology

ROWS = (64, 4096)  # that a rank sends
PAIRS = 1024  # (token, expert) pairs that a rank computes: of 1,024 tokens, if each chooses as many experts as ranks
ROUNDS = 9  # after one that is not counted


def calibrate(model: str, ep_size: int, name: str = "this machine") -> Links:
    """Measure `ep_size` local processes with the experts of `model`. Raises ValueError for fewer than two."""
    if ep_size < 2:
        raise ValueError(f"links join ranks: ep_size must be at least 2, not {ep_size}")
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        job = (model, name, Path(scratch))
        return run_ranks(ep_size, _rank_main, job, lambda what, done: None, preload=[__name__])[0]


def _rank_main(rank: int, size: int, job: tuple[str, str, Path], report: Reporter) -> Links:
    model, name, scratch = job
    with world(rank, size, scratch) as (comm, device):
        return _measure(comm, device, model, name, Topology(ep_size=size))


def calibrate_launched(model: str, name: str) -> Links | None:
    """`calibrate` with the ranks that torchrun started; None on all but rank 0."""
    with launched_world() as (comm, device):
        nodes = comm.size // int(os.environ["LOCAL_WORLD_SIZE"])
        links = _measure(comm, device, model, name, Topology(ep_size=comm.size, num_nodes=nodes))
    return None if comm.rank else links


def _measure(comm: Communicator, device: str, path: str, name: str, topology: Topology) -> Links:
    """The links between all ranks, the same on each; every rank must call it."""
    rank = _Rank(comm, load_model(path).to(device))
    here = topology.node_of == topology.node_of[comm.rank]
    between = rank.tier(~here, np.log2(topology.num_nodes)) if topology.num_nodes > 1 else None
    alone = topology.num_nodes == comm.size  # on its node, so that no links inside nodes can be measured
    return Links(
        name=name,
        kind="measured",
        shared=rank.shared,
        source=f"python -m lab calibrate, {comm.size} processes, {comm.backend}, torch {torch.__version__}",
        inside_node=between if between and alone else rank.tier(here),
        between_nodes=between,
        dispatch_bytes_per_value=rank.value_bytes,
        combine_bytes_per_value=rank.value_bytes,
        routing_bytes=rank.routing_bytes,
        experts=Experts(fixed_us=0, teraflops=rank.teraflops()),
    )


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

    def __init__(self, comm: Communicator, model: PreTrainedModel) -> None:
        self._comm, self._config = comm, text_config(model)
        self._like = {"dtype": model.dtype, "device": model.device}
        placed = linear.place(1, num_experts(self._config), comm.size).physical_to_logical_map
        self._held = placed.reshape(comm.size, -1)[comm.rank]
        self._experts = LocalExperts(moe_layers(model)[0].experts, self._held)
        self.shared = comm.backend == "gloo"
        self.value_bytes = model.dtype.itemsize
        self.routing_bytes = 4 + self.value_bytes  # an int32 id and a weight in the model's type

    def tier(self, reached: np.ndarray, doublings: float = 1) -> Tier:
        """The links to the other ranks among `reached` (G,) bool, from a dispatch and a combine of each of ROWS."""
        others = np.flatnonzero(reached & (np.arange(self._comm.size) != self._comm.rank))
        row_bytes = 2 * self._config.hidden_size * self.value_bytes + self.routing_bytes
        moved = [rows * row_bytes * (self._comm.size if self.shared else 1) for rows in ROWS]
        return fit([self._exchange(others, rows) for rows in ROWS], moved, doublings)

    def _exchange(self, others: np.ndarray, rows: int) -> float:
        """Seconds in which each rank sends `rows` rows to `others` and gets them back."""
        hidden, weights, targets = self._inputs(rows, others)

        def there_and_back() -> None:
            received, handle = dispatch(self._comm, hidden, torch.zeros_like(targets), weights, targets)
            combine(self._comm, received.hidden, handle)

        return self._slowest(there_and_back)

    def teraflops(self) -> float:
        """The speed of a rank's experts on PAIRS rows, all ranks at the same time."""
        hidden, weights, ids = self._inputs(PAIRS, self._held)
        seconds = self._slowest(lambda: self._experts(hidden, ids, weights))
        shape = LayerShape(hidden_size=self._config.hidden_size, expert_size=expert_size(self._config), top_k=1)
        return PAIRS * shape.flops_per_pair / seconds / 1e12

    def _inputs(self, rows: int, choices: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Hidden states (rows, H), weights (rows, 1), and `choices`, repeated in order (rows, 1)."""
        chosen = torch.from_numpy(np.resize(choices.astype(np.int64), (rows, 1))).to(self._like["device"])
        return torch.randn(rows, self._config.hidden_size, **self._like), torch.ones(rows, 1, **self._like), chosen

    def _slowest(self, operation: Callable[[], object]) -> float:
        """Seconds of the slowest rank, as the median of ROUNDS; all ranks begin together."""
        taken = []
        for _ in range(ROUNDS + 1):
            dist.barrier(self._comm.group)
            started = time.perf_counter()
            operation()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - started)
        slowest = torch.tensor(taken[1:], dtype=torch.float64, device=self._like["device"])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._comm.group)
        return float(slowest.median())
