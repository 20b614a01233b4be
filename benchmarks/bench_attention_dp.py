"""Attention-DP: what was tried for fewer remote rows and more locality, beside the defaults; docs/what-did-not-help.md.

    python benchmarks/bench_attention_dp.py TRACE [--seeds 3] [--ep-size 4 8]
    python benchmarks/bench_attention_dp.py TRACE --phases [--ep-size 4]      # a trace with prefill and decode
    python benchmarks/bench_attention_dp.py TRACE --apart [--ep-size 4]       # the same: prefill and decode apart
    python benchmarks/bench_attention_dp.py TRACE --live [--ep-size 2]        # running requests, as in an engine

20/80 by request, load limit 1.15, batches of 1,024 mixed. First how the scheduler is set, on one plan: the bound on a
group's lead and the price of a lead. Then homes: the search sees a
share of the tokens at a random home, since the request map sends requests elsewhere than the clustering has them.
With --phases:
plans from the tokens of one phase or of both, scored on those of each. With --apart: a plan for decode alone, whose
ranks are chosen by what prompts' token ids predict, by the experts that prefill has routed the prompt to, or by the
experts that decode will use; LAR of the decoded tokens. With --live: a model of a server, in which the next
request comes as one ends. A pass takes as long as `fixed` tokens, and a token for each token of the fullest group, and
for its remote pairs what makes the all-to-all that share of the whole, for an engine that knows nothing of experts and
sends each request where fewest run. Over that engine, on a plan's placement: requests in turn; even; the scheduler with
a bound of .96 mean requests on a group's lead and no price (bound); as engines have it (as is); other prices of a lead.
"""

import argparse
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from bench_plans import KnownRouting, local_pairs

from semmoe.core import DECODE, PREFILL, Plan, RoutingTrace
from semmoe.metrics import max_over_mean
from semmoe.online import live_settings, schedule_with, start
from semmoe.placement import cocluster
from semmoe.replayer import replay
from semmoe.requests.capacity import CapacityScheduler, SchedulerSettings
from semmoe.requests.policy import RoundRobin
from semmoe.requests.scheduler import Assigned
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import split
from semmoe.topology import Topology
from semmoe.trace import open_trace

WAYS = {
    "default": {},
    "lead 30": {"lead_requests": 30},
    "lead 50": {"lead_requests": 50},
    "lead 60": {"lead_requests": 60},
    "no price": {"feedback": 0.0},
    "price .05": {"feedback": 0.05},
}
NUMBERS = (1, 2, 4, 8, 32)  # requests that run in each group, on average
FIXED = (4, 64, 512)  # tokens that take as long as a pass without any: of a CPU, of GPUs that decode
SHARES = (0.15, 0.3, 0.59)
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


def figures(trace: RoutingTrace, plan: Plan, seed: int) -> list[float]:
    result = replay(trace, plan, ReplaySettings(seed=seed))
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
    print(f"EP{D}, tokens at a random home in the search: LAR, remote ranks, cost, load")
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
    print(f"EP{D}, mean of {seeds} splits: LAR, remote ranks, cost, load")
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


class Even:
    """The group with the fewest requests, one at random among equals: as even as an engine can keep them."""

    def __init__(self, groups: int) -> None:
        self._running, self._rng = np.zeros(groups), np.random.default_rng(0)

    def admit(self, prompt: np.ndarray, expected_tokens: float) -> Assigned:
        group = int(np.lexsort((self._rng.random(len(self._running)), self._running))[0])
        self._running[group] += 1
        return Assigned(request=0, group=group, work=1.0, prompt_work=0.0)

    def finish(self, assigned: Assigned, actual_tokens: float) -> None:
        self._running[assigned.group] -= 1


@dataclass(frozen=True)
class Arrivals:
    """Requests in their order; as one ends, the next comes."""

    prompts: list[np.ndarray]
    decoded: np.ndarray  # (R,) tokens
    shares: np.ndarray  # (R, D) of the pairs that each group hosts

    def passes(self, scheduler, number: int) -> np.ndarray:
        """(3,): passes in which `number` run, and the sums over them of the tokens, and of the tokens' remote shares,
        of the fullest group. A pass holds a token of every request that runs, and all of the prompts that have come.
        """
        mean, rng, R = float(self.decoded.mean()), np.random.default_rng(0), len(self.prompts)
        lengths, sums = np.array([len(prompt) for prompt in self.prompts]), np.zeros(3)
        handles, group, alive, left = [], np.zeros(R, np.int64), np.zeros(0, np.int64), self.decoded.copy()
        left[:number] = rng.integers(1, left[:number] + 1)  # so that the first do not end together
        while (come := len(handles)) + number - len(alive) < R:
            new = np.arange(come, come + number - len(alive))
            handles += [scheduler.admit(self.prompts[r], mean) for r in new]
            group[new] = [handles[r].group for r in new]
            tokens = np.concatenate([np.ones(len(alive)), lengths[new]])
            alive = np.concatenate([alive, new])
            until = int(left[alive].min())
            sums += self._pass(alive, group[alive], tokens)
            sums += (until - 1) * self._pass(alive, group[alive], np.ones(len(alive)))
            left[alive] -= until
            for r in alive[left[alive] == 0]:
                scheduler.finish(handles[r], float(self.decoded[r]))
            alive = alive[left[alive] > 0]
        return sums

    def _pass(self, alive: np.ndarray, group: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        remote = tokens * (1 - self.shares[alive, group])
        return np.array([1, *(np.bincount(group, of).max() for of in (tokens, remote))])


def arrivals(trace: RoutingTrace, plan: Plan, in_blocks: bool, seed: int) -> Arrivals:
    """All requests twice: in random order, or with those that prefer one group after those that prefer another."""
    rng, R = np.random.default_rng(seed), trace.num_requests
    order = np.concatenate([rng.permutation(R), rng.permutation(R)])
    if in_blocks:
        scorer = CapacityScheduler(plan.requests)
        scores = [scorer.score(trace.prompt(r)) - plan.requests.prices for r in range(R)]
        order = np.tile(np.argsort(np.argmax(scores, axis=1) + 0.5 * rng.random(R)), 2)
    decoded = np.diff(trace.request_offsets)
    shares = local_pairs(trace, plan) / decoded[:, None]
    return Arrivals([trace.prompt(r) for r in order], decoded[order], shares[order])


def schedulers(plan: Plan) -> dict[str, Any]:
    """How requests may be assigned, by name; the prices are those of a lead."""
    D = plan.topology.dp_size
    priced = {
        f"{price:g}": start(plan.requests, live_settings(D, lead_price=price)) for price in (0.05, 0.1, 0.2, 0.4, 0.8)
    }
    return {
        "in turn": start(RoundRobin(num_groups=D), live_settings(D)),
        "even": Even(D),
        "bound": start(plan.requests, live_settings(D, lead_requests=0.96 * D, lead_price=0.0)),
        "as is": start(plan.requests, live_settings(D)),
    } | priced


def live(trace: RoutingTrace, D: int, seeds: int) -> None:
    parts = [split(trace, 0.5, seed) for seed in range(seeds)]
    plans = [
        solve(profile, Topology(ep_size=D, dp_size=D), SolveSettings(seed=s)) for s, (profile, _) in enumerate(parts)
    ]
    for in_blocks in (False, True):
        found: dict[tuple, list] = {}
        for seed, (plan, (_, evaluation)) in enumerate(zip(plans, parts, strict=True)):
            given = arrivals(evaluation, plan, in_blocks, seed)
            blind = replace(given, shares=np.full_like(given.shares, 1 / D))
            for number in NUMBERS:
                without = blind.passes(Even(D), number * D)
                each = {name: given.passes(one, number * D) for name, one in schedulers(plan).items()}
                for fixed, share in product(FIXED, SHARES):
                    price = share / (1 - share) * (fixed * without[0] + without[1]) / without[2]
                    weights = np.array([fixed, 1, price])
                    row = [of @ weights / (without @ weights) for of in each.values()]
                    found.setdefault((number, fixed, share), []).append(row)
        show_live(D, seeds, "in blocks" if in_blocks else "mixed", list(each), found)


def show_live(D: int, seeds: int, order: str, names: list[str], found: dict[tuple, list]) -> None:
    print(f"EP{D}, requests {order}, mean of {seeds} splits: time over that of an engine without a plan that is even")
    print(f"  {'requests a rank, fixed, share':30}" + "".join(f"{name:>8}" for name in names))
    rows = np.array([np.mean(of, axis=0) for of in found.values()])
    for (number, fixed, share), row in zip(found, rows, strict=True):
        print(f"  {number:14}{fixed:8}{share:8.2f}" + "".join(f"{value:8.3f}" for value in row))
    over = rows - rows[:, [names.index("even")]]
    for what, row in (("mean", rows.mean(axis=0)), ("at worst above even, plan and all", over.max(axis=0))):
        print(f"  {what:30}" + "".join(f"{value:8.3f}" for value in row), flush=True)


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
