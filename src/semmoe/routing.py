"""Find tokens whose routing no router makes, and tokens that share theirs with another, as rows of a warm-up do.

A router chooses K different experts for a token in each layer. Engines return other rows where they did not fill a
buffer (all zeros), or where they read the row of another request.
"""

import warnings

import numpy as np

MAX_IMPOSSIBLE_SHARE = 0.01  # of a trace's tokens; if there are more, the others are not to be trusted either
MIN_IDENTICAL_SHARE = 0.01  # of a trace's tokens; fewer are not worth a warning
MIN_IDS = 12  # L x K; shorter rows are alike by chance (gpt-oss-20b: 6 % of the tokens in two layers, .3 % in four)
BLOCK_TOKENS = 1 << 16  # looked at together, to bound memory


class RoutingWarning(UserWarning):
    """A trace holds rows that should not be there."""


def impossible_tokens(expert_ids: np.ndarray) -> np.ndarray:
    """(T,) bool: the tokens that name an expert twice in a layer. expert_ids: (T, L, K)."""
    out = np.zeros(len(expert_ids), bool)
    for start in range(0, len(expert_ids), BLOCK_TOKENS):
        ordered = np.sort(expert_ids[start : start + BLOCK_TOKENS], axis=2)
        out[start : start + len(ordered)] = (ordered[..., 1:] == ordered[..., :-1]).any(axis=(1, 2))
    return out


def identical_tokens(token_ids: np.ndarray, expert_ids: np.ndarray) -> int:
    """The number of tokens whose experts are, in every layer, those of another token id.

    token_ids: (T,); expert_ids: (T, L, K). 0 if rows are so short that they are alike by chance.
    """
    rows = expert_ids.reshape(len(expert_ids), -1)
    if rows.shape[1] < MIN_IDS or len(rows) == 0:
        return 0
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


def check_left_out(name: str, left_out: int, num_tokens: int) -> None:
    """Raise ValueError if too many of a trace's tokens are impossible. num_tokens: all of them, also those left out."""
    if left_out > MAX_IMPOSSIBLE_SHARE * num_tokens:
        raise ValueError(
            f"{name}: {left_out:,} of {num_tokens:,} tokens name an expert twice in a layer, which no router does: "
            "their rows were never filled (all zeros), or are those of another format"
        )


def warn_of_tokens(name: str, left_out: int, identical: int, num_tokens: int) -> None:
    """Warn of the tokens that were left out, and of those whose experts are those of another token.

    num_tokens: the tokens that are kept.
    """
    if left_out:
        words = f"{left_out:,} of {left_out + num_tokens:,} tokens name an expert twice in a layer and are left out"
        warnings.warn(f"{name}: {words}", RoutingWarning, stacklevel=2)
    if identical > MIN_IDENTICAL_SHARE * num_tokens:
        share = f"{identical:,} of {num_tokens:,} tokens ({identical / num_tokens:.0%})"
        words = "have in every layer the experts of another token: are they an engine's warm-up?"
        warnings.warn(f"{name}: {share} {words}", RoutingWarning, stacklevel=2)
