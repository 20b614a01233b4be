"""Serving under objectives on an engine itself, two nodes over a slow network: vanilla beside plans.

    OMP_NUM_THREADS=1 .venv-vllm/bin/python benchmarks/bench_serving.py --engine sglang|vllm
        [--rate 200mbit] [--attention dp tp] [--redundant-experts 0] [--rounds 2] [--moetuner] [--dataset FILE]
        [--quick] [--out FILE]

In the engine's own environment (SGLang: with SGLANG_USE_CPU_ENGINE=1). Each of two ranks is a node with a network
namespace and a /dev/shm of its own (see network.py; needs root). The engine's own bench client sends, from node 0, text
that the plans were not profiled on. Set-ups take turns: a server is started, runs everything, and makes place for the
next, in each round.

Goodput: a light load gives vanilla's lightest median time to first token and end-to-end latency in the first round;
the objectives are 5 times those. Requests all at once give vanilla's throughput, and rates rise in fractions of it,
the same for all set-ups of one attention, until the medians leave the objectives; goodput is the last rate before.
Arrivals and prompts at a rate are the same for all. Ratios are to vanilla in the same round: medians over rounds,
beside the least and the greatest.

Lengths: attention-TP at a low rate with prompts of exactly so many tokens, as in the paper's table 2.

The plug-in counts, over all that a server did: local activation rate (lar), rows sent to another rank and all-to-all
bytes, both per token and layer. `link` is all traffic between the nodes while requests come all at once, the engine's
own too. Prints configuration, tables, one JSON line.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from math import nan
from pathlib import Path
from statistics import median

from network import Network, NetworkError, slow_network
from serving.client import Client, write_datasets
from serving.engine import RANKS, Engine, SetUp, add_engine, engine
from serving.server import Server, ServerError, counters, link_bytes, make_plans, prompts, serving
from serving.sweep import AT_ONCE, E2E, LIGHT, OBJECTIVE, TTFT, Settings, Sweep, Visit, activity, at_rate, of_length


def set_ups(s: Settings, plans: dict[tuple[str, str], Path]) -> list[SetUp]:
    """The first of each attention is vanilla, with an all-to-all."""
    out, copies = [], f", {s.redundant_experts} redundant" if s.redundant_experts else ""
    for attention in s.attentions:
        name, plan = attention.upper(), plans[attention, "semmoe"]
        out.append(SetUp(name=f"{name}, vanilla", attention=attention))
        if s.moetuner:
            out.append(SetUp(name=f"{name}, MoETuner", attention=attention, plan=plans[attention, "moetuner"]))
        if attention == "tp" and s.all_reduce:
            out.append(SetUp(name=f"{name}, vanilla, all-reduce", attention=attention, all_to_all=False))
        if attention == "dp":
            out.append(SetUp(name=f"{name}, plan{copies}", attention=attention, plan=plan))
        else:
            out += [SetUp(name=f"{name}, plan{copies}, shuffle {way}", attention=attention, plan=plan, shuffle=way)
                    for way in ("layer", "batch")]  # fmt: skip
    return out


def run_rounds(
    s: Settings,
    served: Engine,
    ups: list[SetUp],
    datasets: dict[int, Path],
    network: Network,
    scratch: Path,
    sweeps: dict[str, Sweep],
) -> Iterator[Visit]:
    """Every set-up in every round; the first round begins with vanilla, which fixes the rates, and others turn."""
    for i in range(s.rounds):
        for up in [*ups[i % len(ups) :], *ups[: i % len(ups)]]:
            begin = time.monotonic()
            # Nothing is cached: the same prompts come again at every rate.
            with serving(served, up, scratch / "server", served.UNCACHED, network) as server:
                started = time.monotonic() - begin
                client = Client(served, server, s.output_tokens)
                yield visit(s, i, up, server, client, datasets, network, sweeps[up.attention])
            print(f"  round {i + 1} of {s.rounds}, {up.name}: up after {started:.0f} s, all in "
                  f"{time.monotonic() - begin:.0f} s", file=sys.stderr, flush=True)  # fmt: skip


def visit(
    s: Settings, number: int, up: SetUp, server: Server, client: Client, datasets: dict[int, Path], network: Network,
    sweep: Sweep,
) -> Visit:  # fmt: skip
    out = Visit(round=number, name=up.name, attention=up.attention)
    out.runs[LIGHT] = client.run(datasets[0], s.light_requests, s.light_rate, warmup=8)
    before = link_bytes(network)
    out.runs[AT_ONCE] = client.run(datasets[0], s.at_once_requests, float("inf"))
    out.runs[AT_ONCE]["link_mb"] = (link_bytes(network) - before) / 1e6
    if not sweep.rates:
        sweep.fix(out.runs[LIGHT], out.runs[AT_ONCE], s.fractions)
    for rate in sweep.rates:
        figures = out.runs[at_rate(rate)] = client.run(datasets[0], s.requests(rate), rate)
        if not sweep.holds(figures):
            break
        out.goodput = rate
    for length in s.lengths if up.attention == "tp" else ():
        out.runs[of_length(length)] = client.run(datasets[length], s.length_requests, s.length_rate)
    time.sleep(2)  # counters are published every second
    out.activity = activity(counters(server.folder))
    return out


def value(of: list[Visit], run: str, column: str = "") -> float:
    """Median of the rounds; nan without any."""
    found = [figure for v in of if (figure := v.figure(run, column)) is not None]
    return median(found) if found else nan


def ratio(of: list[Visit], everything: list[Visit], run: str, column: str = "") -> str:
    """To vanilla in the same round; a dash where it has none."""
    ratios = []
    for v in of:
        vanilla = next(w for w in everything if (w.round, w.name) == (v.round, f"{v.attention.upper()}, vanilla"))
        own, its = v.figure(run, column), vanilla.figure(run, column)
        ratios += [own / its] if own is not None and its else []
    return f"{median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]" if ratios else "-"


def by_name(found: list[Visit], attention: str, run: str = "goodput") -> dict[str, list[Visit]]:
    """The visits that have the run, by set-up."""
    names = dict.fromkeys(v.name for v in found if v.attention == attention)
    groups = {n: [v for v in found if v.name == n and (run == "goodput" or run in v.runs)] for n in names}
    return {name: of for name, of in groups.items() if of}


def show_goodput(attention: str, sweep: Sweep, found: list[Visit]) -> None:
    print(f"\nattention-{attention.upper()}, objectives: {TTFT} {sweep.objectives[TTFT]:.0f}, {E2E} "
          f"{sweep.objectives[E2E]:.0f}, {OBJECTIVE} times vanilla's at the light load\n  {'':38}{'goodput':>8}"
          f"{'over vanilla':>20}{'at once':>10}{'over vanilla':>20}{'lar':>8}{'rows':>8}"
          f"{'all-to-all':>12}{'link':>12}")  # fmt: skip
    for name, of in by_name(found, attention).items():
        bound = ">=" if any(v.goodput == sweep.rates[-1] for v in of) else ""  # no rate was too much
        counted = [value(of, "activity", c) for c in ("lar", "remote_rows_per_token", "all_to_all_bytes_per_token")]
        print(f"  {name:38}{bound + format(value(of, 'goodput'), '.2f'):>8}{ratio(of, found, 'goodput'):>20}"
              f"{value(of, AT_ONCE, 'request_throughput'):10.2f}{ratio(of, found, AT_ONCE, 'request_throughput'):>20}"
              f"{counted[0]:8.3f}{counted[1]:8.3f}{counted[2]:10.0f} B"
              f"{value(of, AT_ONCE, 'link_mb'):9.1f} MB")  # fmt: skip


def show_runs(attention: str, sweep: Sweep, s: Settings, found: list[Visit]) -> None:
    columns = ("request_throughput", "output_throughput", TTFT, "p99_ttft_ms", E2E, "p99_e2e_ms", "p99_itl_ms")
    print(f"\n  {'':38}" + "".join(f"{c:>19}" for c in (*columns, "ttft/vanilla", "e2e/vanilla", "held")))
    for run in (LIGHT, *map(at_rate, sweep.rates), AT_ONCE):
        rows = by_name(found, attention, run)
        print(f"  {run}" + (f", {at_rate(s.light_rate)}" if run == LIGHT else "") + ("" if rows else ": not reached"))
        for name, of in rows.items():
            cells = [f"{value(of, run, column):.1f}" for column in columns]
            cells += [ratio(of, found, run, column) for column in (TTFT, E2E)]
            cells += [f"{sum(sweep.holds(v.runs[run]) for v in of)} of {len(of)}"]
            print(f"    {name:36}" + "".join(f"{cell:>19}" for cell in cells))


def show_lengths(s: Settings, found: list[Visit]) -> None:
    print(f"\ninput lengths, attention-TP, {at_rate(s.length_rate)}, {s.length_requests} requests of {s.output_tokens} "
          f"new tokens\n  {'':38}{'p99_ttft_ms':>15}{'over vanilla':>20}{E2E:>15}{'over vanilla':>20}")  # fmt: skip
    for run in map(of_length, s.lengths):
        print(f"  {run}")
        for name, of in by_name(found, "tp", run).items():
            print(f"    {name:36}" + "".join(f"{value(of, run, column):15.0f}{ratio(of, found, run, column):>20}"
                                             for column in ("p99_ttft_ms", E2E)))  # fmt: skip


def parse() -> tuple[Settings, Path | None]:
    d = Settings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    parser.add_argument("--rate", default=d.rate, help="of each node's link, as tc has it")
    parser.add_argument("--attention", nargs="+", choices=["dp", "tp"], default=d.attentions, dest="attentions")
    parser.add_argument("--redundant-experts", type=int, default=d.redundant_experts, help="of the plans")
    parser.add_argument("--all-reduce", action="store_true", help="vLLM: vanilla attention-TP as it is by itself, too")
    parser.add_argument("--moetuner", action="store_true", help="MoETuner's plan, too")
    parser.add_argument("--dataset", default=d.dataset, help="prompts of a file in place of held-out text")
    parser.add_argument("--rounds", type=int, default=d.rounds)
    parser.add_argument("--fractions", type=float, nargs="+", default=d.fractions, help="of vanilla's throughput")
    parser.add_argument("--seconds", type=float, default=d.seconds, help="of arrivals at each rate")
    parser.add_argument("--lengths", type=int, nargs="*", default=d.lengths)
    parser.add_argument("--quick", action="store_true", help="one round, two rates, 10 requests each")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file too")
    given = vars(parser.parse_args())
    quick, out = given.pop("quick"), given.pop("out")
    if given["all_reduce"] and given["engine"] != "vllm":
        parser.error("--all-reduce is vLLM's: SGLang's vanilla has an all-to-all")
    if quick:
        given |= {"rounds": 1, "fractions": (0.5, 1.0), "lengths": (256,), "light_requests": 10,
                  "at_once_requests": 10, "most_requests": 10, "length_requests": 10}  # fmt: skip
    return Settings(**{name: tuple(v) if isinstance(v, list) else v for name, v in given.items()}), out


def run_all(s: Settings, served: Engine) -> tuple[dict[str, Sweep], list[Visit]]:
    sweeps = {attention: Sweep() for attention in s.attentions}
    with slow_network(RANKS, s.rate) as network, tempfile.TemporaryDirectory(prefix="semmoe-") as scratch:
        seen, held_out = prompts(s.dataset)
        plans = make_plans(seen, s.attentions, s.redundant_experts, Path(scratch), s.moetuner)
        datasets = write_datasets(served, held_out, s.lengths, s.length_requests, Path(scratch))
        return sweeps, list(run_rounds(s, served, set_ups(s, plans), datasets, network, Path(scratch), sweeps))


def main() -> int:
    s, out = parse()
    served, told = engine(s.engine), replace(s, dataset=Path(s.dataset).name)
    print(f"{served}, torch {version('torch')}, embedded model, {RANKS} nodes of one rank on "
          f"{os.cpu_count()} cores, {platform.machine()}, links of {s.rate}; "
          f"{told}; "
          f"{served.OPTIONS | served.UNCACHED}")  # fmt: skip
    try:
        sweeps, found = run_all(s, served)
    except (NetworkError, ServerError, ValueError) as error:
        print(f"bench_serving.py: {error}", file=sys.stderr)
        return 2
    for attention, sweep in sweeps.items():
        show_goodput(attention, sweep, found)
        show_runs(attention, sweep, s, found)
    if "tp" in s.attentions and s.lengths:
        show_lengths(s, found)
    line = json.dumps({"settings": vars(told), "sweeps": {name: vars(sweep) for name, sweep in sweeps.items()},
                       "visits": [vars(v) for v in found]})  # fmt: skip
    print("\n" + line)
    if out:
        out.write_text(line + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
