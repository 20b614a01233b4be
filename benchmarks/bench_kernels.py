"""The Triton kernels on a GPU, against the time that their bytes need and against torch's own operators.

    python benchmarks/bench_kernels.py [--tokens 1024 8192 65536] [--ranks 8] [--width 4096]

The floor is the bytes that must be read and written at the rate of a large copy, measured first. Needs a GPU; with
TRITON_INTERPRET=1 in the environment it runs on the CPU, to see that it runs. Prints configuration, a table, one JSON
line.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import triton

from semmoe.runtime.kernels import shuffle
from semmoe.runtime.kernels.argsort import order_of_real

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
Case = tuple[str, int, Callable[[], Any], Callable[[], Any]]  # name, bytes, ours, torch's


def time_us(job: Callable[[], Any]) -> float:
    if not INTERPRETED:
        return 1e3 * triton.testing.do_bench(job, return_mode="median")
    started = time.perf_counter()
    job()
    return 1e6 * (time.perf_counter() - started)


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a copy that no cache holds."""
    source = torch.empty(1 << (20 if INTERPRETED else 30), dtype=torch.uint8, device=device)
    out = torch.empty_like(source)
    return 2 * len(source) / (1e-6 * time_us(lambda: out.copy_(source)))


def cases(tokens: int, size: int, width: int, device: str) -> Iterator[Case]:
    generator = torch.Generator().manual_seed(tokens)
    rows, dtype = tokens // size, torch.bfloat16
    ranks = torch.arange(size).repeat_interleave(rows)[torch.randperm(tokens, generator=generator)]
    ranks = ranks.to(device)
    real = torch.ones(tokens, dtype=torch.bool, device=device)
    order, _, _ = order_of_real(ranks, real, size)
    yield "argsort", 3 * 8 * tokens, lambda: order_of_real(ranks, real, size), lambda: torch.argsort(ranks, stable=True)
    hidden, row = torch.randn(tokens, width, device=device).to(dtype), 2 * width
    index = order.clamp(min=0)
    yield (
        "gather rows", 2 * len(index) * row, lambda: shuffle.gather_rows(hidden, order),
        lambda: hidden.index_select(0, index),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192, 65536])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--width", type=int, default=4096, help="bfloat16 columns of a row")
    a = parser.parse_args()
    if not torch.cuda.is_available() and not INTERPRETED:
        print("bench_kernels.py: no GPU here", file=sys.stderr)
        return 2
    if any(tokens % a.ranks for tokens in a.tokens):
        parser.error("--tokens must be multiples of --ranks: slices are equal")
    device = "cpu" if INTERPRETED else "cuda"
    name = "Triton's interpreter" if INTERPRETED else torch.cuda.get_device_name()
    rate, results = copy_rate(device), []
    print(f"{name}, torch {torch.__version__}, triton {triton.__version__}; {a.ranks} ranks, rows of {a.width} "
          f"bfloat16; a copy moves {rate / 1e9:,.0f} GB/s")  # fmt: skip
    print(f"{'':16}{'tokens':>8}{'ours us':>12}{'floor us':>12}{'torch us':>12}{'of floor':>10}{'over torch':>12}")
    for tokens in a.tokens:
        for kernel, moved, ours, theirs in cases(tokens, a.ranks, a.width, device):
            us, floor, other = time_us(ours), 1e6 * moved / rate, time_us(theirs)
            print(f"{kernel:16}{tokens:8}{us:12.1f}{floor:12.1f}{other:12.1f}{floor / us:10.0%}{other / us:12.2f}")
            results.append({"kernel": kernel, "tokens": tokens, "us": us, "floor_us": floor, "torch_us": other})
    print("\n" + json.dumps({"device": name, "ranks": a.ranks, "width": a.width, "results": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
