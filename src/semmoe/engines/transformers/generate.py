"""Offline batch generation with expert parallelism: one process per rank over torch.distributed."""

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from semmoe.checkpoint.directory import read_config
from semmoe.core import Plan
from semmoe.costs.metrics import max_over_mean, sum_traffic
from semmoe.engines.transformers.batch import cut, step
from semmoe.engines.transformers.model import load_model
from semmoe.engines.transformers.parallel import EXCHANGES, ParallelModel
from semmoe.engines.transformers.planned import PlannedModel
from semmoe.evaluation.online import schedule_batch
from semmoe.runtime.collectives import Communicator, world
from semmoe.runtime.launch import Reporter, run_ranks
from semmoe.settings import GenerateSettings
from semmoe.topology import Topology
from semmoe.traces.dataset import check_token_ids

Answer = tuple[list[int], float]  # new tokens, and the seconds until the first


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """One way to run the same prompts: a plan, and how ranks exchange tokens."""

    name: str
    plan: Plan
    exchange: str = "all-to-all"
    attach: Callable[..., PlannedModel] | None = None  # another engine's, of (model, configuration, communicator)

    def __post_init__(self) -> None:
        if self.exchange not in EXCHANGES:
            raise ValueError(f"exchange must be one of {', '.join(EXCHANGES)}, not {self.exchange!r}")
        if self.exchange == "all-reduce" and self.plan.topology.dp_size != 1:
            raise ValueError("exchange all-reduce needs attention-TP: ranks with requests of their own share no rows")


@dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The outputs of a configuration and their cost, over all ranks and layers."""

    name: str
    outputs: list[list[int]]  # new token ids of each request, in the order of the prompts
    seconds: float
    forward_tokens: int  # tokens that the model processed: prompt and generated tokens, each once
    sent_bytes: dict[str, int]  # by kind of collective
    all_to_all_bytes_per_rank_pair: list[list[int]]  # (G, G): sent by rank i to rank j, dispatch and combine
    lar: float | None  # None without all-to-all
    remote_ranks_per_token: float | None
    load_max_over_mean: float  # mean over layers of the pairs per rank of the whole run
    # by kind, mean over ranks: waiting time, including for slower ranks (CPU only)
    collective_seconds: dict[str, float]
    compute_seconds: dict[str, float]  # of attention and of experts, mean of ranks (CPU only)
    time_to_first_token: float  # seconds, median of requests, from when a request's batch begins
    passes: dict[str, int]  # forward passes of the first group by their slices, shuffled or contiguous

    @property
    def all_to_all_bytes(self) -> int:
        return sum(self.sent_bytes.get(kind, 0) for kind in ("dispatch", "combine", "all_to_all"))

    @property
    def total_bytes(self) -> int:
        return sum(self.sent_bytes.values())

    @property
    def tokens_per_second(self) -> float:
        return self.forward_tokens / self.seconds

    @property
    def communication_share(self) -> float:
        """Share of the time that ranks waited for collectives, on average."""
        return sum(self.collective_seconds.values()) / self.seconds

    def figures(self) -> dict[str, Any]:
        """Everything but the outputs, for tables and JSON."""
        derived = ("all_to_all_bytes", "total_bytes", "tokens_per_second", "communication_share")
        return {k: v for k, v in asdict(self).items() if k != "outputs"} | {k: getattr(self, k) for k in derived}


def generate(
    model_path: str,
    prompts: Sequence[Sequence[int]],
    set_ups: Sequence[Configuration],
    settings: GenerateSettings,
    progress: Callable[[str, int], None] = lambda name, requests: None,
    prepare: Callable[[int], None] | None = None,
) -> list[GenerateResult]:
    """Generate greedily in every configuration, on `ep_size` local processes (gloo on a CPU, NCCL with a GPU per rank).

    prompts: token ids of each request, in arrival order. `progress` is called with a configuration's name and the
    number of requests newly completed. prepare: same as in `run_ranks`. Raises ValueError for input that does not fit,
    RuntimeError if a rank fails.
    """
    sizes = {set_up.plan.topology.ep_size for set_up in set_ups}
    if len(sizes) != 1:
        raise ValueError(f"configurations of a run must have the same ep_size, not {sorted(sizes)}")
    config = read_config(Path(model_path))
    if config.get("hc_mult") is not None:
        kind = config.get("model_type")
        raise ValueError(f"a model of type {kind!r} has hyper-connections: transformers does not run it on ranks")
    check_token_ids(prompts, set_ups[0].plan.fingerprint.vocab_size)
    with tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        job = _Job(model_path, [list(map(int, p)) for p in prompts], list(set_ups), settings, scratch)
        return run_ranks(sizes.pop(), _RANK, job, progress, preload=[__name__], prepare=prepare)[0]


@dataclass(frozen=True)
class _Job:
    model_path: str
    prompts: list[list[int]]
    set_ups: list[Configuration]
    settings: GenerateSettings
    scratch: str


def _rank_main(rank: int, size: int, job: _Job, report: Reporter) -> list[GenerateResult]:
    with world(rank, size, Path(job.scratch)) as (comm, device):
        return [_run_set_up(comm, job, set_up, device, report) for set_up in job.set_ups]


_RANK = _rank_main  # what each process runs; tests put a faulty rank here


def _run_set_up(
    world_comm: Communicator, job: _Job, set_up: Configuration, device: str, report: Reporter
) -> GenerateResult:
    topology, rank = set_up.plan.topology, world_comm.rank
    model = load_model(job.model_path, getattr(torch, job.settings.dtype)).to(device)
    comm = type(world_comm)(world_comm.group, rank, world_comm.size)  # a new one, with its own counters
    parallel = (set_up.attach or _attach)(model, set_up, comm)
    # Uncounted tokens, so that the first configuration does not pay for connections and loading of code.
    few = GenerateSettings(max_new_tokens=2, batch_size=1)
    _decode(parallel, [job.prompts[0][:16]], topology, few, lambda requests: None)
    parallel.reset_counts()
    groups = schedule_batch(job.prompts, set_up.plan, job.settings.max_new_tokens)
    own = np.flatnonzero(groups == rank // topology.attn_tp_size)
    first = parallel.attention_comm.rank == 0  # of its group, for which it reports and answers
    dist.barrier()
    started = time.perf_counter()
    progress = partial(report, set_up.name) if first else lambda requests: None
    decoded = _decode(parallel, [job.prompts[i] for i in own], topology, job.settings, progress)
    dist.barrier()
    seconds = time.perf_counter() - started
    answers = dict(zip(own.tolist(), decoded, strict=True)) if first else {}
    return _gather(set_up.name, parallel, answers, job.prompts, seconds)


def _attach(model: PreTrainedModel, set_up: Configuration, comm: Communicator) -> PlannedModel:
    attention = attention_communicator(comm, set_up.plan.topology)
    return ParallelModel(model, set_up.plan, comm, attention, set_up.exchange)


def attention_communicator(comm: Communicator, topology: Topology) -> Communicator:
    """The communicator of this rank's attention group, which is `comm` itself if there is one group."""
    if topology.dp_size == 1:
        return comm
    size = topology.attn_tp_size
    return type(comm)(dist.new_subgroups(size)[0], comm.rank % size, size)


def _decode(parallel: PlannedModel, prompts, topology: Topology, settings: GenerateSettings, progress) -> list[Answer]:
    """Decode this group's requests batch by batch, then keep computing experts for other groups' tokens."""
    answers: list[Answer] = []
    batches = cut(prompts, settings.batch_size, settings.max_new_tokens, parallel.model)
    batch = next(batches, None)
    while True:
        working = torch.tensor([int(batch is not None)], device=parallel.model.device)
        if topology.dp_size > 1:
            working = parallel.comm.all_reduce(working, "control")
        if not int(working):
            return answers
        if batch is None:
            parallel.idle()
            continue
        step(parallel.model, batch, parallel.begin)
        if batch.done:
            answers += [(tokens, batch.first_token_seconds) for tokens in batch.generated]
            progress(len(batch.prompts))
            batch = next(batches, None)


def _mean(counters: Sequence[Counter[str]]) -> dict[str, float]:
    return {kind: seconds / len(counters) for kind, seconds in sorted(sum(counters, Counter()).items())}


def _gather(
    name: str, parallel: PlannedModel, own: dict[int, Answer], prompts: Sequence[Sequence[int]], seconds: float
) -> GenerateResult:
    """Combine what every rank generated, sent and routed into one result.

    own: by request, on the first rank of each attention group.
    """
    size = parallel.comm.size
    shares = [(own, parallel.costs())] * size
    dist.all_gather_object(shares, shares[0])
    answers = {i: answer for answered, _ in shares for i, answer in answered.items()}
    costs = [cost for _, cost in shares]
    layers = [sum_traffic(parts) for parts in zip(*(cost.traffic for cost in costs), strict=True)]
    total = sum_traffic(layers)
    return GenerateResult(
        name=name,
        outputs=[answers[i][0] for i in range(len(prompts))],
        seconds=seconds,
        forward_tokens=sum(len(p) + len(answers[i][0]) - 1 for i, p in enumerate(prompts)),
        sent_bytes=dict(sorted(sum((cost.sent for cost in costs), Counter()).items())),
        all_to_all_bytes_per_rank_pair=[[cost.sent_to[j] for j in range(size)] for cost in costs],
        lar=total.lar if total.pairs else None,
        remote_ranks_per_token=total.remote_ranks_per_token if total.pairs else None,
        load_max_over_mean=float(np.mean([max_over_mean(layer.load) for layer in layers])),
        collective_seconds=_mean([cost.waited for cost in costs]),
        compute_seconds=_mean([cost.computed for cost in costs]),
        time_to_first_token=median(first for _, first in answers.values()),
        passes=dict(parallel.rows.passes),
    )
