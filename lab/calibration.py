"""Measure links and experts at five sizes, all-reduces and pairs of ranks, and check the fit on another layer.

`lab.calibrate` measures less. Real collectives and the model's own experts are timed.

Every time is that of the slowest rank, as the median of several rounds, for batches of uniform routing. Lines are
fitted to the times with relative errors, so that small and large batches have equal weight. Processes that share the
memory of one machine (gloo) transfer their bytes one after the other, so that such links are `shared`. At the end a
layer that was not part of the fit, with skewed and half local routing, is both predicted and measured.

Where ranks' links differ, the speed of every pair is measured too (`pairs`); the fit then corrects all of them by one
factor.
"""

import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from scipy.optimize import nnls

from lab.pairs import measure_pairs
from semmoe.costs import timing
from semmoe.costs.links import Experts, Links, PairSpeeds, Tier, seconds_per_gigabyte
from semmoe.costs.metrics import layer_traffic
from semmoe.costs.timing import LayerShape
from semmoe.engines.transformers.config import expert_size, num_experts
from semmoe.engines.transformers.model import load_model, moe_layers
from semmoe.engines.transformers.parallel import LocalExperts
from semmoe.placement import linear
from semmoe.runtime.collectives import Communicator, world
from semmoe.runtime.dispatch import combine, dispatch
from semmoe.runtime.launch import Reporter, run_ranks
from semmoe.topology import Topology

TOKENS = (16, 64, 256, 1024, 4096)  # per rank
UNSEEN = 320  # per rank, in the layer that checks the fit
ROUNDS, FEWEST_ROUNDS, MOST_SECONDS = 15, 3, 3.0  # of a batch; slow links have fewer rounds
PARTS = ("dispatch", "experts", "combine", "all_reduce")
TOLERATED = 0.15  # relative error of the predicted layer above which the fit is doubtful


@dataclass(frozen=True, kw_only=True)
class Calibration:
    links: Links
    shape: LayerShape
    predicted: float  # seconds predicted for the layer that was not part of the fit
    measured: float

    @property
    def error(self) -> float:
        """Error of the prediction relative to the measurement; negative if the prediction is too short."""
        return self.predicted / self.measured - 1

    @property
    def doubtful(self) -> bool:
        return abs(self.error) > TOLERATED


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One batch of routing through one layer, on all ranks."""

    seconds: dict[str, float]  # by name in PARTS: time of the slowest rank, median of rounds
    rows: list[list[int]]  # (G, G) dispatched
    busiest_pairs: int  # (token, expert) pairs of the most loaded rank
    tokens: int  # tokens of all ranks, which is also the number of rows that are all-reduced

    @property
    def layer_seconds(self) -> float:
        return self.seconds["dispatch"] + self.seconds["experts"] + self.seconds["combine"]


@dataclass(frozen=True)
class _Job:
    model: str
    scratch: str
    pairs: bool


def calibrate(
    model: str,
    ep_size: int,
    progress: Callable[[int], None] = lambda sizes: None,
    name: str = "this machine",
    pairs: bool = False,
    prepare: Callable[[int], None] | None = None,
) -> Calibration:
    """Measure `ep_size` local processes with the experts of `model`; `progress` is called for each of len(TOKENS).

    pairs: also measure the speed of each pair of ranks. prepare: same as in `run_ranks`.
    """
    if ep_size < 2:
        raise ValueError(f"links join ranks: ep_size must be at least 2, not {ep_size}")
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        job = _Job(model, scratch, pairs)
        results = run_ranks(ep_size, _rank_main, job, lambda _, n: progress(n), preload=[__name__], prepare=prepare)
    return _calibration(results[0], Topology(ep_size=ep_size), name)


def _calibration(found: dict[str, Any], topology: Topology, name: str) -> Calibration:
    shape = LayerShape(**found["shape"])
    *samples, unseen = [Sample(**sample) for sample in found["samples"]]
    draft = _without_times(name, topology.ep_size, **found["runtime"])
    if found["pairs"]:
        draft = draft.model_copy(update={"pairs": PairSpeeds(**found["pairs"]), "shared": False})
    links = _fit(samples, shape, draft, topology)
    predicted = timing.layer_time(np.array(unseen.rows), unseen.busiest_pairs, shape, topology, links)
    return Calibration(links=links, shape=shape, predicted=predicted.total, measured=unseen.layer_seconds)


def _without_times(name: str, ep_size: int, backend: str, value_bytes: int) -> Links:
    """Links before any fit, with the sizes of packed rows (`runtime.dispatch`)."""
    return Links(
        name=name,
        kind="measured",
        shared=backend == "gloo",
        source=f"lab.calibration, {ep_size} processes, {backend}, torch {torch.__version__}",
        inside_node=Tier(
            dispatch_latency_us=0,
            combine_latency_us=0,
            gigabytes_per_second=1,
            all_reduce_latency_us=0,
            all_reduce_gigabytes_per_second=1,
        ),
        dispatch_bytes_per_value=value_bytes,
        combine_bytes_per_value=value_bytes,
        routing_bytes=4 + value_bytes,  # an int32 id and a weight in the model's type
        experts=Experts(fixed_us=0, teraflops=1),
    )


def _fit(samples: list[Sample], shape: LayerShape, links: Links, topology: Topology) -> Links:
    """`links` with times fitted to `samples`."""
    seconds = {part: np.array([sample.seconds[part] for sample in samples]) for part in PARTS}
    draft = seconds_per_gigabyte(links, topology)
    rows = np.array([timing.busiest(np.array(sample.rows) * draft, links.shared) for sample in samples])
    reduced = [timing.all_reduce_bytes(s.tokens, shape, len(s.rows), links) for s in samples]
    pairs = [sample.busiest_pairs for sample in samples]
    both_ways = [
        (rows * timing.dispatch_row_bytes(shape, links), seconds["dispatch"]),
        (rows * timing.combine_row_bytes(shape, links), seconds["combine"]),
    ]
    (dispatch_fixed, combine_fixed), per_byte = _lines(both_ways)
    (reduce_fixed,), per_reduced_byte = _lines([(np.array(reduced), seconds["all_reduce"])])
    (experts_fixed,), per_pair = _lines([(np.array(pairs, np.float64), seconds["experts"])])
    tier = Tier(
        dispatch_latency_us=dispatch_fixed * 1e6,
        combine_latency_us=combine_fixed * 1e6,
        gigabytes_per_second=1e-9 / per_byte,
        all_reduce_latency_us=reduce_fixed * 1e6,
        all_reduce_gigabytes_per_second=1e-9 / per_reduced_byte,
    )
    experts = Experts(fixed_us=experts_fixed * 1e6, teraflops=shape.flops_per_pair / per_pair / 1e12)
    return links.model_copy(update={"experts": experts, **_scaled(links, tier)})


def _scaled(links: Links, tier: Tier) -> dict[str, Any]:
    """The tier and, where there are such, the pairs, which the draft has in units that the fitted tier corrects."""
    found: dict[str, Any] = {"inside_node": tier}
    if links.pairs is not None:
        speeds = np.array(links.pairs.gigabytes_per_second) * tier.gigabytes_per_second
        found["pairs"] = links.pairs.model_copy(update={"gigabytes_per_second": speeds.tolist()})
        found["inside_node"] = tier.model_copy(update={"gigabytes_per_second": float(np.median(speeds))})
    return found


def _lines(series: list[tuple[np.ndarray, np.ndarray]]) -> tuple[list[float], float]:
    """Fit lines with a common slope to each (x, seconds) by relative errors: intercepts, at least 0, and slope."""
    blocks = []
    for i, (x, seconds) in enumerate(series):
        ones = np.zeros((len(x), len(series)))
        ones[:, i] = 1
        blocks.append(np.column_stack([ones, x]) / seconds[:, None])
    matrix = np.concatenate(blocks)
    scale = matrix.max(axis=0)
    solution, _ = nnls(matrix / scale, np.ones(len(matrix)))
    *intercepts, slope = (solution / scale).tolist()
    return intercepts, max(slope, 1e-15)


def _rank_main(rank: int, size: int, job: _Job, report: Reporter) -> dict[str, Any]:
    with world(rank, size, Path(job.scratch)) as (comm, device):
        told = (lambda sizes: report("measuring", sizes)) if rank == 0 else (lambda sizes: None)
        return _measure_all(comm, device, job.model, job.pairs, told)


def _measure_all(
    comm: Communicator, device: str, path: str, pairs: bool, progress: Callable[[int], None]
) -> dict[str, Any]:
    """What is measured of all ranks, the same on each."""
    model = load_model(path).to(device)
    config, experts = model.config, moe_layers(model)[0].experts
    E, K, H = num_experts(config), config.num_experts_per_tok, config.hidden_size
    placement = linear.place(1, E, comm.size)
    held = placement.physical_to_logical_map.reshape(comm.size, -1)[comm.rank]
    layer = MeasuredLayer(comm, LocalExperts(experts, held), H, model.dtype, device)
    samples, rng = [], np.random.default_rng(comm.rank)
    for tokens in TOKENS:
        samples.append(layer.measure(_uniform(rng, tokens, E, K)))
        progress(1)
    samples.append(layer.measure(_skewed(rng, UNSEEN, np.isin(np.arange(E), held), K)))
    return {
        "shape": asdict(LayerShape(hidden_size=H, expert_size=expert_size(config), top_k=K)),
        "runtime": {"backend": dist.get_backend(comm.group), "value_bytes": model.dtype.itemsize},
        "samples": [asdict(sample) for sample in samples],
        "pairs": measure_pairs(comm, device).model_dump() if pairs else None,
    }


def _uniform(rng: np.random.Generator, tokens: int, E: int, K: int) -> np.ndarray:
    """(tokens, K): distinct experts out of E, uniformly at random."""
    return rng.random((tokens, E)).argsort(axis=1)[:, :K]


def _skewed(rng: np.random.Generator, tokens: int, own: np.ndarray, K: int) -> np.ndarray:
    """(tokens, K): experts that favour this rank's, `own` (E,) bool, and the lowest ids on every rank."""
    taste = own - 0.5 * np.arange(len(own)) / len(own)
    return (-(taste + 0.5 * rng.gumbel(size=(tokens, len(own))))).argsort(axis=1)[:, :K]


class MeasuredLayer:
    """One rank's part of one MoE layer, timed on given routing; hidden states are random."""

    def __init__(
        self,
        comm: Communicator,
        experts: LocalExperts,
        hidden_size: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        self._comm, self._experts = comm, experts
        self._hidden_size, self._like = hidden_size, {"dtype": dtype, "device": device}

    def measure(self, chosen: np.ndarray, rounds: int = ROUNDS) -> Sample:
        """Run dispatch, experts, combine, and an all-reduce of all ranks' rows.

        chosen (n, K): this rank's choices, physical experts.
        """
        ids = torch.from_numpy(np.ascontiguousarray(chosen, np.int64)).to(self._like["device"])
        home = np.full(len(chosen), self._comm.rank)
        ranks = chosen // self._experts.size
        traffic, targets = layer_traffic(ranks, home, self._comm.size), torch.from_numpy(ranks.astype(np.int64))
        tokens = int(self._over_ranks(np.array([len(chosen)]), dist.ReduceOp.SUM)[0])
        first = self._round(ids, targets.to(ids.device), tokens)
        longest = float(self._over_ranks(np.array([sum(first)]), dist.ReduceOp.MAX)[0])
        more = min(max(FEWEST_ROUNDS, int(MOST_SECONDS / longest)), rounds) - 1
        mine = np.array([first, *(self._round(ids, targets.to(ids.device), tokens) for _ in range(more))])
        slowest = np.median(self._over_ranks(mine, dist.ReduceOp.MAX), axis=0)
        return Sample(
            seconds=dict(zip(PARTS, slowest.tolist(), strict=True)),
            tokens=tokens,
            rows=self._over_ranks(traffic.rows, dist.ReduceOp.SUM).tolist(),
            busiest_pairs=int(self._over_ranks(traffic.load, dist.ReduceOp.SUM).max()),
        )

    def _round(self, ids: torch.Tensor, targets: torch.Tensor, tokens: int) -> list[float]:
        """This rank's seconds for each of PARTS; all ranks start each part together."""
        hidden = torch.randn(len(ids), self._hidden_size, **self._like)
        weights = torch.full(ids.shape, 1 / ids.shape[1], **self._like)
        full = torch.zeros(tokens, self._hidden_size, **self._like)
        (received, handle), dispatching = self._clock(dispatch, self._comm, hidden, ids, weights, targets)
        results, computing = self._clock(self._experts, received.hidden, received.expert_ids, received.weights)
        _, combining = self._clock(combine, self._comm, results, handle)
        _, reducing = self._clock(self._comm.all_reduce, full)
        return [dispatching, computing, combining, reducing]

    def _clock(self, operation: Callable[..., Any], *arguments: Any) -> tuple[Any, float]:
        self._wait()
        started = time.perf_counter()
        result = operation(*arguments)
        if self._like["device"] != "cpu":
            torch.cuda.synchronize()
        return result, time.perf_counter() - started

    def _wait(self) -> None:
        if self._like["device"] != "cpu":
            torch.cuda.synchronize()
        dist.barrier(self._comm.group)

    def _over_ranks(self, values: np.ndarray, operation: Any) -> np.ndarray:
        on_device = torch.from_numpy(values).to(self._like["device"])
        dist.all_reduce(on_device, operation, group=self._comm.group)
        return on_device.cpu().numpy()
