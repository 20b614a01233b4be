"""Find tokens whose routing no router makes, and tokens that share theirs with another, as rows of a warm-up do.

A router chooses K different experts for a token in each layer. Engines return other rows where they did not fill a
buffer (all zeros), or where they read the row of another request.
"""

import warnings
from dataclasses import dataclass

import numpy as np

from semmoe.core import RoutingTrace

MAX_IMPOSSIBLE_SHARE = 0.01  # of a trace's tokens; if there are more, the others are not to be trusted either
MIN_IDENTICAL_SHARE = 0.01  # of a trace's tokens; a smaller share gives no warning
MIN_IDS = 12  # L x K; shorter rows are the same by chance (gpt-oss-20b: 6 % of the tokens in two layers, .3 % in four)
BLOCK_TOKENS = 1 << 14  # checked together, to bound memory


class RoutingWarning(UserWarning):
    """A trace holds rows that should not be there, or more than are read."""


def impossible_tokens(expert_ids: np.ndarray) -> np.ndarray:
    """(T,) bool: the tokens that name an expert twice in a layer. expert_ids: (T, L, K)."""
    out = np.zeros(len(expert_ids), bool)
    for start in range(0, len(expert_ids), BLOCK_TOKENS):
        ordered = np.sort(expert_ids[start : start + BLOCK_TOKENS], axis=2)
        out[start : start + len(ordered)] = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    return out


def identical_tokens(token_ids: np.ndarray, expert_ids: np.ndarray) -> int:
    """The number of tokens whose experts are, in every layer, those of another token id.

    token_ids: (T,); expert_ids: (T, L, K). 0 for rows that are short enough to be the same by chance.
    """
    num_tokens, layers, top_k = expert_ids.shape
    if layers * top_k < MIN_IDS or num_tokens == 0:
        return 0
    rows = expert_ids.reshape(num_tokens, -1)
    _, pattern = np.unique(_hashes(rows), return_inverse=True)
    # each (pattern, token id) once, so that a pattern's count is the number of its different token ids
    pairs = np.unique(pattern.astype(np.int64) << 32 | token_ids)
    token_ids_of_pattern = np.bincount(pairs >> 32)
    return int((token_ids_of_pattern[pattern] > 1).sum())


def _hashes(rows: np.ndarray) -> np.ndarray:
    """(T,) uint64: a hash of each row (T, M), as its product with random odd numbers."""
    weights = np.random.default_rng(0).integers(1 << 63, size=rows.shape[1], dtype=np.uint64) * 2 + 1
    blocks = [rows[start : start + BLOCK_TOKENS] for start in range(0, len(rows), BLOCK_TOKENS)]
    return np.concatenate([(block.astype(np.uint64) * weights).sum(axis=1, dtype=np.uint64) for block in blocks])


@dataclass
class Tally:
    """Counts of the tokens of a trace that is read shard by shard."""

    tokens: int = 0  # that are kept
    left_out: int = 0  # that name an expert twice in a layer
    identical: int = 0  # that are kept, and have in every layer the experts of another token of their shard

    def add(self, trace: RoutingTrace) -> "Tally":
        self.tokens += trace.num_tokens
        self.left_out += trace.left_out
        self.identical += identical_tokens(trace.token_ids, trace.expert_ids)
        return self

    def check(self, name: str) -> None:
        """Warn of tokens that should not be there. Raises ValueError if too many name an expert twice."""
        check_left_out(name, self.left_out, self.left_out + self.tokens)
        if self.left_out:
            words = "tokens name an expert twice in a layer and are left out"
            warnings.warn(f"{name}: {self.left_out:,} {words}; {self.tokens:,} are kept", RoutingWarning, stacklevel=2)
        if self.identical > MIN_IDENTICAL_SHARE * self.tokens:
            share = f"{self.identical:,} of {self.tokens:,} tokens ({self.identical / self.tokens:.0%})"
            words = "have in every layer the experts of another token: are they an engine's warm-up?"
            warnings.warn(f"{name}: {share} {words}", RoutingWarning, stacklevel=2)


def check_left_out(name: str, left_out: int, num_tokens: int) -> None:
    """Raise ValueError if too many tokens name an expert twice. num_tokens: kept and left out."""
    if left_out > MAX_IMPOSSIBLE_SHARE * num_tokens:
        raise ValueError(
            f"{name}: {left_out:,} of {num_tokens:,} tokens name an expert twice in a layer, which no router does: "
            "their rows were never filled (all zeros), or are those of another format"
        )
