"""semmoe's own method: experts, tokens and requests planned together."""

import numpy as np

from semmoe.core import RoutingTrace
from semmoe.placement import cocluster
from semmoe.placement.joint import cocluster_requests
from semmoe.placement.problem import Problem, Solution
from semmoe.requests import predictor as request_map
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import RoundRobin
from semmoe.splitter import near_duplicates
from semmoe.tokens import predictor as predict
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology


def solve(problem: Problem) -> Solution:
    """Plan requests by a learned linear map, experts by `cocluster`, and tokens by the path predictor."""
    trace, topology, settings = problem.trace, problem.topology, problem.settings
    D, S = topology.dp_size, topology.attn_tp_size
    groups = start = rates = predictor = None
    if D > 1:
        rates = request_map.fit_request_rates(trace, near_duplicates(trace), seed=settings.seed)
        groups, start = _request_groups(trace, rates, topology, settings.seed)
    if S > 1:
        predictor = predict.fit(trace, settings.predictor, settings.seed)
    placement = cocluster.place(
        trace,
        topology,
        predictor,
        settings.redundant_experts,
        settings.cocluster,
        settings.seed,
        groups,
        start,
        problem.progress,
    )
    by_group = placement.hosts.reshape(-1, D, S, trace.fingerprint.num_experts)
    hosted = np.swapaxes(np.any(by_group, axis=2), 1, 2)  # (L, E, D)
    by_prompt = request_map.project(rates, hosted) if rates else None
    by_path = predict.project(predictor, trace, placement, problem.embeddings) if predictor else None
    return Solution(placement=placement, requests=by_prompt or RoundRobin(num_groups=D), tokens=by_path or ByPosition())


def _request_groups(
    trace: RoutingTrace, rates: request_map.RequestRates, topology: Topology, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """The group (R,) of each request, clustered jointly over all layers, and rank labels (L, E) to start from."""
    D, S = topology.dp_size, topology.attn_tp_size
    expert_groups, of_fitted = cocluster_requests(rates.planning_rates, rates.lengths, D, seed=seed)
    scheduler = CapacityScheduler(request_map.project(rates, expert_groups[..., None] == np.arange(D)))
    groups = np.array([np.argmax(scheduler.score(trace.prompt(r))) for r in range(trace.num_requests)])
    groups[rates.requests] = of_fitted
    within = np.argsort(np.argsort(expert_groups, axis=1, kind="stable"), axis=1)  # place of each expert, by group
    return groups, expert_groups * S + within % S
