"""Predict a plan's gain: solve on a part of a profile, replay on the rest, and time on links."""

from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from semmoe.core import NEVER, Plan, RoutingTrace
from semmoe.costs import timing
from semmoe.costs.links import Links, PhaseLinks
from semmoe.evaluation.replay import ReplayResult, replay, scheduled_by_answers
from semmoe.evaluation.results import Expected, checked
from semmoe.placement.problem import Problem
from semmoe.settings import ReplaySettings
from semmoe.solver import solve, solve_problem
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology
from semmoe.traces.affinity import expert_load
from semmoe.traces.split import near_duplicates, split

BANDWIDTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # of other links, times that of the given ones
BATCHES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # tokens of other batches, times those that were replayed
MOST_ROWS = 1 << 16  # of a group's pass, up to which it is asked whether shuffling pays


@dataclass(frozen=True)
class Case:
    """The replays and the served configuration; semmoe's own kernels are charged to the plan's method alone."""

    replayed: dict[str, ReplayResult]  # by method
    method: str
    copies: bool
    topology: Topology
    shape: timing.LayerShape

    @property
    def tokens(self) -> float:
        return self.replayed[self.method].tokens_per_batch


def expect(
    problem: Problem,
    measure: ReplaySettings,
    links: PhaseLinks | None = None,
    shape: timing.LayerShape | None = None,
    holdout: float = 0.2,
) -> dict[str, Any] | None:
    """Estimate a plan's gain on unseen requests: solve on a share 1 - `holdout` of a profile and replay on the rest.

    Returns the metrics of the plan, those of `linear` and `eplb` under "others" and, given links and shape, predicted
    times, a verdict, and under "elsewhere" the gain on other links. Decoding has its own verdict under "decode" if its
    links differ. Returns None if too few requests are distinct to hold any out. The problem's embeddings are not used.
    """
    trace, topology = problem.trace, problem.topology
    settings = problem.settings
    smallest = max(2, topology.dp_size + 1)
    if trace.num_requests * (1 - holdout) < smallest or near_duplicates(trace).max() == 0:
        return None
    held_out, profile = split(trace, holdout, settings.seed)
    own = solve_problem(replace(problem, trace=profile, embeddings=None))
    plans = {settings.method: own}
    for method in [one for one in ("linear", "eplb") if one != settings.method]:
        plans[method] = solve(profile, topology, replace(settings, method=method), costs=problem.costs)
    replayed = {method: replay(held_out, plan, measure) for method, plan in plans.items()}
    # Where links are known, `_time` adds the bytes per rank pair of a batch, which hold the same information.
    figures = {
        name: {k: v for k, v in result.as_dict().items() if k != "rows_per_rank_pair"}
        for name, result in replayed.items()
    }
    timed: dict[str, Any] = {"verdict": None}
    if links and shape:
        case = Case(replayed, settings.method, settings.redundant_experts > 0, topology, shape)
        timed = _time(case, figures, links.prefill)
        if links.decode != links.prefill:
            timed["decode"] = _judge(case, _predict(case, links.decode), links.decode)
        if own.tokens.by_tables:
            unshuffled = replay(held_out, replace(own, tokens=ByPosition()), measure)
            # A pass may hold tokens of both phases, so the number is the larger one.
            timed["shuffle_from"] = max(shuffle_from(case, unshuffled, one) for one in (links.prefill, links.decode))
    plan_figures = figures.pop(settings.method)
    by_answers = scheduled_by_answers(held_out, topology)
    about = {"holdout": holdout, "requests": held_out.num_requests, "scheduled_by_answers": by_answers}
    return checked(Expected, {**about, **asdict(measure), **plan_figures, "others": figures, **timed})


def shuffle_from(case: Case, unshuffled: ReplayResult, links: Links) -> int:
    """The least rows of a group's pass for which shuffling pays on `links`; NEVER if no pass is large enough.

    unshuffled: the replay of the same plan with contiguous slices. What shuffling saves grows in proportion to the
    rows, beyond a fixed part; what its kernels take grows more slowly with each row. So it pays from one number on.

    Worked example: shuffling saves .2 us a row, and its kernels take 29 us and .1 us a row: from 291 rows on.
    """
    both = replace(case, replayed={"": unshuffled, case.method: case.replayed[case.method]})
    saved = []
    for batch in (1.0, 2.0):
        times = [prediction.time for prediction in _predict(both, links, batch).values()]
        contiguous, shuffled = (time.communication + time.experts for time in times)
        saved.append(contiguous - shuffled)
    rows = np.arange(1, MOST_ROWS + 1)
    batches = rows * case.topology.dp_size / case.tokens
    kernels = timing.shuffle_seconds(rows) if timing.on_gpus(links) else np.zeros(len(rows))
    pays = saved[0] + (saved[1] - saved[0]) * (batches - 1) > kernels
    return int(rows[pays][0]) if pays.any() else NEVER


def excess_load(trace: RoutingTrace, plan: Plan, limit: float, measure: ReplaySettings) -> list[str]:
    """Say by how much a plan exceeds its load limit, and why; nothing if it keeps the limit.

    The load is that of held-out requests, or of the profile `trace` where none were held out.
    """
    held_out = None if plan.expected is None else plan.expected["load_max_over_mean"]
    if held_out is not None and held_out <= limit:
        return []
    own = float(replay(trace, plan, measure).load_max_over_mean.mean())
    load = own if held_out is None else held_out
    if load <= limit:
        return []
    of = "of the profile" if held_out is None else "that were held out"
    reached = f"the load limit of {limit:g} is not kept: requests {of} load the busiest rank {load:.3f} times the mean"
    if own <= limit:
        remedy = f"profile more than {trace.num_requests} requests"
        return [f"{reached}, those of the profile {own:.3f} times, so the two differ; {remedy}"]
    hot = int((_hottest_copies(trace, plan) > limit).sum())
    if hot:
        layers = f"{hot} of {trace.fingerprint.num_layers} layers"
        return [f"{reached}; in {layers} one expert alone is above it on its rank: give more --redundant-experts"]
    remedy = "give more --redundant-experts or a lower cost of rows, as with --set cocluster.remote_rank=0.5"
    return [f"{reached}, those of the profile {own:.3f} times: the search found no better plan; {remedy}"]


def _hottest_copies(trace: RoutingTrace, plan: Plan) -> np.ndarray:
    """(L,) the pairs of the hottest copy of an expert over those of a mean rank, if copies share pairs equally."""
    pairs = expert_load(trace)
    return (pairs / plan.placement.logical_replica_count).max(axis=1) * plan.topology.ep_size / pairs[0].sum()


def _time(case: Case, figures: dict[str, dict[str, Any]], links: Links) -> dict[str, Any]:
    """Add predicted times and bytes to each method's figures; return the verdict on the plan and its inputs."""
    predictions = _predict(case, links)
    for name, prediction in predictions.items():
        sent = timing.all_to_all_bytes(prediction.rows, case.shape, links)
        figures[name] |= timing.microseconds(prediction.time) | {"bytes_per_rank_pair": np.rint(sent).tolist()}
    return {**_judge(case, predictions, links), "elsewhere": _elsewhere(case, predictions, links)}


def _predict(case: Case, links: Links, batch: float = 1.0) -> dict[str, timing.Prediction]:
    """Times by method, charging the rows that the links' all-to-all sends. batch: times as many tokens."""
    predictions = {}
    for name, result in case.replayed.items():
        rows, busiest = batch * result.rows_per_batch(links.all_to_all), batch * result.busiest_pairs
        hooks = timing.hooks(batch * case.tokens, case.topology, case.copies, links) if name == case.method else 0.0
        predictions[name] = timing.predict(name, rows, busiest, case.shape, case.topology, links, hooks)
    return predictions


def _elsewhere(case: Case, predictions: dict[str, timing.Prediction], links: Links) -> dict[str, Any]:
    """Predict the gain on slower and faster links and in other batches, routed and balanced like the replayed batches.

    Time for bytes grows with the batch over the bandwidth, time for experts with the batch, and the rest is fixed. So
    a single and a double batch determine all others. semmoe's own kernels are charged by the batch itself.
    """
    times = []
    for batch, of in ((1.0, predictions), (2.0, _predict(case, links, 2.0))):
        found = [of[case.method].time, *(other.time for name, other in of.items() if name != case.method)]
        without = _without_all_to_all(case, of, batch, links)
        found += [without] if without else []
        times.append(np.array([[time.communication, time.experts] for time in found]))
    once, more = times[0], times[1] - times[0]  # (methods and their rival, 2), the plan's first
    gains = []
    for batch in BATCHES:
        hooks = timing.hooks(batch * case.tokens, case.topology, case.copies, links)
        by_links = [(once + more * [batch / factor - 1, batch - 1]).sum(axis=1) for factor in BANDWIDTHS]
        gains.append([float(1 - (seconds[0] + hooks) / seconds[1:].min()) for seconds in by_links])
    return {"bandwidths": list(BANDWIDTHS), "batch_tokens": [batch * case.tokens for batch in BATCHES], "gains": gains}


def _without_all_to_all(
    case: Case, predictions: dict[str, timing.Prediction], batch: float, links: Links
) -> timing.LayerTime | None:
    """The time of expert parallelism without all-to-all, a rival in attention-TP alone.

    Locality has no effect there: it uses the best balanced of the placements.
    """
    if case.topology.attention != "tp" or case.topology.ep_size == 1:
        return None
    balanced = min(prediction.busiest_pairs for prediction in predictions.values())
    return timing.all_reduce_time(batch * case.tokens, balanced, case.shape, case.topology, links)


def _judge(case: Case, predictions: dict[str, timing.Prediction], links: Links) -> dict[str, Any]:
    """The verdict on the plan, and its inputs."""
    without = _without_all_to_all(case, predictions, 1.0, links)
    others = [prediction for name, prediction in predictions.items() if name != case.method]
    return {
        "links": {"name": links.name, "kind": links.kind, "source": links.source, "all_to_all": links.all_to_all},
        "without_all_to_all": timing.microseconds(without) if without else None,
        "verdict": asdict(timing.verdict(predictions[case.method], others, without)),
    }
