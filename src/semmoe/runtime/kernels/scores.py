"""Scores of `semmoe.tokens.slices` in Triton: the look-up of a pass's tokens, and the sum for a tile of rows.

Results are bitwise equal to those of `on_cpu`. The number of tokens is not specialised: otherwise Triton would compile
again, while requests wait, for a single token (then a constant) and for multiples of 16.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.runtime.tables import ScoreTables
from semmoe.tokens.kernels import FRACTION

SCORE_BLOCK = 32  # tokens per program

_FRACTION = tl.constexpr(FRACTION)


def look_up_tokens(
    tables: ScoreTables, layers: Sequence[int], first_rank: int, num_slices: int, token_ids: Tensor
) -> Tensor:
    """(L, B, S) int32: same as `semmoe.tokens.slices.look_up_tokens`, for layers that follow each other."""
    tokens = len(token_ids)
    assert list(layers) == list(range(layers[0], layers[0] + len(layers))), layers
    out = torch.empty((len(layers), tokens, num_slices), dtype=torch.int32, device=token_ids.device)
    if tokens:
        look_up_kernel[(triton.cdiv(tokens, SCORE_BLOCK), len(layers))](
            out,
            token_ids.contiguous(),
            tables.token_rows,
            tables.token_scores[layers[0]],
            tables.token_shift[layers[0] :],
            tokens,
            len(tables.token_rows) - 1,
            first_rank,
            tables.token_scores.shape[2],
            num_slices,
            tables.token_scores.shape[1],
            BLOCK=SCORE_BLOCK,
            WIDTH=triton.next_power_of_2(num_slices),
        )
    return out


@triton.jit(do_not_specialize=["tokens"])
def look_up_kernel(
    out,
    token_ids,
    token_rows,
    token_scores,
    shifts,
    tokens,
    last,
    first,
    ranks,
    slices,
    rows,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, WIDTH)[None, :]
    valid = t < tokens
    mask = valid[:, None] & (s < slices)
    ids = tl.load(token_ids + t, mask=valid, other=0).to(tl.int64)
    row = tl.load(token_rows + tl.where((ids >= 0) & (ids < last), ids, last), mask=valid, other=0).to(tl.int64)
    layer = tl.program_id(1).to(tl.int64)
    places = token_scores + (layer * rows + row)[:, None] * ranks + first + s
    found = tl.load(places, mask=mask, other=0).to(tl.int32) << tl.load(shifts + layer)
    tl.store(out + (layer * tokens + t)[:, None] * slices + s, found, mask=mask)


@triton.jit
def score_tile(
    t, s, mask, real, looked_up, path_scores, routed, mean, running, previous, slots, decoding,
    layer, tokens, first, ranks, slices, top_k,
    LAYERS: tl.constexpr, ORDERED: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Scores of tokens t (BLOCK, 1) at slices s (1, WIDTH); 0 for rows that are not real (BLOCK, 1).

    History: of decoded tokens what the states of their slots know, of others the mean.
    """
    valid = t < tokens
    total = tl.load(looked_up + layer.to(tl.int64) * tokens * slices + (t * slices + s), mask=mask, other=0)
    state = tl.load(slots + t, mask=valid, other=0).to(tl.int64) * ranks + first + s
    known = (tl.load(running + state, mask=mask, other=0) >> _FRACTION) + tl.load(previous + state, mask=mask, other=0)
    unknown = tl.load(mean + first + s, mask=s < slices, other=0).to(tl.int32)
    decodes = tl.load(decoding + t, mask=valid, other=0).to(tl.int32) > 0
    total += tl.where(decodes, known, unknown)
    for j in tl.static_range(LAYERS):
        nearer = min(j, ORDERED)
        planes = routed + (layer - 1 - j).to(tl.int64) * tokens * top_k
        for k in range(top_k):  # not unrolled: a chunk's loads of all experts at once would not fit in registers
            base = (nearer * top_k + (j - nearer) + (k if j < ORDERED else 0)) * EXPERTS
            expert = tl.load(planes + t * top_k + k, mask=valid, other=0).to(tl.int32)
            total += tl.load(path_scores + (base + expert) * ranks + first + s, mask=mask, other=0).to(tl.int32)
    return tl.where(real, total, 0)
