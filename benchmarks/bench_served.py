"""Served figures that can say no: configurations of an engine beside vanilla in paired, interleaved rounds.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_served.py links FILE --engine sglang|vllm
    ... bench_served.py measure FILE --engine E [--piece NAME ...] [--minutes N]     # without a name: what is missing
    ... bench_served.py pieces FILE --engine E       # what there is to measure, in how many minutes, and what is done
    python benchmarks/bench_served.py report FILE    # tables, one JSON line; in any environment
    ... all [--quick] [--busy] [--dataset PROMPTS]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1), as root: each of two ranks is a node with a
network namespace and a /dev/shm of its own (serving/network.py). docs/measurements.md describes the protocol.

FILE is one engine's: JSON lines that are only added to, with the same settings, versions and machine. What is measured
already is left out, so that the command can be stopped and called again. `links` finds the links at which vanilla
of attention-DP spends 30, 45 and 59 % of its forward passes in the all-to-all, with requests all at once; attention-TP
is measured on the same links, where its own collectives take time too. Rates of arrivals follow from vanilla's at once.

--quick: one rate, two rounds of 8 seconds, to try it. --busy: measure although other processes take the cores; the file
and the report say so.
"""

import argparse
import os
import platform
import sys
import time
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

from serving.engine import ServerError
from serving.guard import BusyError, check
from serving.network import NetworkError
from serving.pieces import Piece, Settings, published
from serving.records import Records, RecordsError
from serving.report import report

ATTENTIONS = ("dp", "tp")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("links", "pieces", "measure", "report"):
        command = commands.add_parser(name)
        command.add_argument("file", type=Path)
        if name == "report":
            continue
        command.add_argument("--engine", choices=["sglang", "vllm"], required=True)
        command.add_argument("--dataset", default="", help="prompts of a file in place of held-out text")
        command.add_argument("--quick", action="store_true")
        command.add_argument("--busy", action="store_true", help="measure although others take the cores")
        if name == "measure":
            command.add_argument("--piece", nargs="+", default=[], help="names; without any, all that are missing")
            command.add_argument("--minutes", type=float, default=1e9, help="begin no piece that would end later")
    return parser.parse_args()


def settings(a: argparse.Namespace) -> Settings:
    s = Settings(dataset=Path(a.dataset).name)
    return s.quick() if a.quick else s


def header(a: argparse.Namespace, s: Settings) -> dict[str, Any]:
    """What all figures of a file have in common."""
    from serving.engine import RANKS, engine

    served = engine(a.engine)
    return {
        "engine": str(served), "torch": version("torch"), "semmoe": version("semmoe"), "model": "embedded",
        "ranks": RANKS, "seats": "every rank held to a core",
        "machine": f"{os.cpu_count()} cores, {platform.machine()}", "options": served.OPTIONS | served.UNCACHED,
        "options by attention": served.BY_ATTENTION, "note": served.NOTE, "settings": asdict(s), "busy": a.busy,
    }  # fmt: skip


def missing(records: Records, piece: Piece, s: Settings, busy: bool) -> float:
    """Minutes until a piece is measured; 0 where it is."""
    rounds = piece.num_rounds(s)
    lacking = sum(rounds - len(records.rounds(piece.name, str(w), piece.names, busy)) for w in piece.workloads)
    return piece.minutes(s) * lacking / (rounds * len(piece.workloads))


def show_pieces(a: argparse.Namespace, records: Records, s: Settings) -> None:
    total = [0.0, 0.0]
    for piece in published(a.engine, s):
        minutes, left = piece.minutes(s), missing(records, piece, s, a.busy)
        state = "done" if not left else "" if left == minutes else f"{left:.0f} min left"
        print(f"{piece.name:20}{minutes:6.0f} min  {state:14}{', '.join(piece.beside)}")
        total = [total[0] + minutes, total[1] + left]
    print(f"{'in all':20}{total[0]:6.0f} min  {total[1]:.0f} min left")


def run_pieces(a: argparse.Namespace, records: Records, s: Settings) -> int:
    """How many pieces failed, each of which says why."""
    pieces = {piece.name: piece for piece in published(a.engine, s)}
    unknown = sorted(set(a.piece) - pieces.keys())
    if unknown:
        raise RecordsError(f"no such piece: {', '.join(unknown)}; `pieces` lists them")
    if not set(ATTENTIONS) <= records.links.keys():
        raise RecordsError(f"{records.path} has no links yet: call `links` first")
    end, failed = time.monotonic() + 60 * a.minutes, 0
    with prepared(a, s) as bench:
        for name in a.piece or pieces:
            left = missing(records, pieces[name], s, a.busy)
            if left and time.monotonic() + 60 * left <= end:
                failed += not measured(bench, records, pieces[name])
    return failed


def measured(bench: Any, records: Records, piece: Piece) -> bool:
    """Whether a piece was measured; a server that fails ends its piece alone."""
    from serving.measure import measure

    try:
        measure(bench, records, piece)
    except ServerError as error:
        print(f"bench_served.py: {piece.name}: {error}", file=sys.stderr)
        return False
    return True


def run_links(a: argparse.Namespace, records: Records, s: Settings) -> int:
    """Zero: what fails raises."""
    from serving.measure import find_links

    with prepared(a, s) as bench:
        for attention in ATTENTIONS:
            if attention not in records.links:
                first = records.links.get(ATTENTIONS[0])  # whose links are those of all
                records.add_links(find_links(bench, attention, first.links if first else None))
            print(f"{attention}: {records.links[attention]}")
    return 0


def prepared(a: argparse.Namespace, s: Settings) -> Any:
    from serving.engine import engine
    from serving.measure import bench
    from serving.server import prompts

    if not a.busy:
        check()
    seen, held_out = prompts(a.dataset)
    return bench(engine(a.engine), s, seen, held_out, a.busy)


def main() -> int:
    a = parse()
    if a.command == "report":
        print(report(Records(a.file)))
        return 0
    try:
        s, records = settings(a), Records(a.file)
        if a.command == "pieces":
            show_pieces(a, records, s)
            return 0
        records.begin(header(a, s))
        return 2 if (run_links if a.command == "links" else run_pieces)(a, records, s) else 0
    except (NetworkError, BusyError, RecordsError, ServerError) as error:
        print(f"bench_served.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
