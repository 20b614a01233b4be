"""What a plan should gain: solved on a part of a profile, replayed on the rest, and timed on links."""

from dataclasses import asdict, replace
from typing import Any

import numpy as np

from semmoe import cost
from semmoe.calibration import Links, PhaseLinks
from semmoe.core import Plan, RoutingTrace
from semmoe.placement.problem import Progress
from semmoe.replayer import ReplayResult, replay, scheduled_by_answers
from semmoe.results import Expected, checked
from semmoe.rowcosts import RowCosts
from semmoe.settings import ReplaySettings, SolveSettings
from semmoe.solver import solve
from semmoe.splitter import near_duplicates, split
from semmoe.topology import Topology

BANDWIDTHS = (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0, 2.0, 4.0)  # of other links, times that of the given ones
BATCHES = (1 / 16, 1 / 4, 1.0, 4.0, 16.0)  # tokens of other batches, times those that were replayed


def expect(
    trace: RoutingTrace,
    topology: Topology,
    settings: SolveSettings,
    measure: ReplaySettings,
    links: PhaseLinks | None = None,
    shape: cost.LayerShape | None = None,
    holdout: float = 0.2,
    progress: Progress = lambda layers: None,
    previous: Plan | None = None,
    costs: tuple[RowCosts, RowCosts] | None = None,
) -> dict[str, Any] | None:
    """Estimate what a plan gains on unseen requests: solve on a share 1 - `holdout` of them and replay on the rest.

    Returns the metrics of the plan, those of `linear` and `eplb` under "others" and, given links and shape, predicted
    times, a verdict, and under "elsewhere" the gain on other links; decoding has a verdict of its own under "decode" if
    its links are others. Returns None if the trace has too few distinct requests to hold any out. previous: a plan that
    the solve begins from; costs: see `solver.solve`.
    """
    smallest = max(2, topology.dp_size + 1)
    if trace.num_requests * (1 - holdout) < smallest or near_duplicates(trace).max() == 0:
        return None
    held_out, profile = split(trace, holdout, settings.seed)
    replayed = {}
    for method in dict.fromkeys((settings.method, "linear", "eplb")):
        watched, begin = (progress, previous) if method == settings.method else (lambda layers: None, None)
        chosen = replace(settings, method=method)
        plan = solve(profile, topology, chosen, progress=watched, previous=begin, costs=costs)
        replayed[method] = replay(held_out, plan, measure)
    # Where links are known, `_time` adds the bytes per rank pair of one batch, which hold the same information.
    figures = {
        name: {k: v for k, v in result.as_dict().items() if k != "rows_per_rank_pair"}
        for name, result in replayed.items()
    }
    timed: dict[str, Any] = {"verdict": None}
    if links and shape:
        timed = _time(figures, replayed, settings.method, topology, links.prefill, shape)
    if links and shape and links.decode != links.prefill:
        predictions = _predict(replayed, topology, links.decode, shape)
        tokens = replayed[settings.method].tokens_per_batch
        timed["decode"] = _judge(predictions, tokens, settings.method, topology, links.decode, shape)
    own = figures.pop(settings.method)
    by_answers = scheduled_by_answers(held_out, topology)
    about = {"holdout": holdout, "requests": held_out.num_requests, "scheduled_by_answers": by_answers}
    return checked(Expected, {**about, **asdict(measure), **own, "others": figures, **timed})


def _time(
    figures: dict[str, dict[str, Any]],
    replayed: dict[str, ReplayResult],
    method: str,
    topology: Topology,
    links: Links,
    shape: cost.LayerShape,
) -> dict[str, Any]:
    """Add predicted times and bytes to each method's figures; return the verdict on `method` and its inputs."""
    predictions = _predict(replayed, topology, links, shape)
    for name, prediction in predictions.items():
        sent = cost.all_to_all_bytes(prediction.rows, shape, links)
        figures[name] |= cost.microseconds(prediction.time) | {"bytes_per_rank_pair": np.rint(sent).tolist()}
    judged = _judge(predictions, replayed[method].tokens_per_batch, method, topology, links, shape)
    return {**judged, "elsewhere": _elsewhere(predictions, replayed, method, topology, links, shape)}


def _predict(
    replayed: dict[str, ReplayResult], topology: Topology, links: Links, shape: cost.LayerShape, batch: float = 1.0
) -> dict[str, cost.Prediction]:
    """Times by method, charging the rows that the all-to-all of these links sends. batch: times as many tokens."""
    predictions = {}
    for name, result in replayed.items():
        rows, busiest = batch * result.rows_per_batch(links.all_to_all), batch * result.busiest_pairs
        predictions[name] = cost.predict(name, rows, busiest, shape, topology, links)
    return predictions


def _elsewhere(
    predictions: dict[str, cost.Prediction], replayed: dict[str, ReplayResult], method: str, topology: Topology,
    links: Links, shape: cost.LayerShape,
) -> dict[str, Any]:  # fmt: skip
    """The gain on slower and faster links and in other batches, routed and balanced as those that were replayed.

    What bytes take grows with the batch over the bandwidth, what experts take with the batch, and the rest is fixed, so
    that the times of one batch and of two tell all others.
    """
    tokens = replayed[method].tokens_per_batch
    times = []
    for batch, of in ((1.0, predictions), (2.0, _predict(replayed, topology, links, shape, 2.0))):
        found = [of[method].time, *(other.time for name, other in of.items() if name != method)]
        without = _without_all_to_all(of, batch * tokens, topology, links, shape)
        found += [without] if without else []
        times.append(np.array([[time.communication, time.experts] for time in found]))
    once, more = times[0], times[1] - times[0]  # (methods and their rival, 2), the plan's first
    gains = []
    for batch in BATCHES:
        by_links = [(once + more * [batch / factor - 1, batch - 1]).sum(axis=1) for factor in BANDWIDTHS]
        gains.append([float(1 - seconds[0] / seconds[1:].min()) for seconds in by_links])
    return {"bandwidths": list(BANDWIDTHS), "batch_tokens": [batch * tokens for batch in BATCHES], "gains": gains}


def _without_all_to_all(
    predictions: dict[str, cost.Prediction], tokens: float, topology: Topology, links: Links, shape: cost.LayerShape
) -> cost.LayerTime | None:
    """The time of expert parallelism without all-to-all, a rival in attention-TP alone.

    Locality has no effect there: it uses the best balanced of the placements.
    """
    if topology.attention != "tp" or topology.ep_size == 1:
        return None
    balanced = min(prediction.busiest_pairs for prediction in predictions.values())
    return cost.all_reduce_time(tokens, balanced, shape, topology, links)


def _judge(
    predictions: dict[str, cost.Prediction],
    tokens: float,
    method: str,
    topology: Topology,
    links: Links,
    shape: cost.LayerShape,
) -> dict[str, Any]:
    """The verdict on `method` for batches of so many tokens, and its inputs."""
    without = _without_all_to_all(predictions, tokens, topology, links, shape)
    others = [prediction for name, prediction in predictions.items() if name != method]
    return {
        "links": {"name": links.name, "kind": links.kind, "source": links.source, "all_to_all": links.all_to_all},
        "without_all_to_all": cost.microseconds(without) if without else None,
        "verdict": asdict(cost.verdict(predictions[method], others, without)),
    }
