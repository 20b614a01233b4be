"""What `TrafficCounter` counts at a layer as one Triton kernel, whose programs add to the totals."""

import triton
import triton.language as tl
from torch import Tensor

COUNT_TILE = 2048  # pairs of a token and an expert, times ranks, of a program


def count(
    expert_ids: Tensor, per_rank: int, width: int, real: Tensor | None,
    pairs: Tensor, rows: Tensor, node_rows: Tensor, tokens: Tensor,
) -> None:  # fmt: skip
    """Add (n, K) ids to pairs (R,), rows (R,), node_rows (D,) and tokens (), int64; width: ranks of a node.

    real (): the number of leading rows that count; None: all rows.
    """
    number, top_k = expert_ids.shape
    size, experts = triton.next_power_of_2(len(rows)), triton.next_power_of_2(top_k)
    block = max(min(triton.next_power_of_2(max(number, 1)), COUNT_TILE // (size * experts)), 1)
    if number:
        count_kernel[(triton.cdiv(number, block),)](
            expert_ids.contiguous(), tokens if real is None else real, pairs, rows, node_rows, tokens, number,
            top_k, per_rank, width, len(rows), len(node_rows),
            BOUND=real is not None, BLOCK=block, EXPERTS=experts, RANKS=size,
            NODES=triton.next_power_of_2(len(node_rows)), num_warps=max(min(block * experts * size // 256, 4), 1),
        )  # fmt: skip


@triton.jit(do_not_specialize=["number"])
def count_kernel(
    expert_ids,
    real,
    pairs,
    rows,
    node_rows,
    tokens,
    number,
    top_k,
    per_rank,
    width,
    num_ranks,
    num_nodes,
    BOUND: tl.constexpr,
    BLOCK: tl.constexpr,
    EXPERTS: tl.constexpr,
    RANKS: tl.constexpr,
    NODES: tl.constexpr,
):
    t, k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, EXPERTS)
    g, d = tl.arange(0, RANKS), tl.arange(0, NODES)
    valid = t < number
    if BOUND:
        valid = valid & (t < tl.load(real))
    mask = valid[:, None] & (k < top_k)[None, :]
    expert = tl.load(expert_ids + t.to(tl.int64)[:, None] * top_k + k[None, :], mask=mask, other=-1).to(tl.int32)
    rank = tl.where(expert >= 0, expert // per_rank, -1)
    node = tl.where(expert >= 0, rank // width, -1)
    here = (rank[:, :, None] == g[None, None, :]).to(tl.int32)  # (BLOCK, EXPERTS, RANKS)
    nodes = tl.max((node[:, :, None] == d[None, None, :]).to(tl.int32), 1)
    _add(pairs, g, tl.sum(tl.sum(here, 1), 0), num_ranks)
    _add(rows, g, tl.sum(tl.max(here, 1), 0), num_ranks)
    _add(node_rows, d, tl.sum(nodes, 0), num_nodes)
    tl.atomic_add(tokens, tl.sum(tl.max(nodes, 1), 0).to(tl.int64))


@triton.jit
def _add(totals, at, counts, size):
    tl.atomic_add(totals + at, counts.to(tl.int64), mask=(at < size) & (counts > 0))
