"""Time of the runtime's parts on local processes, as lab/timing.py measures them.

    OMP_NUM_THREADS=1 python benchmarks/bench_runtime.py [--ranks 2 4] [--rounds 60] [--rates 200mbit 1gbit]
        [--smallest] [--out FILE]

Argsort, the shuffled pair, and the all-to-all by local share (Figure 6d), over loopback; the larger sizes over networks
whose links are held at a rate (network.py; needs root) too. Prints configuration, tables, and one JSON line.
"""

import argparse
import json
import platform
import sys
from functools import partial
from pathlib import Path

import torch
from network import NetworkError, enter, slow_network

from lab.timing import WIDTH, argsort_times, measure

ROWS = (1_000, 10_000, 100_000, 1_000_000)
SIZES = (64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20)  # bytes that a rank puts in
SHARES = (0.2, 0.4, 0.6, 0.8, 1.0)


def measure_slow(size: int, sizes, shares, share_bytes: int, rounds: int, rate: str) -> dict:
    """`measure` where every rank's link carries `rate`; nothing where there can be no such network."""
    try:
        with slow_network(size, rate) as network:
            return measure(size, sizes, shares, share_bytes, rounds, str(network), partial(enter, network))
    except NetworkError as error:
        print(f"{rate}: skipped, {error}", file=sys.stderr)
        return {}


def show(results: dict) -> None:
    print("\nargsort           rows  ranks       ours    tensors      torch  torch/ours")
    for r in results["argsort"]:
        print(f"             {r['rows']:9d} {r['ranks']:6d} {r['us']:8.1f} us {r['tensors_us']:7.1f} us "
              f"{r['torch_us']:7.1f} us {r['ratio']:8.2f}")  # fmt: skip
    print("\nSRS + SAG   network           ranks    KiB  shuffled      plain       gloo   shuffled/plain         "
          "gloo rs/SRS")  # fmt: skip
    for r in results["pair"]:
        low, high = r["shuffled_over_plain"][1:], r["gloo_rs_over_srs"][1:]
        us, where = r["us"], f"{r['network']:16} {r['ranks']:6d} {r['bytes'] >> 10:6d}"
        print(f"            {where} {us['shuffled']:8.0f} us {us['plain']:7.0f} us "
              f"{us['gloo']:7.0f} us  {r['shuffled_over_plain'][0]:.3f} [{low[0]:.3f}, {low[1]:.3f}]  "
              f"{r['gloo_rs_over_srs'][0]:.2f} [{high[0]:.2f}, {high[1]:.2f}]")  # fmt: skip
    print("\nall-to-all  network              ranks  share   dispatch + combine   all-reduce")
    for r in results["share"]:
        print(f"            {r['network']:20} {r['ranks']:5d} {r['share']:6.1f} {r['us']['all-to-all']:17.0f} us "
              f"{r['us']['all-reduce']:9.0f} us")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--rates", nargs="*", default=["200mbit", "1gbit"], help="of links of the slow networks")
    parser.add_argument("--smallest", action="store_true", help="the smallest sizes only, to see that it runs")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    a = parser.parse_args()
    torch.set_num_threads(1)
    rows, sizes, shares = (ROWS[:1], SIZES[:1], SHARES[::4]) if a.smallest else (ROWS, SIZES, SHARES)
    share_bytes = SIZES[0] if a.smallest else SIZES[3]
    configuration = {"machine": platform.machine(), "torch": torch.__version__, "width": WIDTH, "rounds": a.rounds}
    print(configuration)
    results = {"configuration": configuration, "argsort": [], "pair": [], "share": []}
    for size in (8, 64):
        results["argsort"] += [argsort_times(n, size, max(min(3_000_000 // n, 1000), 15)) for n in rows]
    for size in a.ranks:
        for name, values in measure(size, sizes, shares, share_bytes, a.rounds).items():
            results[name] += values
        for rate in a.rates:
            slow = measure_slow(size, sizes[-2:], shares, share_bytes, max(a.rounds // 5, 3), rate)
            for name, values in slow.items():
                results[name] += values
    show(results)
    line = json.dumps(results)
    print("\n" + line)
    if a.out:
        a.out.write_text(line + "\n")


if __name__ == "__main__":
    main()
