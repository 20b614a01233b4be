"""Attention-DP: what was tried for fewer remote rows and more locality, beside the defaults; docs/what-did-not-help.md.

    python benchmarks/bench_attention_dp.py TRACE [--seeds 3] [--ep-size 4 8]
    python benchmarks/bench_attention_dp.py TRACE --phases [--ep-size 4]      # a trace with prefill and decode
    python benchmarks/bench_attention_dp.py TRACE --apart [--ep-size 4]       # the same: prefill and decode apart
    python benchmarks/bench_attention_dp.py TRACE --live [--ep-size 2]        # running requests, as in an engine

20/80 by request, load limit 1.15, batches of 1,024 mixed. First how the scheduler is set, on one plan: the bound on a
group's lead, the window, how many of it leave together, and the price of a lead. Then homes: the search sees a
share of the tokens at a random home, since the request map sends requests elsewhere than the clustering has them.
With --phases:
plans from the tokens of one phase or of both, scored on those of each. With --apart: a plan for decode alone, whose
ranks are chosen by what prompts' token ids predict, by the experts that prefill has routed the prompt to, or by the
experts that decode will use; LAR of the decoded tokens. With --live: requests arrive while others run,
so many on average, and end at random; LAR, and the requests of the fullest group over an even share, which a pass
waits for, by the bound on a group's lead. Then the pass that follows, over one of a plan-less engine whose groups are
even, of which a share s is the all-to-all and a part g of the rest grows with the fullest group:
    s (1 - LAR) / (1 - 1 / D) + (1 - s) (1 - g + g fullest)
with requests in turn, on the bound that engines have, and on the best of those tried, which is what a price of load,
however well known, could reach.
"""

import argparse
from pathlib import Path

import numpy as np
from bench_plans import KnownRouting, local_pairs

from semmoe.core import DECODE, PREFILL, Plan, RoutingTrace
from semmoe.metrics import max_over_mean
from semmoe.online import LIVE_LEAD, live_settings, schedule_with, start
from semmoe.placement import cocluster
from semmoe.replayer import replay
from semmoe.requests.capacity import CapacityScheduler, SchedulerSettings
from semmoe.requests.policy import RoundRobin
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import split
from semmoe.topology import Topology
from semmoe.trace import open_trace

WAYS = {
    "window 1": {},
    "window 64": {"max_wait": 64, "release": 16},
    "window 64, all leave": {"max_wait": 64, "release": 64},
    "window 64, one leaves": {"max_wait": 64, "release": 1},
    "window 64, lead 30": {"max_wait": 64, "release": 16, "lead_requests": 30},
    "window 64, lead 50": {"max_wait": 64, "release": 16, "lead_requests": 50},
    "window 64, lead 60": {"max_wait": 64, "release": 16, "lead_requests": 60},
    "window 64, no price": {"max_wait": 64, "release": 16, "feedback": 0.0},
    "window 64, price .05": {"max_wait": 64, "release": 16, "feedback": 0.05},
    "window 128": {"max_wait": 128, "release": 32},
    "window 256": {"max_wait": 256, "release": 64},
}
NUMBERS = (1, 2, 4, 8, 32)  # requests that run at a time
IN_TURN = 0.0
LEADS = (0.5, LIVE_LEAD, 1.25, 1.5, 2.0, 4.0)
SPREAD = (0.0, 0.2, 1.0)  # share of the tokens that the search sees at a random home


def known_shares(trace: RoutingTrace, plan: Plan) -> np.ndarray:
    """(R, D) share of each request's pairs that each group hosts."""
    return local_pairs(trace, plan) / np.diff(trace.request_offsets)[:, None]


def scheduled(
    trace: RoutingTrace, plan: Plan, settings: SchedulerSettings, known: np.ndarray | None = None
) -> tuple[float, float]:
    """(LAR, tokens max / mean) with predicted scores, or with shares (R, D) that are known."""
    pairs, lengths = local_pairs(trace, plan), np.diff(trace.request_offsets)
    scheduler = CapacityScheduler(plan.requests, settings)
    if known is not None:
        scheduler = KnownRouting(plan.requests, settings)
        scheduler.shares = known
    prompts = [trace.prompt(r) if known is None else [r] for r in range(trace.num_requests)]
    groups = schedule_with(scheduler, prompts, lengths, ReplaySettings().unfinished)
    tokens = np.bincount(groups, lengths, plan.topology.dp_size)
    return float(pairs[np.arange(len(groups)), groups].sum() / lengths.sum()), max_over_mean(tokens)


class Spread(cocluster._Layers):
    """The search, with a share of the tokens at a home drawn at random."""

    share = 0.0

    def __init__(self, *given) -> None:
        super().__init__(*given)
        rng, D = np.random.default_rng(self.seed + 1), self.topology.dp_size
        for name in ("group", "part_group"):
            home = getattr(self, name)
            setattr(self, name, np.where(rng.random(len(home)) < self.share, rng.integers(D, size=len(home)), home))


def figures(trace: RoutingTrace, plan: Plan, seed: int, window: int = 64) -> list[float]:
    result = replay(trace, plan, ReplaySettings(window=window, seed=seed))
    lar, rows = result.total.lar, result.total.remote_ranks_per_token
    return [lar, rows, rows - trace.fingerprint.top_k * lar, float(result.load_max_over_mean.mean())]


def of_phase(trace: RoutingTrace, phases: tuple[int, ...]) -> RoutingTrace:
    """The same requests with their tokens of `phases` alone."""
    keep = np.isin(trace.phase, phases)
    kept = np.concatenate([[0], np.cumsum(keep)])
    values = {"token_ids": trace.token_ids[keep], "expert_ids": trace.expert_ids[keep], "phase": trace.phase[keep]}
    return RoutingTrace(**{**vars(trace), **values, "request_offsets": kept[trace.request_offsets]})


def show(name: str, rows: list) -> None:
    print(f"  {name:44}" + "  ".join(f"{value:.3f}" for value in np.mean(rows, axis=0)), flush=True)


def settings_and_homes(trace: RoutingTrace, D: int, seeds: int) -> None:
    splits, topology = [split(trace, 0.2, seed) for seed in range(seeds)], Topology(ep_size=D, dp_size=D)
    plans = [solve(profile, topology, SolveSettings(seed=seed)) for seed, (profile, _) in enumerate(splits)]
    pairs = [(evaluation, plan) for (_, evaluation), plan in zip(splits, plans, strict=True)]
    print(f"EP{D}, mean of {seeds} splits: LAR and tokens max/mean with predictions, then with true routing")
    for name, changed in WAYS.items():
        chosen = SchedulerSettings(**changed)
        show(name, [scheduled(*pair, chosen) + scheduled(*pair, chosen, known_shares(*pair)) for pair in pairs])
    print(f"EP{D}, tokens at a random home in the search: LAR, remote ranks, cost, load; window 64")
    original, cocluster._Layers = cocluster._Layers, Spread
    try:
        for Spread.share in SPREAD:
            found = [solve(profile, topology, SolveSettings(seed=seed)) for seed, (profile, _) in enumerate(splits)]
            rows = [
                figures(evaluation, plan, seed)
                for seed, (plan, (_, evaluation)) in enumerate(zip(found, splits, strict=True))
            ]
            show(f"share {Spread.share}", rows)
    finally:
        cocluster._Layers = original


def phases(trace: RoutingTrace, D: int, seeds: int) -> None:
    kinds = {"both": (PREFILL, DECODE), "prefill": (PREFILL,), "decode": (DECODE,)}
    print(f"EP{D}, mean of {seeds} splits: LAR, remote ranks, cost, load; window 64")
    splits = [split(trace, 0.5, seed) for seed in range(seeds)]
    for name, of in kinds.items():
        plans = [
            solve(of_phase(profile, of), Topology(ep_size=D, dp_size=D), SolveSettings(seed=seed))
            for seed, (profile, _) in enumerate(splits)
        ]
        for scored in ("prefill", "decode"):
            parts = [of_phase(evaluation, kinds[scored]) for _, evaluation in splits]
            rows = [figures(part, plan, seed) for seed, (part, plan) in enumerate(zip(parts, plans, strict=True))]
            show(f"planned on {name}, scored on {scored}", rows)


def apart(trace: RoutingTrace, D: int, seeds: int) -> None:
    print(f"EP{D}, {seeds} splits: LAR and tokens max/mean of decode, with ranks chosen by")
    found: dict[str, list] = {"predictions": [], "experts of the prompt": [], "experts of decode": []}
    for seed in range(seeds):
        profile, evaluation = split(trace, 0.5, seed)
        plan = solve(of_phase(profile, (DECODE,)), Topology(ep_size=D, dp_size=D), SolveSettings(seed=seed))
        parts = [of_phase(evaluation, (phase,)) for phase in (PREFILL, DECODE)]
        both = np.flatnonzero(np.all([np.diff(part.request_offsets) > 0 for part in parts], axis=0))
        prompt, decode = (part.select(both) for part in parts)
        known = (None, known_shares(prompt, plan), known_shares(decode, plan))
        for rows, shares in zip(found.values(), known, strict=True):
            rows.append(scheduled(decode, plan, SchedulerSettings(), shares))
    for name, rows in found.items():
        show(name, rows)
        print("    of splits: " + "  ".join(f"{lar:.3f}" for lar, _ in rows), flush=True)


def running(trace: RoutingTrace, plan: Plan, lead: float, number: int, new_tokens: float = 16) -> tuple[float, float]:
    """(LAR, requests of the fullest group over an even share), mean over the arrivals of all requests of a trace.

    lead: the bound on a group's, in mean requests; IN_TURN: groups get requests in turn, as of engines by default.
    """
    D, rng = plan.topology.dp_size, np.random.default_rng(0)
    share = local_pairs(trace, plan) / np.diff(trace.request_offsets)[:, None]
    tables = RoundRobin(num_groups=D) if lead == IN_TURN else plan.requests
    scheduler = start(tables, live_settings(D, lead_requests=lead * D))
    alive: list = []
    found = []
    for r in rng.permutation(trace.num_requests):
        ends = max(len(alive) - number + 1, int(bool(alive) and rng.random() < 0.5))
        for _ in range(ends):
            scheduler.finish(alive.pop(rng.integers(len(alive))), new_tokens)
        alive.append(scheduler.admit(trace.prompt(r), new_tokens))
        fullest = np.bincount([one.group for one in alive], minlength=D).max()
        found.append((share[r, alive[-1].group], fullest / -(-len(alive) // D)))
    return tuple(np.mean(found, axis=0))


def live(trace: RoutingTrace, D: int, seeds: int) -> None:
    print(f"EP{D}, mean of {seeds} splits, by requests that run at a time: LAR and fullest group over even, for each")
    print(f"  {'':44}" + "  ".join(f"{number:12}" for number in NUMBERS))
    splits = [split(trace, 0.5, seed) for seed in range(seeds)]
    plans = [
        solve(profile, Topology(ep_size=D, dp_size=D), SolveSettings(seed=s)) for s, (profile, _) in enumerate(splits)
    ]
    found = {}
    for lead in (IN_TURN, *LEADS):
        rows = [
            np.ravel([running(evaluation, plan, lead, number) for number in NUMBERS])
            for plan, (_, evaluation) in zip(plans, splits, strict=True)
        ]
        show(f"a lead of {lead} mean requests" if lead else "in turn", rows)
        found[lead] = np.mean(rows, axis=0).reshape(len(NUMBERS), 2)
    for share in (0.3, 0.59):
        for growing in (1.0, 0.25):
            passes = {lead: pass_time(of, D, share, growing) for lead, of in found.items()}
            best = [min(LEADS, key=lambda lead: passes[lead][n]) for n in range(len(NUMBERS))]
            print(f"  a pass, s {share:g}, g {growing:g}: in turn, now, at best by lead")
            for n, lead in enumerate(best):
                three = (passes[one][n] for one in (IN_TURN, LIVE_LEAD, lead))
                print(f"  {NUMBERS[n]:6}" + "".join(f"{value:8.3f}" for value in three) + f" at {lead:g}")


def pass_time(found: np.ndarray, D: int, share: float, growing: float) -> np.ndarray:
    """(numbers,) over vanilla's, from LAR and fullest group (numbers, 2); the module's docstring has the formula."""
    lar, fullest = found.T
    return share * (1 - lar) / (1 - 1 / D) + (1 - share) * (1 - growing + growing * fullest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--ep-size", type=int, nargs="*", default=[4, 8])
    parser.add_argument("--phases", action="store_true")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--live", action="store_true")
    given = parser.parse_args()
    trace = open_trace(given.trace)
    for D in given.ep_size:
        chosen = phases if given.phases else apart if given.apart else live if given.live else settings_and_homes
        chosen(trace, D, given.seeds)


if __name__ == "__main__":
    main()
