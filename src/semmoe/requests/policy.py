"""Request policies as data: round-robin over attention groups, or by scores of the prompt."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from semmoe.io.bounds import MOST_RANKS, Checked, Declared, number
from semmoe.topology import Fingerprint, Topology


@dataclass(frozen=True, kw_only=True)
class RoundRobin(Checked):
    """Requests to groups round-robin, as an engine does without a plan."""

    kind: ClassVar[str] = "round-robin"
    by_tables: ClassVar[bool] = False
    num_groups: int = number(..., 1, MOST_RANKS)

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """No array. Raises ValueError unless the number of groups is the topology's."""
        groups = topology.dp_size
        if self.num_groups != groups:
            raise ValueError(f"{self.num_groups} groups of requests do not fit dp_size {groups}")
        return {}

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: all False, since no token is looked up."""
        return np.zeros(len(token_ids), bool)


@dataclass(frozen=True, kw_only=True)
class PromptScores(Checked):
    """A linear map from a prompt to groups; the score of group d estimates its share of the request's pairs.

    score = bias + (sum of token_scores over the distinct ids of the prompt) / sqrt(sum of their token_weights).    Row
    V is for ids outside the vocabulary.
    """

    kind: ClassVar[str] = "prompt-scores"
    by_tables: ClassVar[bool] = True
    token_scores: np.ndarray  # (V + 1, D) float32
    token_weights: np.ndarray  # (V + 1,) float32, idf squared
    bias: np.ndarray  # (D,) float32
    prices: np.ndarray  # (D,) float32: subtracted from the scores, so that the profile's load is even
    # standard deviation of the profile's scores: the unit of online price changes
    score_spread: float = number(..., 0, 1)
    mean_length: float = number(..., 1e-9, 1e12)  # decode tokens of a profiled request

    def declared(self, topology: Topology, fingerprint: Fingerprint) -> dict[str, Declared]:
        """What each array must be."""
        V, D = fingerprint.vocab_size, topology.dp_size
        finite = np.finfo(np.float32).max
        return {
            "token_scores": Declared((V + 1, D), np.float32, -finite, finite),
            "token_weights": Declared((V + 1,), np.float32, 0, finite),
            "bias": Declared((D,), np.float32, -finite, finite),
            "prices": Declared((D,), np.float32, -finite, finite),
        }

    def unknown(self, token_ids: np.ndarray) -> np.ndarray:
        """(N,) bool: ids whose weight is that of ids outside the vocabulary."""
        return self.token_weights[token_ids] == self.token_weights[-1]
