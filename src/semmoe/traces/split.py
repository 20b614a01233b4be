"""Split a trace by request into profile and evaluation, with near-duplicate prompts on the same side.

A request whose near-duplicate was profiled says nothing about unseen requests. Two prompts are near-duplicates if the
Jaccard similarity of their sets of three-token shingles is at least one half, without shingles of a common template.
"""

import numpy as np
from scipy.sparse import coo_matrix, csr_matrix
from scipy.sparse.csgraph import connected_components

from semmoe.core import RoutingTrace

SHINGLE = 3  # tokens
OVERLAP = 0.5  # Jaccard similarity from which prompts are near-duplicates
TEMPLATE_SHARE = 0.05  # shingles in more than this share of the requests belong to a template
MOST_SHARED = 64  # and so do those in more than this many, so that the cost is linear in requests


def split(trace: RoutingTrace, share: float = 0.2, seed: int = 0) -> tuple[RoutingTrace, RoutingTrace]:
    """(profile, evaluation): about `share` of the requests, drawn at random, and the rest; both in arrival order.

    Near-duplicate prompts stay together. Raises ValueError if there are fewer than two distinct prompts.
    """
    if not 0 < share < 1:
        raise ValueError(f"profile share must lie between 0 and 1, not {share}")
    clusters = near_duplicates(trace)
    distinct = int(clusters.max(initial=-1)) + 1
    if distinct < 2:
        raise ValueError(f"a trace of {distinct} distinct request(s) cannot be split")
    order = np.random.default_rng(seed).permutation(distinct)
    filled = np.cumsum(np.bincount(clusters, minlength=distinct)[order])
    cut = int(np.clip(np.searchsorted(filled, round(share * trace.num_requests)) + 1, 1, distinct - 1))
    profiled = np.isin(clusters, order[:cut])
    return trace.select(np.flatnonzero(profiled)), trace.select(np.flatnonzero(~profiled))


def near_duplicates(trace: RoutingTrace) -> np.ndarray:
    """(R,) int64: the cluster of each request; prompts that a chain of near-duplicates connects are in one cluster."""
    distinct, same = _distinct_prompts(trace)
    shingles = [_shingles(trace.prompt(r)) for r in distinct]
    numbers: dict[bytes, int] = {}
    row = np.repeat(np.arange(len(distinct)), [len(prompt) for prompt in shingles])
    column = np.array([numbers.setdefault(s, len(numbers)) for prompt in shingles for s in prompt], np.int64)
    most = min(max(TEMPLATE_SHARE * len(distinct), 2), MOST_SHARED)
    kept = np.bincount(column)[column] <= most  # a prompt holds a shingle once, so that these are counts of prompts
    row, column = row[kept], column[kept]
    size = np.bincount(row, minlength=len(distinct))
    incidence = csr_matrix((np.ones(len(row), np.int32), (row, column)), shape=(len(distinct), max(len(numbers), 1)))
    common = (incidence @ incidence.T).tocoo()
    union = size[common.row] + size[common.col] - common.data
    near = common.data >= OVERLAP * np.maximum(union, 1)
    linked = coo_matrix((common.data[near], (common.row[near], common.col[near])), shape=common.shape)
    return connected_components(linked, directed=False)[1][same].astype(np.int64)


def _distinct_prompts(trace: RoutingTrace) -> tuple[list[int], np.ndarray]:
    """The first request of each distinct prompt, and (R,) the index of each request's prompt; empty prompts differ."""
    known: dict[bytes | int, int] = {}
    keys = [trace.prompt(r).tobytes() or r for r in range(trace.num_requests)]
    same = np.array([known.setdefault(key, len(known)) for key in keys], np.int64)
    return np.unique(same, return_index=True)[1].tolist(), same


def _shingles(prompt: np.ndarray) -> list[bytes]:
    """The distinct runs of SHINGLE tokens, in order of occurrence; a shorter prompt is one shingle."""
    tokens = prompt.astype(np.int32)
    if len(tokens) <= SHINGLE:
        return [tokens.tobytes()] if len(tokens) else []
    windows = np.lib.stride_tricks.sliding_window_view(tokens, SHINGLE)
    return list(dict.fromkeys(row.tobytes() for row in windows))


def draw_requests(lengths: np.ndarray, tokens: int, seed: int) -> np.ndarray:
    """Random requests with about `tokens` routed tokens in total, in order; all if there are no more. lengths (R,)."""
    if lengths.sum() <= tokens:
        return np.arange(len(lengths))
    order = np.random.default_rng(seed).permutation(len(lengths))
    return np.sort(order[: int(np.searchsorted(np.cumsum(lengths[order]), tokens)) + 1])
