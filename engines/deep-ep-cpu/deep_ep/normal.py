"""Normal mode: a row to each remote node, and from the rank that gets it there to the other ranks of that node.

On one node that is a row to each rank. A remote node's row goes to the rank at the sender's own place in it, by rail.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from deep_ep.counts import NODES, RANKS, Counts
from deep_ep.exchange import exchange
from deep_ep.routes import aligned, by_place, local_ids


@dataclass(frozen=True)
class Hop:
    """Rows that one exchange moved, and what to do with what comes back."""

    tokens: Tensor  # the row that each sent one was
    sent: list[int]  # by rank
    received: list[int]
    num_rows: int  # before it


@dataclass(frozen=True)
class Route:
    """The hops of a dispatch, in order, and how the rows of the last are sorted."""

    hops: tuple[Hop, ...]
    order: Tensor
    sources: Tensor  # of the sorted rows


def nodes_of(inside: Tensor, size: int) -> Tensor:
    """Ranks (n, R) bool as nodes (n, R / size)."""
    return inside.view(len(inside), inside.shape[1] // size, size).any(dim=2)


def send(
    group: dist.ProcessGroup, tensors: list[Tensor], inside: Tensor, size: int, counts: Counts
) -> tuple[list[Tensor], Route]:
    """Send rows to the ranks they are for, inside (n, R); what came, ordered by source and token."""
    rank, n = group.rank(), len(inside)
    source = torch.full((n,), rank, dtype=torch.int64)
    rows, hops = [*tensors, source, torch.arange(n), inside], []
    if size < group.size():
        rows, hop = _hop(group, rows, _to_nodes(inside, rank, size))
        counts.add(NODES, sum(hop.sent) - hop.sent[rank])
        hops.append(hop)
    rows, hop = _hop(group, rows, _inside_node(rows[-1], rank, size))
    counts.add(RANKS, sum(hop.sent) - hop.sent[rank])
    *tensors, source, token, _ = rows
    order = torch.argsort(source * (1 << 40) + token)
    return [t[order] for t in tensors], Route((*hops, hop), order, source[order])


def _to_nodes(inside: Tensor, rank: int, size: int) -> Tensor:
    """(n, R) bool: the rank at this one's place in each node that a token goes to."""
    out = torch.zeros_like(inside)
    out[:, rank % size :: size] = nodes_of(inside, size)
    return out


def _inside_node(inside: Tensor, rank: int, size: int) -> Tensor:
    """(n, R) bool: the ranks of this one's node that a row goes to."""
    out = torch.zeros_like(inside)
    here = slice(rank // size * size, rank // size * size + size)
    out[:, here] = inside[:, here]
    return out


def _hop(group: dist.ProcessGroup, rows: list[Tensor], to: Tensor) -> tuple[list[Tensor], Hop]:
    tokens, sent = by_place(to)
    received, came = exchange(group, [t[tokens] for t in rows], sent)
    return received, Hop(tokens, sent, came, len(to))


def send_back(group: dist.ProcessGroup, x: Tensor, route: Route) -> Tensor:
    """Rows (m, ...) of a dispatch's receivers, summed in float32 on the way back; (n, ...) at their sources."""
    assert len(x) == len(route.order), f"{len(x)} rows come back of {len(route.order)} that were sent"
    rows = torch.empty_like(x)
    rows[route.order] = x
    for hop in reversed(route.hops):
        (back,), _ = exchange(group, [rows], hop.received)
        summed = torch.zeros(hop.num_rows, *x.shape[1:], dtype=torch.float32)
        rows = summed.index_add_(0, hop.tokens, back.float()).to(x.dtype)
    return rows


def with_bias(rows: Tensor, bias: Tensor | tuple[Tensor, Tensor] | None) -> Tensor:
    """Rows plus none, one or two others."""
    return sum((bias,) if isinstance(bias, Tensor) else bias or (), start=rows)


def own_choices(
    ids: Tensor, weights: Tensor, rank: int, num_experts: int, num_ranks: int, alignment: int
) -> tuple[Tensor, Tensor, list[int]]:
    """Received choices (m, K) as this rank sees them, and tokens by expert, rounded up."""
    size = num_experts // num_ranks
    own = local_ids(ids, rank, size)
    counts = torch.bincount(own[own >= 0], minlength=size)
    return own, torch.where(own >= 0, weights, 0.0), aligned(counts, alignment).tolist()
