"""What links and experts cost here: real collectives between real processes, and the model's own experts.

Every time is that of the slowest rank, the median of several rounds; lines are fitted to them with relative errors, so
that small and large batches count alike. Processes of one machine pass their bytes through one memory, so the links
are `shared`. At the end a layer of its own, with skewed routing and half of it local, is predicted and measured.
"""

import json
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from semmoe.core import Placement, Topology, require
from semmoe.cost import Experts, LayerShape, Links, Tier, layer_time
from semmoe.engines.transformers.model import expert_size, load_model, moe_layers, num_experts
from semmoe.engines.transformers.parallel import LocalExperts
from semmoe.metrics import layer_traffic
from semmoe.runtime.collectives import Communicator, world
from semmoe.runtime.dispatch import combine, dispatch
from semmoe.runtime.launch import Reporter, run_ranks

TOKENS = (16, 64, 256, 1024, 4096)  # of a rank
ROUNDS = 15


@dataclass(frozen=True)
class _Job:
    model: str
    scratch: str


@dataclass(frozen=True, kw_only=True)
class Calibration:
    links: Links
    shape: LayerShape
    predicted: float  # seconds of the layer that the fit has not seen
    measured: float


def calibrate(
    model: str, ep_size: int, progress: Callable[[int], None] = lambda sizes: None, name: str = "this machine"
) -> Calibration:
    """Measure `ep_size` local processes with the experts of `model`; `progress` is called for each of len(TOKENS)."""
    require(ep_size >= 2, f"links join ranks: ep_size must be at least 2, not {ep_size}")
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        run_ranks(ep_size, _rank_main, _Job(model, scratch), lambda what, done: progress(done), preload=[__name__])
        found = json.loads(Path(scratch, "times.json").read_text())
    shape = LayerShape(**found["shape"])
    links = _fit(found, shape, name, ep_size)
    rows, busiest = np.array(found["layer"]["rows"]), found["layer"]["busiest"]
    predicted = layer_time(rows, busiest, shape, Topology(ep_size=ep_size), links).total
    return Calibration(links=links, shape=shape, predicted=predicted, measured=found["layer"]["seconds"])


def _fit(found: dict, shape: LayerShape, name: str, ep_size: int) -> Links:
    times = {kind: np.array(values) for kind, values in found["times"].items()}
    bytes_ = {kind: np.array(found["bytes"][kind]) for kind in ("dispatch", "combine", "all_reduce")}
    latency, slope = _lines([(bytes_[kind], times[kind]) for kind in ("dispatch", "combine")])
    all_reduce, _ = _lines([(bytes_["all_reduce"], times["all_reduce"])])
    fixed, per_pair = _lines([(np.array(found["pairs"], np.float64), times["experts"])])
    width = found["value_bytes"]
    return Links(
        name=name, kind="measured", shared=True,
        source=f"semmoe calibrate, {ep_size} processes, {found['backend']}, torch {torch.__version__}",
        inside_node=Tier(
            dispatch_latency_us=latency[0] * 1e6, combine_latency_us=latency[1] * 1e6,
            all_reduce_latency_us=all_reduce[0] * 1e6, gigabytes_per_second=1e-9 / slope,
        ),
        dispatch_bytes_per_value=width, combine_bytes_per_value=width, routing_bytes=4 + width,
        experts=Experts(fixed_us=fixed[0] * 1e6, teraflops=shape.flops_per_pair / per_pair / 1e12),
    )  # fmt: skip


def _lines(series: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[float], float]:
    """Intercepts of lines through each (x, seconds), at least zero, and their common slope; relative errors count."""
    blocks = []
    for i, (x, seconds) in enumerate(series):
        ones = np.zeros((len(x), len(series)))
        ones[:, i] = 1
        blocks.append(np.column_stack([ones, x]) / seconds[:, None])
    from scipy.optimize import nnls

    scale = np.abs(np.concatenate(blocks)).max(axis=0)
    solution, _ = nnls(np.concatenate(blocks) / scale, np.ones(sum(len(b) for b in blocks)))
    *intercepts, slope = solution / scale
    return list(intercepts), max(float(slope), 1e-15)


def _rank_main(rank: int, size: int, job: _Job, report: Reporter) -> None:
    with world(rank, size, Path(job.scratch)) as (comm, device):
        model = load_model(job.model).to(device)
        block, config = moe_layers(model)[0], model.config
        E, K, H = num_experts(config), config.num_experts_per_tok, config.hidden_size
        placement = Placement.from_labels(np.sort(np.arange(E) % size)[None], size)
        held = placement.physical_to_logical_map.reshape(size, -1)[rank]
        layer = _Layer(comm, LocalExperts(block.experts, held), placement.hosts[0].argmax(axis=0), E, K, H, device)
        found = layer.measure(report if rank == 0 else lambda what, done: None)
        if rank == 0:
            found["shape"] = {"hidden_size": H, "expert_size": expert_size(config), "top_k": K}
            found |= {"value_bytes": model.dtype.itemsize, "backend": dist.get_backend(comm.group)}
            Path(job.scratch, "times.json").write_text(json.dumps(found))


class _Layer:
    """One rank's part of one MoE layer, fed with routing drawn at random."""

    def __init__(self, comm: Communicator, experts: LocalExperts, rank_of, E: int, K: int, H: int, device: str) -> None:
        self._comm, self._experts, self._rank_of, self._E, self._K, self._H = comm, experts, rank_of, E, K, H
        self._serving = torch.from_numpy(rank_of.astype(np.int64)).to(device)
        self._device, self._rng = device, np.random.default_rng(comm.rank)

    def measure(self, report: Reporter) -> dict:
        kinds = ("dispatch", "experts", "combine", "all_reduce")
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        sent: dict[str, list[float]] = {kind: [] for kind in ("dispatch", "combine", "all_reduce")}
        pairs = []
        for tokens in TOKENS:
            seconds, bytes_, busiest, _ = self._round_trips(self._uniform(tokens))
            for kind in kinds:
                times[kind].append(seconds[kind])
            for kind, total in bytes_.items():
                sent[kind].append(total)
            pairs.append(busiest)
            report("measuring", 1)
        seconds, _, busiest, rows = self._round_trips(self._skewed(TOKENS[2] + TOKENS[1]))
        layer = sum(seconds[kind] for kind in ("dispatch", "experts", "combine"))
        return {"times": times, "bytes": sent, "pairs": pairs,
                "layer": {"seconds": layer, "busiest": busiest, "rows": rows.tolist()}}  # fmt: skip

    def _uniform(self, tokens: int) -> np.ndarray:
        return self._rng.random((tokens, self._E)).argsort(axis=1)[:, : self._K]

    def _skewed(self, tokens: int) -> np.ndarray:
        """Choices that favour this rank's experts and, on every rank, the first ones."""
        taste = 1.0 * (self._rank_of == self._comm.rank) - 0.5 * np.arange(self._E) / self._E
        return (-(taste + self._rng.gumbel(size=(tokens, self._E)) * 0.5)).argsort(axis=1)[:, : self._K]

    def _round_trips(self, chosen: np.ndarray):
        """(seconds by kind, bytes of all ranks by kind, pairs of the busiest rank, rows (G, G)) of one routing."""
        ids = torch.from_numpy(chosen.copy()).to(self._device)
        hidden = torch.randn(len(ids), self._H, device=self._device)
        weights = torch.full(ids.shape, 1 / self._K, device=self._device)
        rounds = []
        for _ in range(ROUNDS):
            self._comm.sent.clear()
            rounds.append(self._timed(hidden, ids, weights))
        slowest = self._over_ranks(torch.tensor(rounds, dtype=torch.float64), dist.ReduceOp.MAX)
        seconds = dict(zip(("dispatch", "experts", "combine", "all_reduce"), slowest.median(dim=0).values.tolist(),
                           strict=True))  # fmt: skip
        kinds = ("dispatch", "combine", "all_reduce")
        own = torch.tensor([float(self._comm.sent[kind]) for kind in kinds], dtype=torch.float64)
        total = self._over_ranks(own, dist.ReduceOp.SUM)
        home = np.full(len(chosen), self._comm.rank)
        traffic = layer_traffic(chosen, home, np.tile(self._rank_of, (self._comm.size, 1)).astype(np.int16))
        load = self._over_ranks(torch.from_numpy(traffic.load), dist.ReduceOp.SUM)
        rows = self._over_ranks(torch.from_numpy(traffic.rows), dist.ReduceOp.SUM)
        return seconds, dict(zip(kinds, total.tolist(), strict=True)), float(load.max()), rows.numpy()

    def _timed(self, hidden, ids, weights) -> list[float]:
        """Seconds of dispatch, experts, combine and an all-reduce of as many rows, each begun together."""
        clock = [self._now()]
        received, handle = dispatch(self._comm, hidden, ids, weights, self._serving)
        clock.append(self._now())
        results = self._experts(received.hidden, received.expert_ids, received.weights)
        clock.append(self._now())
        combine(self._comm, results, handle)
        clock.append(self._now())
        self._comm.all_reduce(hidden)
        clock.append(self._now())
        return np.diff(clock).tolist()

    def _now(self) -> float:
        if self._device != "cpu":
            torch.cuda.synchronize()
        dist.barrier(self._comm.group)
        return time.perf_counter()

    def _over_ranks(self, values: torch.Tensor, operation) -> torch.Tensor:
        on_device = values.to(self._device)
        dist.all_reduce(on_device, operation, group=self._comm.group)
        return on_device.cpu()
