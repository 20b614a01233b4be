"""Token rows of hash-routed layers, which are exact: the token id alone decides the experts, profiled or not."""

from dataclasses import replace

import numpy as np

from semmoe.core import Placement
from semmoe.hashed import HashedLayers
from semmoe.tokens.kernels import SCALE
from semmoe.tokens.slices import INT8, PathScores

SHIFT = SCALE.bit_length() - 1  # so that a row of int8 holds numbers of experts


def activations(table: np.ndarray, token_ids: np.ndarray, num_experts: int) -> np.ndarray:
    """(N, E) float32: how often the table (V, K) of a layer names each expert for token_ids (N,)."""
    cells = np.arange(len(token_ids))[:, None] * num_experts + table[token_ids]
    counts = np.bincount(cells.ravel(), minlength=len(token_ids) * num_experts)
    return counts.reshape(-1, num_experts).astype(np.float32)


def with_exact_rows(tables: PathScores, hashed: HashedLayers, placement: Placement) -> PathScores:
    """The tables with a row of its own for every token id, which at hash-routed layers says what each rank hosts.

    Worked example, one layer on two ranks, rank 1 with experts 2 and 3: a token id of experts (2, 3) has the row
    [0, 2], which shifted left by SHIFT is two experts on rank 1. Ids outside the vocabulary have zeros.
    """
    if len(hashed.layers) == 0:
        return tables
    if hashed.expert_ids.shape[2] > INT8:
        raise ValueError(f"{hashed.expert_ids.shape[2]} experts per token are more than a row of a table can hold")
    rows, shift = tables.token_scores[:, tables.token_rows], tables.token_shift.copy()
    for table, layer in zip(hashed.expert_ids, hashed.layers.tolist(), strict=True):
        rows[layer, :-1] = placement.hosts[layer].T[table].sum(axis=1)
        rows[layer, -1], shift[layer] = 0, SHIFT
    every = np.arange(len(tables.token_rows), dtype=np.int32)
    return replace(tables, token_rows=every, token_scores=rows, token_shift=shift)
