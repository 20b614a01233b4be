"""Schedule requests to attention groups without a score of their experts, under CapacityScheduler's bound on load.

    least-loaded     the group with the least work
    prefix-affinity  the group with most of the prompt in its prefix cache; of several, the least loaded

Experts stay where `linear` puts them.
"""

from dataclasses import replace

import numpy as np

from semmoe.core import RoutingTrace
from semmoe.placement import linear
from semmoe.placement.problem import Problem, Solution
from semmoe.requests.policy import PromptScores
from semmoe.requests.predictor import mean_length


def least_loaded(problem: Problem) -> Solution:
    """Schedule requests by the work of the groups only."""
    return replace(linear.solve(problem), requests=without_scores(problem.trace, problem.topology.dp_size, 0.0))


def prefix_affinity(problem: Problem) -> Solution:
    """Schedule requests by what groups have cached, then by their work."""
    return replace(linear.solve(problem), requests=without_scores(problem.trace, problem.topology.dp_size, 1.0))


def without_scores(trace: RoutingTrace, num_groups: int, cache_weight: float) -> PromptScores:
    """PromptScores without scores and prices, so that all groups tie and the least loaded one is chosen.

    Weights are 1 except in row V, so that only ids outside the vocabulary count as unknown.
    """
    rows = trace.fingerprint.vocab_size + 1
    weights = np.ones(rows, np.float32)
    weights[-1] = 0
    nothing = np.zeros(num_groups, np.float32)
    return PromptScores(
        token_scores=np.zeros((rows, num_groups), np.float32),
        token_weights=weights,
        bias=nothing,
        prices=nothing,
        score_spread=0.0,
        mean_length=mean_length(trace),
        cache_weight=cache_weight,
    )
