"""semmoe's own method: experts, tokens and requests planned together."""

from dataclasses import replace
from time import monotonic

import numpy as np

from semmoe.core import Placement, RequestPolicy, RoutingTrace
from semmoe.costs.rows import RowCosts, near_and_far
from semmoe.placement import cocluster
from semmoe.placement.joint import cocluster_requests, pairs_between, recluster_requests, seat_groups
from semmoe.placement.problem import Problem, Solution
from semmoe.placement.search import InTime
from semmoe.requests import predictor as request_map
from semmoe.requests.capacity import CapacityScheduler
from semmoe.requests.policy import RoundRobin
from semmoe.settings import PredictorSettings
from semmoe.tokens import predictor as predict
from semmoe.tokens.copychoice import preferred_copies
from semmoe.tokens.slices import ByPosition
from semmoe.topology import Topology
from semmoe.traces.split import near_duplicates

# Shares of a budget of time: after the first only what must be known before the search is still computed; after the
# second the search ends, and the tables are made.
PREPARING, SEARCHING = 0.3, 0.9


def solve(problem: Problem) -> Solution:
    """Plan requests by a learned linear map, experts by `cocluster`, and tokens by the path predictor."""
    trace, topology, settings = problem.trace, problem.topology, problem.settings
    begun, budget = monotonic(), settings.cocluster.budget

    def in_time() -> bool:
        return budget is None or monotonic() < begun + PREPARING * budget

    groups = start = rates = predictor = None
    if topology.dp_size > 1:
        rates = request_map.fit_request_rates(trace, near_duplicates(trace), seed=settings.seed)
        if problem.previous is None:
            groups, start = _request_groups(problem, rates, in_time)
        else:
            groups = _groups_from(problem, rates, problem.previous.placement, in_time)
    if topology.attn_tp_size > 1:
        predictor = predict.fit(trace, _predictor_settings(problem), settings.seed, in_time)
    until = None if budget is None else begun + SEARCHING * budget
    placement = cocluster.place(problem, predictor, groups, start, until)
    if groups is not None and problem.previous is None and topology.num_nodes in (1, topology.ep_size):
        placement = _reseated(problem, groups, placement)
    requests: RequestPolicy = RoundRobin(num_groups=topology.dp_size)
    if rates:
        requests = request_map.project(rates, _worth(placement, topology, problem.charges))
    by_path = predict.project(predictor, trace, placement, problem.embeddings) if predictor else ByPosition()
    return Solution(placement=placement, requests=requests, tokens=by_path)


def _predictor_settings(problem: Problem) -> PredictorSettings:
    """The look-back of the plan to begin from is chosen again only if it is given."""
    settings, previous = problem.settings.predictor, problem.previous
    if previous is None or settings.lookback is not None or previous.method != "semmoe":
        return settings
    return replace(settings, lookback=getattr(previous.tokens, "lookback", None))


def _worth(placement: Placement, topology: Topology, costs: tuple[RowCosts, RowCosts]) -> np.ndarray:
    """(L, E, D) float32: 1 where a rank of the group hosts the expert, and less where only its node does.

    The reduction is the average share of an inter-node row's cost that an intra-node row saves.
    """
    by_group = placement.hosts.reshape(-1, topology.dp_size, topology.attn_tp_size, placement.num_experts)
    own = np.asarray(by_group.any(axis=2))
    worth, per_node = own.astype(np.float32), topology.dp_size // topology.num_nodes
    if topology.num_nodes > 1 and per_node > 1 and topology.dp_size % topology.num_nodes == 0:
        node = own.reshape(len(own), topology.num_nodes, per_node, -1).any(axis=2)
        near, far = near_and_far(costs, topology)
        saved = np.clip(1 - near / max(far, 1e-9), 0, 1)
        worth = np.maximum(worth, np.float32(saved) * np.repeat(node, per_node, axis=1))
    return np.swapaxes(worth, 1, 2)


def _likely_groups(trace: RoutingTrace, rates: request_map.RequestRates, worth: np.ndarray) -> np.ndarray:
    """(R,) the group of the highest score by each request's prompt."""
    scheduler = CapacityScheduler(request_map.project(rates, worth))
    return np.array([np.argmax(scheduler.score(trace.prompt(r))) for r in range(trace.num_requests)])


def _groups_from(problem: Problem, rates: request_map.RequestRates, previous: Placement, in_time: InTime) -> np.ndarray:
    """(R,) the group of each request, where experts are placed already."""
    settings, top_k = problem.settings, problem.trace.fingerprint.top_k
    gains = _worth(previous, problem.topology, problem.charges)
    groups = _likely_groups(problem.trace, rates, gains)
    known = rates.planning_rates, rates.lengths
    move_cost = settings.cocluster.move_cost
    groups[rates.requests] = recluster_requests(*known, gains, top_k, move_cost, settings.seed, in_time)
    return groups


def _request_groups(
    problem: Problem, rates: request_map.RequestRates, in_time: InTime
) -> tuple[np.ndarray, np.ndarray]:
    """The group (R,) of each request, clustered jointly over all layers, and rank labels (L, E) to start from."""
    D, S = problem.topology.dp_size, problem.topology.attn_tp_size
    known = rates.planning_rates, rates.lengths
    expert_groups, of_fitted = cocluster_requests(*known, D, seed=problem.settings.seed, in_time=in_time)
    between = _between_groups(problem)
    if _uneven(between):
        seats = seat_groups(pairs_between(*known, expert_groups, of_fitted, D), between)
        expert_groups, of_fitted = seats[expert_groups], seats[of_fitted]
    groups = _likely_groups(problem.trace, rates, expert_groups[..., None] == np.arange(D))
    groups[rates.requests] = of_fitted
    within = np.argsort(np.argsort(expert_groups, axis=1, kind="stable"), axis=1)  # place of each expert, by group
    return groups, expert_groups * S + within % S


def _reseated(problem: Problem, groups: np.ndarray, placement: Placement) -> Placement:
    """The placement with attention groups where their pairs cost least, now that their experts and copies are known.

    groups (R,): of the requests. No two ranks, or all, are on one node: else a rank's copies depend on its place.
    """
    trace, topology = problem.trace, problem.topology
    between = _between_groups(problem)
    if not _uneven(between):
        return placement
    (D, S), E = (topology.dp_size, topology.attn_tp_size), placement.num_experts
    pairs, tokens, preferred = np.zeros((D, D)), groups[trace.request_of_token()], preferred_copies(placement, topology)
    for layer, used in enumerate(preferred[:, ::S]):  # (D, E)
        uses = np.bincount((tokens[:, None] * E + trace.expert_ids[:, layer]).ravel(), minlength=D * E).reshape(D, E)
        np.add.at(pairs, (np.arange(D)[:, None], used // S), uses)
    seats = seat_groups(pairs, between)
    ranks = (seats[:, None] * S + np.arange(S)).ravel()  # the new number of each rank
    order = np.argsort(ranks)
    slots = placement.physical_to_logical_map.reshape(-1, topology.ep_size, placement.experts_per_rank)[:, order]
    dispatch = ranks[preferred[:, order]].astype(np.int16)
    return replace(placement, physical_to_logical_map=slots.reshape(len(slots), -1), static_dispatch=dispatch)


def _uneven(between: np.ndarray) -> bool:
    """Whether it matters which attention group is which, by the costs (D, D) between them."""
    return bool(np.ptp(between[~np.eye(len(between), dtype=bool)]) > 0)


def _between_groups(problem: Problem) -> np.ndarray:
    """(D, D): what a pair of a token of one attention group with an expert of another costs, on average."""
    D, S = problem.topology.dp_size, problem.topology.attn_tp_size
    ranks = np.mean([one.rank + one.pair + one.node[:, problem.topology.node_of] for one in problem.charges], axis=0)
    return ranks.reshape(D, S, D, S).mean(axis=(1, 3))
