"""Scores of `semmoe.tokens.slices` as Triton kernels: one program per block of tokens.

Shapes are static, nothing waits for the device, and only the results are allocated, so that both can be captured in a
graph. Results are bitwise equal to those of `on_cpu`. The number of tokens is not specialised: otherwise Triton would
compile again, while requests wait, for a single token (then a constant) and for multiples of 16.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from semmoe.runtime.tables import ScoreTables

SCORE_BLOCK = 32  # tokens per program


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


def score(
    tables: ScoreTables, layer: int, first_rank: int, tokens: Tensor, earlier: Tensor, history: Tensor, real: Tensor
) -> Tensor:
    """(B, S) int32: same as `on_cpu.score`."""
    out, (number, num_slices) = torch.empty_like(tokens), tokens.shape
    if number:
        score_kernel[(triton.cdiv(number, SCORE_BLOCK),)](
            out,
            tokens.contiguous(),
            tables.path_scores[layer],
            earlier.contiguous(),
            history.contiguous(),
            real,
            number,
            first_rank,
            tables.token_scores.shape[2],
            num_slices,
            LAYERS=earlier.shape[0],
            TOP_K=earlier.shape[2],
            ORDERED=tables.ordered,
            EXPERTS=tables.num_experts,
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


@triton.jit(do_not_specialize=["tokens"])
def score_kernel(
    out,
    looked_up,
    path_scores,
    earlier,
    history,
    real,
    tokens,
    first,
    ranks,
    slices,
    LAYERS: tl.constexpr,
    TOP_K: tl.constexpr,
    ORDERED: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    s = tl.arange(0, WIDTH)[None, :]
    valid = t < tokens
    mask = valid[:, None] & (s < slices)
    total = tl.load(looked_up + t[:, None] * slices + s, mask=mask, other=0)
    total += tl.load(history + t[:, None].to(tl.int64) * ranks + first + s, mask=mask, other=0)
    for j in tl.static_range(LAYERS):
        for k in tl.static_range(TOP_K):
            nearer = min(j, ORDERED)
            base = (nearer * TOP_K + (j - nearer) + (k if j < ORDERED else 0)) * EXPERTS
            expert = tl.load(earlier + (j * tokens + t) * TOP_K + k, mask=valid, other=0).to(tl.int32)
            places = path_scores + (base + expert)[:, None] * ranks + first + s
            total += tl.load(places, mask=mask, other=0).to(tl.int32)
    total = tl.where(tl.load(real + t, mask=valid, other=0).to(tl.int32)[:, None] > 0, total, 0)
    tl.store(out + t[:, None] * slices + s, total, mask=mask)
