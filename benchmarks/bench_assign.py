"""Time and quality of predicting tokens' ranks and assigning them to equal slices, on one core.

    NUMBA_NUM_THREADS=1 python benchmarks/bench_assign.py [TRACE] [--tokens 1024] [--slices 8] [--calls 300] [--seed 0]

Without a trace, synthetic tables of two shapes serve; with one, the path predictor is fitted on a fifth of its requests
and tokens of the others are scored. Prints configuration, bounds, a table of median microseconds with the share of the
exact optimum reached (up to 2,048 tokens) and, for a batch that is assigned in chunks, the share of what the batch as
one would gain over slices by position, and one JSON line.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from scipy.optimize import linear_sum_assignment

from semmoe.core import Placement, Plan, RoutingTrace
from semmoe.gateway import Scorer
from semmoe.requests.policy import PromptScores
from semmoe.settings import PredictorSettings
from semmoe.tokens import kernels
from semmoe.tokens.predictor import fit, project
from semmoe.tokens.slices import (
    ByPosition,
    Looks,
    PathScores,
    assign,
    look_up_tokens,
    position_slices,
    score,
    trace_history,
)
from semmoe.topology import Fingerprint, Topology
from semmoe.traces.split import split
from semmoe.traces.trace import open_trace

SMALL = 2048  # tokens, of which the exact optimum is found in seconds
Case = tuple[str, PathScores, int, tuple]  # name, tables, ranks, arguments of `score` after the tables
SYNTHETIC = ((32, 4, 8, 5, 2), (256, 8, 64, 2, 0))  # experts, top-k, ranks, look-back, ordered


def synthetic(tokens: int, seed: int) -> Iterator[Case]:
    rng, vocabulary = np.random.default_rng(seed), 4096
    for experts, top_k, ranks, lookback, ordered in SYNTHETIC:
        rows = Looks(lookback=lookback, ordered=ordered).rows(top_k, experts)

        def table(rows: int, spread: int, kind: type, ranks: int = ranks) -> np.ndarray:
            return rng.normal(0, spread, (1, rows, ranks)).clip(-4 * spread, 4 * spread).astype(kind)

        tables = PathScores(
            token_rows=np.arange(vocabulary + 1, dtype=np.int32), token_source=np.ones(vocabulary + 1, np.uint8),
            token_scores=table(vocabulary + 1, 30, np.int8), token_shift=np.array([4], np.uint8),
            path_scores=table(rows, 200, np.int16), history_scores=table(2 * experts + 1, 200, np.int16),
            lookback=lookback, ordered=ordered,
        )  # fmt: skip
        earlier = rng.integers(0, experts, (lookback, tokens, top_k)).astype(np.uint8)
        history = rng.normal(0, 300, (tokens, ranks)).astype(np.int32)
        name = f"synthetic E={experts} K={top_k} G={ranks} look-back {lookback}, ordered {ordered}"
        yield name, tables, ranks, (0, 0, ranks, rng.integers(0, vocabulary, tokens), earlier, history)


def traced(trace: RoutingTrace, tokens: int, seed: int, ranks: int) -> Iterator[Case]:
    profile, evaluation = split(trace, 0.2, seed)
    f, rng = trace.fingerprint, np.random.default_rng(seed)
    labels = np.tile(np.repeat(np.arange(ranks), f.num_experts // ranks), (f.num_layers, 1))
    tables = project(fit(profile, PredictorSettings(), seed), profile, Placement.from_labels(labels, ranks))
    rows = rng.permutation(evaluation.num_tokens)[:tokens]
    for layer in sorted({0, f.num_layers // 4, f.num_layers // 2, f.num_layers - 1}):
        depth = min(layer, tables.lookback)
        earlier = evaluation.expert_ids[rows, layer - depth : layer][:, ::-1].transpose(1, 0, 2)
        history = trace_history(tables, layer, evaluation)[rows]
        arguments = (layer, 0, ranks, evaluation.token_ids[rows], np.ascontiguousarray(earlier), history)
        yield f"{f.model} layer {layer}", tables, ranks, arguments


def median_us(job: Callable[[], object], calls: int) -> float:
    def once() -> float:
        start = time.perf_counter()
        job()
        return time.perf_counter() - start

    job()
    return statistics.median(once() for _ in range(calls)) * 1e6


def optimum(scores: np.ndarray) -> int:
    """The largest sum of scores (B, S) with at most ceil(B / S) tokens a slice."""
    size = -(-len(scores) // scores.shape[1])
    rows, columns = linear_sum_assignment(np.repeat(scores, size, axis=1), maximize=True)
    return int(scores[rows, columns // size].sum())


def measure(name: str, tables: PathScores, ranks: int, arguments: tuple, calls: int) -> dict:
    (layer, first, _, token_ids, *path), (depth, tokens, top_k) = arguments, arguments[4].shape

    def look_up() -> np.ndarray:
        return look_up_tokens(tables, [layer], first, ranks, token_ids)[0]

    looked_up = look_up()
    scores = score(tables, layer, first, looked_up, *path)

    def total(slices: np.ndarray) -> int:
        return int(scores[np.arange(tokens), slices].sum())

    reached, by_position = total(assign(scores)), total(position_slices(tokens, ranks))
    return {
        "case": name,
        "row_bytes": tokens * ranks * (1 + 4 + 2 * depth * top_k),
        "adds": tokens * ranks * (1 + depth * top_k),
        "look_up_us": median_us(look_up, calls),
        "score_us": median_us(lambda: score(tables, layer, first, looked_up, *path), calls),
        "assign_us": median_us(lambda: assign(scores), calls),
        "all_us": median_us(lambda: assign(score(tables, layer, first, look_up(), *path)), calls),
        "share_of_optimum": reached / optimum(scores) if tokens <= SMALL else None,
        "share_of_whole": (reached - by_position) / (total(kernels.assign(scores)) - by_position),
    }


def score_prompts(calls: int, seed: int) -> dict:
    """Microseconds that a router's call takes: 1,000 ids of 150,000, 8 ranks; each prompt once, then again."""
    rng, vocabulary, ranks = np.random.default_rng(seed), 150_000, 8
    weights = rng.random(vocabulary + 1, np.float32)
    table = PromptScores(
        token_scores=rng.random((vocabulary + 1, ranks), np.float32), token_weights=weights,
        bias=np.zeros(ranks, np.float32), prices=np.zeros(ranks, np.float32), score_spread=0.1, mean_length=100.0,
    )  # fmt: skip
    names = dict.fromkeys(("model", "architecture_hash", "tokenizer_hash"), "")
    model = Fingerprint(**names, vocab_size=vocabulary, num_layers=1, num_experts=ranks, top_k=1)
    placement = Placement.from_labels(np.arange(ranks)[None], ranks)
    topology = Topology(ep_size=ranks, dp_size=ranks)
    scorer = Scorer(Plan(topology=topology, placement=placement, tokens=ByPosition(), requests=table,
                         fingerprint=model, method="linear"))  # fmt: skip
    prompts, times = [rng.integers(vocabulary, size=1000, dtype=np.int32) for _ in range(calls)], np.zeros((3, calls))
    for i, p in np.ndindex(3, calls):
        start = time.perf_counter()
        scorer(prompts[p])
        times[i, p] = time.perf_counter() - start
    return dict(zip(("first_us", "second_us", "third_us"), np.median(times, axis=1) * 1e6, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--slices", type=int, default=8, help="of a trace's tokens")
    parser.add_argument("--calls", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    cases = traced(open_trace(a.trace), a.tokens, a.seed, a.slices) if a.trace else synthetic(a.tokens, a.seed)
    print(f"{a.tokens} tokens, history given, medians of {a.calls} calls; {platform.machine()}, one thread")
    results = []
    for case in cases:
        r = measure(*case, a.calls)
        print(f"{r['case']}: bound {r['row_bytes'] / 1e6:.2f} MB of rows, {r['adds'] / 1e6:.2f} M adds\n"
              f"  look-up {r['look_up_us']:.1f} us  score {r['score_us']:.1f} us  assign {r['assign_us']:.1f} us  "
              f"all {r['all_us']:.1f} us  {r['share_of_optimum'] or np.nan:.4f} of the optimum  "
              f"{r['share_of_whole']:.4f} of the gain of one chunk")  # fmt: skip
        results.append(r)
    scorer = score_prompts(a.calls, a.seed)
    print("Scorer, 1,000 ids of 150,000, 8 ranks: " + ", ".join(f"{name} {us:.1f}" for name, us in scorer.items()))
    print(
        "\n"
        + json.dumps(
            {
                "scorer": scorer,
                "tokens": a.tokens,
                "slices": a.slices,
                "calls": a.calls,
                "seed": a.seed,
                "results": results,
            }
        )
    )


if __name__ == "__main__":
    main()
