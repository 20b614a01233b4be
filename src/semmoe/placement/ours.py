"""semmoe's own method: experts, tokens and requests planned together."""

from dataclasses import replace
from time import monotonic

import numpy as np

from semmoe.copychoice import preferred_copies
from semmoe.core import Placement, RoutingTrace
from semmoe.placement import cocluster
from semmoe.placement.joint import cocluster_requests, pairs_between, recluster_requests, seat_groups
from semmoe.placement.problem import Problem, Solution
from semmoe.requests import predictor as request_map
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import RoundRobin
from semmoe.rowcosts import RowCosts, near_and_far
from semmoe.settings import PredictorSettings
from semmoe.splitter import near_duplicates
from semmoe.tokens import predictor as predict
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology

SEARCHING = 0.9  # share of a budget of time after which the search ends, and the tables are made


def solve(problem: Problem) -> Solution:
    """Plan requests by a learned linear map, experts by `cocluster`, and tokens by the path predictor."""
    trace, topology, settings = problem.trace, problem.topology, problem.settings
    D, S, begun, budget = topology.dp_size, topology.attn_tp_size, monotonic(), settings.cocluster.budget
    costs = problem.costs or cocluster.default_costs(topology, settings.cocluster)
    groups = start = rates = predictor = None
    if D > 1:
        rates = request_map.fit_request_rates(trace, near_duplicates(trace), seed=settings.seed)
        if problem.previous is None:
            groups, start = _request_groups(trace, rates, topology, costs, settings.seed)
        else:
            worth = _worth(problem.previous.placement, topology, costs)
            groups = _likely_groups(trace, rates, worth)
            known, k = (rates.planning_rates, rates.lengths), trace.fingerprint.top_k
            groups[rates.requests] = recluster_requests(*known, worth, k, settings.cocluster.move_cost, settings.seed)
    if S > 1:
        predictor = predict.fit(trace, _predictor_settings(problem), settings.seed)
    placement = cocluster.place(
        trace,
        topology,
        predictor,
        settings.redundant_experts,
        settings.cocluster,
        settings.seed,
        groups,
        start,
        None if problem.previous is None else problem.previous.placement,
        problem.progress,
        None if budget is None else begun + SEARCHING * budget,
        costs,
        settings.phase,
    )
    if groups is not None and problem.previous is None and topology.num_nodes in (1, topology.ep_size):
        placement = _reseated(trace, groups, placement, topology, costs)
    by_prompt = request_map.project(rates, _worth(placement, topology, costs)) if rates else None
    by_path = predict.project(predictor, trace, placement, problem.embeddings) if predictor else None
    return Solution(placement=placement, requests=by_prompt or RoundRobin(num_groups=D), tokens=by_path or ByPosition())


def _predictor_settings(problem: Problem) -> PredictorSettings:
    """The look-back of the plan to begin from is chosen again only if it is given."""
    settings, previous = problem.settings.predictor, problem.previous
    if previous is None or settings.lookback is not None or previous.method != "semmoe":
        return settings
    return replace(settings, lookback=getattr(previous.tokens, "lookback", None))


def _worth(placement: Placement, topology: Topology, costs: tuple[RowCosts, RowCosts]) -> np.ndarray:
    """(L, E, D) float32: 1 where a rank of the group hosts the expert, and less where only its node does.

    The less is what a row inside the node saves of what one to another node costs, on average.
    """
    by_group = placement.hosts.reshape(-1, topology.dp_size, topology.attn_tp_size, placement.num_experts)
    own = np.asarray(by_group.any(axis=2))
    worth, per_node = own.astype(np.float32), topology.dp_size // topology.num_nodes
    if topology.num_nodes > 1 and per_node > 1 and topology.dp_size % topology.num_nodes == 0:
        node = own.reshape(len(own), topology.num_nodes, per_node, -1).any(axis=2)
        worth = np.maximum(worth, np.float32(_near_share(costs, topology)) * np.repeat(node, per_node, axis=1))
    return np.swapaxes(worth, 1, 2)


def _near_share(costs: tuple[RowCosts, RowCosts], topology: Topology) -> float:
    """The share of a pair's cost on another node that is saved on another rank of the own node."""
    near, far = near_and_far(costs, topology)
    return float(np.clip(1 - near / max(far, 1e-9), 0, 1))


def _likely_groups(trace: RoutingTrace, rates: request_map.RequestRates, worth: np.ndarray) -> np.ndarray:
    """(R,) the group of the highest score by each request's prompt."""
    scheduler = CapacityScheduler(request_map.project(rates, worth))
    return np.array([np.argmax(scheduler.score(trace.prompt(r))) for r in range(trace.num_requests)])


def _request_groups(
    trace: RoutingTrace,
    rates: request_map.RequestRates,
    topology: Topology,
    costs: tuple[RowCosts, RowCosts],
    seed: int,
) -> tuple[np.ndarray, np.ndarray]:
    """The group (R,) of each request, clustered jointly over all layers, and rank labels (L, E) to start from."""
    D, S = topology.dp_size, topology.attn_tp_size
    known = rates.planning_rates, rates.lengths
    expert_groups, of_fitted = cocluster_requests(*known, D, seed=seed)
    if _uneven(costs, topology):
        pairs = pairs_between(*known, expert_groups, of_fitted, D)
        seats = seat_groups(pairs, _between_groups(costs, topology))
        expert_groups, of_fitted = seats[expert_groups], seats[of_fitted]
    groups = _likely_groups(trace, rates, expert_groups[..., None] == np.arange(D))
    groups[rates.requests] = of_fitted
    within = np.argsort(np.argsort(expert_groups, axis=1, kind="stable"), axis=1)  # place of each expert, by group
    return groups, expert_groups * S + within % S


def _reseated(
    trace: RoutingTrace, groups: np.ndarray, placement: Placement, topology: Topology, costs: tuple[RowCosts, RowCosts]
) -> Placement:
    """The placement with attention groups where their pairs cost least, now that their experts and copies are known.

    groups (R,): of the requests. No two ranks, or all, are on one node: else a rank's copies depend on its place.
    """
    if not _uneven(costs, topology):
        return placement
    (D, S), E = (topology.dp_size, topology.attn_tp_size), placement.num_experts
    pairs, tokens, preferred = np.zeros((D, D)), groups[trace.request_of_token()], preferred_copies(placement, topology)
    for layer, used in enumerate(preferred[:, ::S]):  # (D, E)
        uses = np.bincount((tokens[:, None] * E + trace.expert_ids[:, layer]).ravel(), minlength=D * E).reshape(D, E)
        np.add.at(pairs, (np.arange(D)[:, None], used // S), uses)
    seats = seat_groups(pairs, _between_groups(costs, topology))
    ranks = (seats[:, None] * S + np.arange(S)).ravel()  # the new number of each rank
    order = np.argsort(ranks)
    slots = placement.physical_to_logical_map.reshape(-1, topology.ep_size, placement.experts_per_rank)[:, order]
    dispatch = ranks[preferred[:, order]].astype(np.int16)
    return replace(placement, physical_to_logical_map=slots.reshape(len(slots), -1), static_dispatch=dispatch)


def _uneven(costs: tuple[RowCosts, RowCosts], topology: Topology) -> bool:
    """Whether it matters which attention group is which."""
    between = _between_groups(costs, topology)
    return bool(np.ptp(between[~np.eye(len(between), dtype=bool)]) > 0)


def _between_groups(costs: tuple[RowCosts, RowCosts], topology: Topology) -> np.ndarray:
    """(D, D): what a pair of a token of one attention group with an expert of another costs, on average."""
    D, S = topology.dp_size, topology.attn_tp_size
    ranks = np.mean([one.rank + one.pair + one.node[:, topology.node_of] for one in costs], axis=0)
    return ranks.reshape(D, S, D, S).mean(axis=(1, 3))
