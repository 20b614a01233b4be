"""What semmoe adds to a decode pass that is replayed from a CUDA graph: microseconds a layer, on one GPU.

    python benchmarks/bench_captured.py [--rows 8 64 256 512] [--layers 48] [--experts 128] [--ranks 8] [--width 2048]
    python benchmarks/bench_captured.py --prompts 1 8 --rows 1024 8192   # passes over so many prompts, run eagerly

The pass is what SGLang's hooks do, captured as tests/captured_passes.py traces it; the tables are random and as large
as a plan's. In place of links, a collective copies rows on the one card, so that "vanilla", its reduce-scatters and
all-gathers alone, is what the others are held against; for attention-DP that is nothing. Each is replayed twice: the
two medians show the noise. Passes over prompts, which engines do not capture, are timed from their first call to the
end of their last kernel. Needs a GPU; with --rehearse it runs on a CPU without graphs, to see that it runs. Prints
configuration, a table, the parts of a shuffled layer, one JSON line.
"""

import argparse
import functools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from captured import Captured, NcclCommunicator
from synthetic import make_fingerprint

from semmoe.core import Placement, Plan
from semmoe.engines.step import Pass, Step
from semmoe.requests.policy import RoundRobin
from semmoe.tokens.slices import Looks, PathScores
from semmoe.topology import Fingerprint, Topology

VOCABULARY, LOOKBACK, ORDERED = 151_936, 2, 1
MOST_KERNELS = 14
MEASURED = 20  # batches of replays, of which the median is printed


class OneCard(NcclCommunicator):
    """Rank 0 of so many, whose collectives move its own rows as often as theirs would arrive."""

    def reduce_scatter(self, slices: torch.Tensor) -> torch.Tensor:
        return slices[: len(slices) // self.size].clone()

    def all_gather(self, columns: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [rows.repeat(self.size, *[1] * (rows.dim() - 1)) for rows in columns]


def plan(f: Fingerprint, ranks: int) -> Plan:
    rng, looks = np.random.default_rng(0), Looks(lookback=LOOKBACK, ordered=ORDERED)
    rows = looks.rows(f.top_k, f.num_experts)

    def table(kind: type, *shape: int) -> np.ndarray:
        return rng.integers(-100, 100, (f.num_layers, *shape, ranks)).astype(kind)

    tokens = PathScores(
        token_rows=np.arange(VOCABULARY + 1, dtype=np.int32), token_source=np.ones(VOCABULARY + 1, np.uint8),
        token_scores=table(np.int8, VOCABULARY + 1), token_shift=np.full(f.num_layers, 4, np.uint8),
        path_scores=table(np.int16, rows), history_scores=table(np.int16, 2 * f.num_experts + 1),
        lookback=LOOKBACK, ordered=ORDERED,
    )  # fmt: skip
    labels = np.tile(np.repeat(np.arange(ranks), f.num_experts // ranks), (f.num_layers, 1))
    return Plan(
        topology=Topology(ep_size=ranks, dp_size=1), placement=Placement.from_labels(labels, ranks), tokens=tokens,
        requests=RoundRobin(num_groups=1), fingerprint=f, method="bench",
    )  # fmt: skip


def filled(case: Captured, f: Fingerprint, rows: int) -> Captured:
    """With random ids, requests and experts, of which each has a second copy on another rank."""
    device = case.hidden.device
    draw = torch.Generator(device=device).manual_seed(rows)
    case.batch.input_ids.random_(0, VOCABULARY, generator=draw)
    case.batch.req_pool_indices.copy_(torch.randperm(rows, device=device, generator=draw) + 1)
    case.chosen.copy_(torch.rand(len(case.chosen), f.num_experts, device=device, generator=draw).topk(f.top_k)[1])
    case.weights.random_(generator=draw)
    first = torch.arange(f.num_experts, device=device)
    ranks = torch.stack([first // case.per_rank, (first // case.per_rank + 3) % case.copies.num_ranks], dim=1)
    case.copies.ranks.copy_(ranks)
    case.copies.physical.copy_(ranks * case.per_rank + (first % case.per_rank)[:, None])
    case.copies.preferred.copy_(ranks[:, 0])
    return case


def over_prompts(case: Captured, requests: int) -> Callable[[], object]:
    """A pass in which so many requests share the rows, as the host begins it."""
    rows = len(case.batch.input_ids)
    of_row = np.arange(rows) * requests // rows
    step = Step(
        token_ids=case.batch.input_ids.cpu().numpy(), positions=np.arange(rows) - np.searchsorted(of_row, of_row),
        rows=of_row, slots=np.arange(1, requests + 1), requests=[str(i) for i in range(requests)],
        decoding=np.zeros(rows, np.bool_),
    )  # fmt: skip

    def job() -> None:
        case.shuffle.begin(Pass(lambda: step, decodes=False))
        case()

    return job


def passes(planned: Plan, rows: int, width: int, prompts: int, device: str) -> Iterator[tuple[str, Callable]]:
    """What is captured, by name; or what runs over so many prompts, if any."""
    comm = OneCard(None, 0, planned.topology.ep_size)

    def case() -> Captured:
        found = Captured(comm, planned, rows, rows + 1, width, device)
        return filled(found, planned.fingerprint, rows)

    own = case()

    def vanilla() -> None:
        for _ in own.norms:
            mine = own.shuffle.comm.reduce_scatter(own.hidden)
            own.shuffle.comm.all_gather([mine + own.residual[: len(mine)]])

    def at_routers() -> None:  # as vLLM's hooks do, in one operator; SGLang's count once it has masked padding
        for _ in own.norms:
            own.traffic.place(own.copies, own.chosen, own.per_rank)

    def counted() -> None:
        for _ in own.norms:
            own.traffic.count(own.chosen, own.per_rank)

    yield "vanilla", vanilla
    yield "attention-DP: rows counted", counted
    yield "attention-DP: copies, counted", at_routers
    begun = (lambda captured: over_prompts(captured, prompts)) if prompts else (lambda captured: captured)
    yield "attention-TP: shuffled", begun(case())
    recorded = case()
    recorded.record()
    yield "attention-TP: shuffled, recorded", begun(recorded)


def graph_of(job: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(2):  # kernels are compiled outside
        job()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        job()
    return graph


def replay_us(graph: torch.cuda.CUDAGraph, batch: int = 5) -> float:
    def once() -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(batch):
            graph.replay()
        end.record()
        end.synchronize()
        return 1e3 * start.elapsed_time(end) / batch

    once()
    return statistics.median(once() for _ in range(MEASURED))


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def eager_us(job: Callable[[], object]) -> float:
    """From a pass's first call to the end of its last kernel."""

    def once() -> float:
        wait()
        start = time.perf_counter()
        job()
        wait()
        return 1e6 * (time.perf_counter() - start)

    once()
    return statistics.median(once() for _ in range(MEASURED))


def kernels_of(job: Callable[[], object], layers: int) -> list[tuple[str, float, float]]:
    """Name, launches a layer and microseconds a layer of a pass's kernels, longest first."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        job()
        torch.cuda.synchronize()
    found = [(e.key, e.count / layers, e.self_device_time_total / layers) for e in seen.key_averages()]
    return sorted((one for one in found if one[2] > 0), key=lambda one: -one[2])


def measure(planned: Plan, rows: int, width: int, prompts: int, device: str) -> Iterator[dict]:
    """Times of every pass in microseconds a layer, printed as they come, and at the end a GPU's kernels of a layer."""
    layers, base = planned.fingerprint.num_layers, 0.0
    timed = []
    for name, job in passes(planned, rows, width, prompts, device):
        eager = prompts or device == "cpu"
        time_us = functools.partial(eager_us, job) if eager else functools.partial(replay_us, graph_of(job))
        first, again = (time_us() / layers for _ in range(2))
        base = first if name == "vanilla" else base
        added = first - base * name.startswith("attention-TP")
        print(f"{name:34}{rows:6}{prompts or '':9}{first:12.2f}{again:10.2f}{added:14.2f}", flush=True)
        yield {"pass": name, "rows": rows, "prompts": prompts, "us": first, "again": again, "added": added}
        if name.startswith("attention-TP: shuffled") and device != "cpu":
            timed = kernels_of(job, layers)
    if not timed:
        return
    launches, busy = (sum(column) for column in list(zip(*timed, strict=True))[1:])
    print(f"kernels of a layer, {name}: {launches:.1f} that take {busy:.1f} us")
    for kernel, launches, us in timed[:MOST_KERNELS]:
        print(f"    {launches:6.2f} x {us:8.2f} us  {kernel[:100]}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 64, 256, 512])
    parser.add_argument("--prompts", type=int, nargs="+", default=[0])
    for name, default in (("layers", 48), ("experts", 128), ("top-k", 8), ("ranks", 8), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, where times mean nothing")
    a = parser.parse_args()
    if not (torch.cuda.is_available() or a.rehearse):
        print("bench_captured.py: no GPU here", file=sys.stderr)
        return 2
    sizes = {"num_layers": a.layers, "num_experts": a.experts, "top_k": a.top_k}
    planned = plan(make_fingerprint(vocab_size=VOCABULARY, **sizes), a.ranks)
    device, name = ("cpu", "a CPU, rehearsed") if a.rehearse else ("cuda", torch.cuda.get_device_name())
    print(f"{name}, torch {torch.__version__}; {a.layers} layers, top-{a.top_k} of {a.experts} "
          f"experts, {a.ranks} ranks, rows of {a.width} bfloat16")  # fmt: skip
    print(f"{'':34}{'rows':>6}{'prompts':>9}{'us a layer':>12}{'again':>10}{'over vanilla':>14}")
    cases = [(rows, prompts) for rows in a.rows for prompts in a.prompts]
    results = [one for rows, prompts in cases for one in measure(planned, rows, a.width, prompts, device)]
    print("\n" + json.dumps({"device": name, **vars(a), "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
