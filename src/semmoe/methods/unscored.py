"""Schedule each request to the attention group with the least work; experts stay where `linear` puts them."""

from dataclasses import replace

import numpy as np

from semmoe.core import RoutingTrace
from semmoe.placement import linear
from semmoe.placement.problem import Problem, Solution
from semmoe.requests.policy import PromptScores
from semmoe.requests.predictor import mean_length


def solve(problem: Problem) -> Solution:
    """Schedule requests by the work of the groups only."""
    return replace(linear.solve(problem), requests=without_scores(problem.trace, problem.topology.dp_size))


def without_scores(trace: RoutingTrace, num_groups: int) -> PromptScores:
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
    )
